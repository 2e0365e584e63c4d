"""Where results are written: checked before the work begins."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from keras_qat_cli.models import FILES

__all__ = ["SOURCES", "check_codes", "check_exported", "check_model", "check_page"]

SOURCES = (".cc", ".cpp", ".cxx")

TAKEN = {ending: {"input_dtype", "output_dtype", "input_range", "rescaling"} for ending in SOURCES}
"""Ending of a file -> options that its verb takes. Those of .tflite are all of them."""


def check_exported(path: Path, options: Iterable[str]) -> None:
    """Raises a `UsageError` if nothing is exported to such a file, or not with these options."""
    others = set(options) - TAKEN.get(path.suffix, {"input_range"})
    if path.suffix != ".tflite" and others:
        raise click.UsageError(f"{', '.join(sorted(others))}: for .tflite files only.")
    if _is_file(path) and path.suffix not in (".tflite", ".onnx", *SOURCES):
        raise click.UsageError(
            f"{path}: files to export to end in .tflite, .onnx or {', '.join(SOURCES)}; the "
            f"directory of a SavedModel has no ending, as in 'served'."
        )


def check_model(path: Path, source: Path) -> None:
    """Raises an error if a quantized model cannot be written there, or is not to be.

    Args:
        path: where to write it.
        source: what it is made from.
    """
    from keras_qat.io.atomic_files import check_writable

    if _is_file(path) and path.suffix not in FILES:
        raise ValueError(
            f"{path}: models are written to {', '.join(FILES)} files or directories. Of what is "
            f"written there, keras-qat export makes other files."
        )
    if path.resolve() == source.resolve():
        raise ValueError(f"{path} is the model that is read, and would be lost: name another file.")
    check_writable(path, directory=path.suffix not in FILES)


def check_codes(path: Path | None) -> None:
    """Raises an error if no codes can be written there."""
    if path is not None and path.suffix != ".npz":
        raise click.UsageError(f"{path}: codes are written to an .npz file.")
    check_page(path)


def check_page(path: Path | None) -> None:
    """Raises an error if a file cannot be written there, where one is wanted."""
    from keras_qat.io.atomic_files import check_writable

    if path is not None:
        check_writable(path)


def _is_file(path: Path) -> bool:
    """Whether a name looks like that of a file: `served.1` is a directory."""
    return path.suffix[1:].isalpha()
