"""Writes files atomically: a failed write leaves the previous file unchanged."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import tensorflow as tf

Contents = TypeVar("Contents", str, bytes)


def check_writable(path: str | os.PathLike[str], directory: bool = False) -> Path:
    """Returns a path, or raises an error with advice if it cannot be written.

    Args:
        path: where to write.
        directory: whether to write a SavedModel instead of a file. A directory with other files is
            never replaced.
    """
    path = Path(path)
    parent = Path(os.path.realpath(path)).parent if path.is_symlink() else path.parent
    if not parent.is_dir():
        raise FileNotFoundError(
            f"Cannot write {path}: the directory {parent} does not exist. Create it first."
        )
    read_only = path.exists() and not path.stat().st_mode & 0o222
    if read_only or not os.access(parent, os.W_OK):
        raise PermissionError(
            f"Cannot write {path}: {path if read_only else parent} is read-only. Choose "
            f"another path, or make it writable (chmod u+w)."
        )
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(f"Cannot write {path}: it is a device. Pass the path of a file.")
    if path.is_dir() and not directory:
        raise IsADirectoryError(f"Cannot write {path}: it is a directory. Add a file name.")
    if path.suffix in (".keras", ".h5") and not path.exists():
        raise ValueError(
            f"Cannot write {path}: Keras would load a file of that name as a model. Use the "
            f"format's suffix, such as .tflite."
        )
    if path.is_file() and path.suffix in (".keras", ".h5"):
        raise FileExistsError(
            f"Cannot write {path}: an export would replace the saved Keras model there. Choose "
            f"another name."
        )
    if directory and path.is_file():
        raise NotADirectoryError(
            f"Cannot write {path}: it is a file, but a SavedModel is a directory. Choose another "
            f"path, or delete the file."
        )
    if path.is_dir() and any(path.iterdir()) and not (path / "saved_model.pb").exists():
        raise FileExistsError(
            f"Cannot write {path}: a SavedModel would replace the directory, which holds other "
            f"files. Choose another path, or empty the directory."
        )
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path, and moves the file there to `path` if the block succeeds.

    If the block fails, a file or directory at `path` is unchanged. Links and the permissions of a
    file are kept.

    Raises:
        OSError: if the disk is full.
    """
    name, path = path.name, Path(os.path.realpath(path))
    try:
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise _explain_error(error, path) from error
    try:
        (scratch / "new").mkdir()
        new, old = scratch / "new" / name, scratch / "old"  # Keras requires the suffix.
        yield new
        if path.is_dir():
            path.rename(old)
        elif path.exists():
            shutil.copymode(path, new)
        new.replace(path)
    except (OSError, tf.errors.OpError) as error:
        raise _explain_error(error, path) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_contents(contents: Contents, path: str | os.PathLike[str] | None) -> Contents:
    """Writes text or bytes to a file, unless `path` is None, and returns the contents."""
    if path is not None:
        with replacing(check_writable(path)) as file:
            file.write_bytes(contents.encode() if isinstance(contents, str) else contents)
    return contents


@contextmanager
def saving_to(path: object, suffixes: tuple[str, ...], saved_model: bool = False) -> Iterator[Any]:
    """Yields a temporary path, and moves the result to `path` if the block succeeds.

    Yields `path` itself if it cannot be replaced: an open file, a URL, a device, or a folder that
    is not a SavedModel.

    Args:
        path: the destination.
        suffixes: suffixes of files that are replaced.
        saved_model: whether a path without such a suffix is a SavedModel, and is replaced, too.
    """
    if not isinstance(path, (str, os.PathLike)):
        yield path
        return
    target = Path(os.path.realpath(path))
    if os.fspath(path).endswith(suffixes):
        can_be_replaced = not target.exists() or target.is_file()
    else:
        can_be_replaced = saved_model and (not target.exists() or _is_saved_model(target))
    if can_be_replaced and target.parent.is_dir() and os.access(target.parent, os.W_OK):
        with replacing(target) as scratch:
            yield str(scratch)
    else:
        yield path


def _is_saved_model(folder: Path) -> bool:
    """Return whether a folder contains a SavedModel and no other files."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    known = {"saved_model.pb", "keras_metadata.pb", "fingerprint.pb", "variables", "assets"}
    return "saved_model.pb" in names and names <= known


def _explain_error(error: Exception, path: Path) -> Exception:
    """Return a clear error if the disk is full, and any other error unchanged."""
    if getattr(error, "errno", None) != errno.ENOSPC and "No space left" not in str(error):
        return error
    state = "The file there is unchanged" if path.exists() else "Nothing was written"
    return OSError(
        errno.ENOSPC,
        f"Cannot write {path}: No space left on device. {state}. Free some space, or choose "
        f"another path.",
    )
