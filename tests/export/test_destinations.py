"""Tests that exports refuse bad paths before they begin, and lose nothing on a full disk."""

import errno
import os
import stat
from pathlib import Path

import pytest
import tensorflow as tf

import keras_qat


@pytest.fixture
def no_conversion(monkeypatch):
    """Fails if conversion begins. Paths must be checked before."""

    def refuse(*args, **kwargs):
        raise AssertionError("The path was not checked before the work.")

    monkeypatch.setattr("keras_qat.export.tflite.resolve_to_export", refuse)
    monkeypatch.setattr("keras_qat.export.saved_model.resolve_to_export", refuse)


def read_contents(folder: Path) -> dict[Path, bytes | None]:
    """Returns paths in a folder -> contents of the files; None for folders."""
    paths = folder.rglob("*")
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


def holding(name):
    """Returns a function that creates a file in a folder, and returns its path."""

    def write(folder):
        (folder / name).write_bytes(b"precious")
        return folder / name

    return write


def read_only(folder):
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    return folder / "model"


def read_only_file(folder):
    path = holding("model.tflite")(folder)
    path.chmod(stat.S_IRUSR)
    return path


def device(folder):
    os.mkfifo(folder / "model.tflite")
    return folder / "model.tflite"


OTHER_FORMAT = r"is the name of another format\. export_tflite writes"
REFUSED = {
    "a missing folder": (lambda folder: folder / "none" / "m", "does not exist. Create it first"),
    "a read-only folder": (read_only, r"is read-only.*chmod u\+w"),
    "a read-only file": (read_only_file, r"model\.tflite is read-only"),
    "a folder": (lambda folder: folder, "is a directory"),
    "a device": (device, r"model\.tflite: it is a device"),
    "ONNX": (lambda folder: folder / "m.onnx", OTHER_FORMAT),
}
REFUSED_FOLDERS = {
    "a missing folder": REFUSED["a missing folder"],
    "a read-only folder": REFUSED["a read-only folder"],
    "other files": (lambda folder: holding("thesis.txt")(folder).parent, "which holds other files"),
    "a file": (holding("model"), "it is a file"),
}
CASES = [
    *((keras_qat.export_tflite, *case) for case in REFUSED.values()),
    *((keras_qat.export_saved_model, *case) for case in REFUSED_FOLDERS.values()),
]


@pytest.mark.usefixtures("no_conversion")
@pytest.mark.parametrize(("export", "prepare", "message"), CASES)
def test_paths_that_are_refused(export, prepare, message, exported, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    path = prepare(folder)
    before = read_contents(folder)
    if prepare is read_only:  # A superuser may write anywhere.
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises((OSError, ValueError), match=message):
        export(exported.model, path)
    folder.chmod(stat.S_IRWXU)
    assert read_contents(folder) == before


@pytest.mark.legacy
@pytest.mark.parametrize("kind", ["tflite", "saved_model"])
def test_full_disk_leaves_the_old_file(kind, exported, tmp_path, monkeypatch):
    export = getattr(keras_qat, f"export_{kind}")
    path = tmp_path / "model"
    export(exported.model, path)
    before = read_contents(tmp_path)

    def write_half(self, contents):
        with open(self, "wb") as file:
            file.write(contents[: len(contents) // 2])
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    def save_half(module, path, **kwargs):
        os.makedirs(path)
        (Path(path) / "saved_model.pb").write_bytes(b"half")
        raise tf.errors.ResourceExhaustedError(None, None, "variables; No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_half)
    monkeypatch.setattr(tf.saved_model, "save", save_half)
    with pytest.raises(OSError, match=r"No space left.*The file there is unchanged") as info:
        export(exported.model, path)
    assert info.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert read_contents(tmp_path) == before
