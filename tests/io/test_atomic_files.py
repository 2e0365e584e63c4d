"""Tests replaced files: links still point to them, and permissions stay."""

import pytest

from keras_qat.io.atomic_files import replacing, write_contents

pytestmark = pytest.mark.legacy


def test_a_link_leads_where_it_led(tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    target, link = folder / "model_1.tflite", tmp_path / "model.tflite"
    target.write_text("old")
    link.symlink_to(target)
    write_contents("new", link)
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert list(folder.iterdir()) == [target]


def test_a_link_to_a_directory_leads_where_it_led(tmp_path):
    (tmp_path / "version_1").mkdir()
    link = tmp_path / "model"
    link.symlink_to(tmp_path / "version_1")
    with replacing(link) as folder:
        folder.mkdir()
        (folder / "saved_model.pb").write_text("new")
    assert link.is_symlink()
    assert (tmp_path / "version_1" / "saved_model.pb").read_text() == "new"


def test_permissions_stay(tmp_path):
    path = tmp_path / "model.tflite"
    path.write_text("old")
    path.chmod(0o600)
    write_contents("new", path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == "new"


def test_a_link_into_a_directory_that_does_not_exist(tmp_path):
    link = tmp_path / "model.tflite"
    link.symlink_to(tmp_path / "missing" / "model.tflite")
    with pytest.raises(FileNotFoundError, match=r"missing does not exist\. Create it first"):
        write_contents("new", link)
