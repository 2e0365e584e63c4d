"""Checks output paths before the work begins."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from keras_qat_cli.models import FILES

__all__ = ["SOURCES", "check_codes", "check_exported", "check_model", "check_page"]

SOURCES = (".cc", ".cpp", ".cxx")

TAKEN = {ending: {"input_dtype", "output_dtype", "input_range", "rescaling"} for ending in SOURCES}
"""Ending of a file -> options of its export. Files in .tflite take all options."""


def check_exported(path: Path, options: Iterable[str]) -> None:
    """Raises a `UsageError` if nothing can be exported to such a file with these options."""
    refused = set(options) - TAKEN.get(path.suffix, {"input_range"})
    if path.suffix != ".tflite" and refused:
        raise click.UsageError(f"{', '.join(sorted(refused))}: for .tflite files only.")
    if _is_file(path) and path.suffix not in (".tflite", ".onnx", *SOURCES):
        raise click.UsageError(
            f"{path}: files to export to end in .tflite, .onnx or {', '.join(SOURCES)}; the "
            f"directory of a SavedModel has no ending, as in 'served'."
        )


def check_model(path: Path, source: Path) -> None:
    """Raises an error if a quantized model cannot or must not be written to a path.

    Args:
        path: the path to write to.
        source: the path of the model that is read.
    """
    from keras_qat.io.atomic_files import check_writable

    if _is_file(path) and path.suffix not in FILES:
        raise ValueError(
            f"{path}: models are written to {', '.join(FILES)} files or directories. "
            f"keras-qat export turns a model into other files."
        )
    if path.resolve() == source.resolve():
        raise ValueError(f"{path} is the model that is read, and would be lost: name another file.")
    check_writable(path, directory=path.suffix not in FILES)


def check_codes(path: Path | None) -> None:
    """Raises an error if codes cannot be written to a path."""
    if path is not None and path.suffix != ".npz":
        raise click.UsageError(f"{path}: codes are written to an .npz file.")
    check_page(path)


def check_page(path: Path | None) -> None:
    """Raises an error if a file cannot be written to a path that is not None."""
    from keras_qat.io.atomic_files import check_writable

    if path is not None:
        check_writable(path)


def _is_file(path: Path) -> bool:
    """Returns whether a name looks like a file's: `served.1` is a directory."""
    return path.suffix[1:].isalpha()
