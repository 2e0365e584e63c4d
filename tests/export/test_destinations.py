"""Paths that exports refuse, before the work begins, and disks that are full: nothing is lost."""

import errno
import os
import stat
from pathlib import Path

import pytest
import tensorflow as tf

import keras_qat

EXPORTS = [keras_qat.export_tflite, keras_qat.export_saved_model]


@pytest.fixture
def no_conversion(monkeypatch):
    """Fails if the work begins: paths have to be checked before."""

    def refuse(*args, **kwargs):
        raise AssertionError("The path was not checked before the work.")

    monkeypatch.setattr("keras_qat.export.tflite.resolve_to_export", refuse)
    monkeypatch.setattr("keras_qat.export.saved_model.resolve_to_export", refuse)


@pytest.mark.usefixtures("no_conversion")
@pytest.mark.parametrize("export", EXPORTS)
def test_missing_directory(exported, export, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"does not exist. Create it first"):
        export(exported.model, tmp_path / "missing" / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_conversion")
@pytest.mark.parametrize("export", EXPORTS)
def test_read_only_directory(exported, export, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    # A superuser may write anywhere: what others are told is tested all the same.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError, match=r"folder is read-only.*chmod u\+w"):
        export(exported.model, folder / "model")
    folder.chmod(stat.S_IRWXU)
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("no_conversion")
def test_read_only_file(exported, tmp_path):
    path = tmp_path / "model.tflite"
    path.write_bytes(b"precious")
    path.chmod(stat.S_IRUSR)
    with pytest.raises(PermissionError, match=r"model\.tflite is read-only"):
        keras_qat.export_tflite(exported.model, path)
    assert path.read_bytes() == b"precious"


@pytest.mark.usefixtures("no_conversion")
def test_directory_in_place_of_a_file(exported, tmp_path):
    with pytest.raises(IsADirectoryError, match="is a directory"):
        keras_qat.export_tflite(exported.model, tmp_path)
    assert tmp_path.is_dir()


@pytest.mark.usefixtures("no_conversion")
def test_directory_with_other_things_in_it(exported, tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="which holds other files"):
        keras_qat.export_saved_model(exported.model, tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


@pytest.mark.usefixtures("no_conversion")
def test_file_in_place_of_a_directory(exported, tmp_path):
    path = tmp_path / "model"
    path.write_text("precious")
    with pytest.raises(NotADirectoryError, match="it is a file"):
        keras_qat.export_saved_model(exported.model, path)
    assert path.read_text() == "precious"


def read_contents(folder: Path) -> dict[Path, bytes | None]:
    """Paths in a folder -> what the files hold; None for folders."""
    paths = folder.rglob("*")
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


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


def test_devices_are_not_replaced(exported, tmp_path):
    os.mkfifo(tmp_path / "model.tflite")
    with pytest.raises(OSError, match=r"model\.tflite: it is a device"):
        keras_qat.export_tflite(exported.model, tmp_path / "model.tflite")
    assert stat.S_ISFIFO((tmp_path / "model.tflite").stat().st_mode)


@pytest.mark.parametrize(
    ("export", "name"), [(keras_qat.export_tflite, "m.onnx"), (keras_qat.export_onnx, "m.tflite")]
)
def test_names_of_other_formats(exported, export, name, tmp_path):
    with pytest.raises(ValueError, match=r"is the name of another format\. export_tflite writes"):
        export(exported.model, tmp_path / name)
    assert list(tmp_path.iterdir()) == []
