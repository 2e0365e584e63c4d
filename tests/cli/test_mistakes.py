"""Commands, options and files that people try, and the answers."""

import pytest

from tests.cli.running import run
from tests.networks.small import tiny_net

MISTAKES = {
    "epochs": (["convert", "a", "b", "c.tflite", "--epochs", "3"], "because commands do not train"),
    "a word for a count": (
        ["convert", "a", "b", "c.tflite", "--limit", "many"],
        "'many' is not a valid integer",
    ),
    "a share with its sign": (
        ["convert", "a", "b", "c.tflite", "--min-identical", "100%"],
        "'100%' is not a valid number",
    ),
    "names in front of files": (["convert", "--model", "a"], "pass the model as the first"),
    "running a file": (["run", "m.tflite", "x.npy"], "There is no command 'run': use simulate"),
    "another command": (["quantize", "float.keras"], "There is no command 'quantize': use convert"),
    "help as a command": (["help", "convert"], "use keras-qat COMMAND --help"),
    "an option in front": (["--recipe", "int8", "plan", "a"], "Put --recipe after the command"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes(kind):
    words, answer = MISTAKES[kind]
    assert answer in run(*words, code=2)


def test_labels_as_an_argument(tmp_path):
    tiny_net().save(tmp_path / "float.keras")
    answer = run("evaluate", tmp_path / "float.keras", "x.npy", "y.npy", code=2)
    assert "Pass labels with --labels." in answer


def test_a_file_in_place_of_its_model(tmp_path):
    file = tmp_path / "model.tflite"
    file.write_bytes(b"")
    answer = run("summary", file, code=2)
    assert "model.tflite is a TFLite file. Pass the quantization-aware model" in answer


def test_a_directory_of_other_files(tmp_path):
    tiny_net().save(tmp_path / "float.keras")
    answer = run("calibrate", tmp_path / "float.keras", "x.npy", "-o", tmp_path, code=2)
    assert "is a directory with other files. Name a new directory." in answer
