"""Checks output paths before the work begins."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from keras_qat_cli.models import FILES

__all__ = ["SOURCES", "OutputFile"]

SOURCES = (".cc", ".cpp", ".cxx")


class OutputFile(click.Path):
    """A file or directory to write, whose folder has to exist.

    Args:
        what: what is written, for messages.
        endings: endings of its files; none for any.
        directory: whether the directory of a SavedModel, which has no ending, can be written.
    """

    def __init__(self, what: str, *endings: str, directory: bool = False) -> None:
        super().__init__(path_type=Path)
        self.what, self.endings, self.directory = what, endings, directory

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Returns the path if something can be written there."""
        path = Path(str(super().convert(value, param, ctx)))
        is_directory = self.directory and not path.suffix[1:].isalpha()  # served.1 is a directory.
        if self.endings and path.suffix not in self.endings and not is_directory:
            or_directory = ", or to a directory (a name without an ending)" * self.directory
            raise ValueError(
                f"{path}: {self.what} is written to {', '.join(self.endings)} files{or_directory}."
            )
        if path.is_dir() and not is_directory:
            raise ValueError(f"{path} is a directory. Name a file in it.")
        has_other_files = path.is_dir() and not (path / "saved_model.pb").exists()
        if has_other_files and any(path.iterdir()):
            raise ValueError(f"{path} is a directory with other files. Name a new directory.")
        if not path.parent.is_dir():
            raise ValueError(
                f"{path}: the directory {path.parent} does not exist. Create it first."
            )
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"{path} is read-only. Choose another path.")
        if path.suffix in FILES and path.suffix not in self.endings and path.exists():
            raise ValueError(
                f"{path} is a saved Keras model, which would be overwritten. Choose another name."
            )
        return path
