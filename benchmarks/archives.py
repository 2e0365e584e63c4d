"""Reading `.keras` files without the wait that is not ours."""

from __future__ import annotations

import contextlib
import io
import zipfile
from collections.abc import Iterator
from typing import Any

__all__ = ["whole_weights"]


@contextlib.contextmanager
def whole_weights() -> Iterator[None]:
    """Runs a block in which weights are read from `.keras` files at once.

    `zipfile` before Python 3.12 goes back in a file by reading all of it anew, and Keras goes
    back for every weight: half a minute for ResNet50, and hours for the largest models.
    """
    original: Any = zipfile.ZipFile.open

    def open_whole(self: Any, name: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        file = original(self, name, mode, *rest, **options)
        return io.BytesIO(file.read()) if mode == "r" and str(name).endswith(".h5") else file

    zipfile.ZipFile.open = open_whole  # type: ignore[method-assign]
    try:
        yield
    finally:
        zipfile.ZipFile.open = original  # type: ignore[method-assign]
