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
    """Raises an error with advice if `path` cannot be written. Returns `path` as a `Path`.

    Args:
        path: where to write.
        directory: True for a SavedModel, False for a file. A directory with other files is never
            replaced.
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
    """Yields a temporary path. If the block succeeds, the file there replaces `path`.

    If the block fails, `path` is unchanged. The permissions of a file are kept. If `path` is a
    symbolic link, the file that it points to is replaced.
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
    """Writes text or bytes to `path`, and returns them. If `path` is None, writes nothing."""
    if path is not None:
        with replacing(check_writable(path)) as file:
            file.write_bytes(contents.encode() if isinstance(contents, str) else contents)
    return contents


@contextmanager
def saving_to(path: object, suffixes: tuple[str, ...], saved_model: bool = False) -> Iterator[Any]:
    """Yields a temporary path. If the block succeeds, the model saved there replaces `path`.

    Some paths cannot be replaced: open files, URLs, devices, and folders without a SavedModel. For
    these, the function yields `path` itself.

    Args:
        path: the destination.
        suffixes: endings of paths that are files, such as ".h5".
        saved_model: True if paths with other endings are SavedModels. If False, the function
            yields such a path itself.
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
    """Return True if a folder contains a SavedModel and no other files."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    known = {"saved_model.pb", "keras_metadata.pb", "fingerprint.pb", "variables", "assets"}
    return "saved_model.pb" in names and names <= known


def _explain_error(error: Exception, path: Path) -> Exception:
    """Return an error with advice if the disk is full. Return other errors unchanged."""
    if getattr(error, "errno", None) != errno.ENOSPC and "No space left" not in str(error):
        return error
    state = "The file there is unchanged" if path.exists() else "Nothing was written"
    return OSError(
        errno.ENOSPC,
        f"Cannot write {path}: No space left on device. {state}. Free some space, or choose "
        f"another path.",
    )
