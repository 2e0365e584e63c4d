"""Tests errors on the command line: messages instead of tracebacks, and exit codes."""

import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from keras_qat_cli.commands import cli
from tests.cli.running import X, run
from tests.networks.small import tiny_net

ERRORS = {
    "plan no.keras": "'no.keras' does not exist",
    "plan x.npy": r"x.npy is not a model. Pass a .*\.keras, \.h5",
    "plan damaged.keras": "damaged.keras is not a Keras model, or it is damaged",
    "verify qat.keras model.tflite no.npy": "There is no file no.npy",
    "export float.keras m.tflite": "float.keras is a float model.*calibrate",
    "verify qat.keras x.npy x.npy": "x.npy is not a TFLite file",
    "convert float.keras x.npy m.tflite --bits 4": "There is no --bits: pass --recipe low_bits",
    "calibrate float.keras x.npy -o no/q.keras": "no does not exist",
    "plan float.keras --scope logit": "Did you mean 'logits'",
    "simulate qat.keras labels.csv": "73 values per row.*72",
    "simulate qat.keras labels.csv --drop lable": "no column lable",
    "simulate qat.keras two.npz --key c": "no array c. Its arrays are: a, b",
    "evaluate qat.keras two.npz --labels y.npy": "^Error: There is no file y.npy",
    "simulate qat.keras wide.npy": r"^Error: wide.npy: .*\(None, 6, 6, 2\)",
    "simulate qat.keras two.npz": "arrays a, b. Choose one with --key",
    "evaluate qat.keras x.npy --labels short.npy": "^Error: short.npy has 5 labels for 40 examples",
    "tune float.keras x.npy wide.npy t.tflite --labels short.npy": (
        "^Error: --labels short.npy cannot have the labels of both DATA and VALIDATION. Pass the"
    ),
    "tune float.keras few.npz x.npz t.tflite --labels y": (
        "^Error: few.npz has 5 labels for 40 examples. Both DATA and VALIDATION need one label"
    ),
    "simulate qat.keras nothing_here:x": "^Error: nothing_here:x: There is no module nothing_here",
    "simulate qat.keras json:x": "json.* has no attribute 'x'",
    "simulate qat.keras .": "contains no images",
    "export qat.keras m.cc --pack-int4": "for .tflite files only",
    "export qat.keras m.cc --batch-size 1": "for .tflite files only",
    "plan float.keras --target ethos": "'ethos' is not one of 'xnnpack', 'tflm'",
    "calibrate float.keras x.npy -o q.tflite": "q.tflite: the model is written to .keras, .h5",
    "calibrate float.keras x.npy -o ./float.keras": (
        "float.keras is the input model and would be overwritten"
    ),
    "export qat.keras m.tfl": "m.tfl: an export is written to .tflite",
    "simulate qat.keras x.npy -o codes.txt": "written to .npz files",
    "simulate qat.keras x.npy -o no/codes.npz": "the directory no does not exist",
    "plan qat.keras": "qat.keras is already quantized. Pass the float",
    "calibrate qat.keras x.npy -o q.keras --recipe int16x8": (
        "already quantized: --recipe is for float models"
    ),
    "plam float.keras": "No such command 'plam'",
    "--import nothing_here plan float.keras": "There is no module nothing_here",
}
"""Command -> the error."""


@pytest.mark.sample(20)
@pytest.mark.parametrize("command", ERRORS)
def test_errors(command, sources, monkeypatch):
    monkeypatch.chdir(sources)
    np.savez("two.npz", a=X, b=X)
    np.savez("few.npz", x=X, y=np.arange(5))
    np.save("wide.npy", X[:, :, :1])
    np.save("short.npy", np.arange(5) % 3)
    Path("damaged.keras").write_bytes(b"PK")
    told = run(*command.split(), code=2)
    assert re.search(ERRORS[command], told.replace("\n", " ")), told
    assert len(told) < 800


def test_debug_shows_tracebacks(files):
    done = CliRunner().invoke(cli, ["--debug", "plan", str(files / "x.npy")])
    assert isinstance(done.exception, ValueError)


@pytest.mark.parametrize("command", cli.commands)
def test_help(command):
    assert "Usage" in run(command, "--help")


MISTAKES = {
    "convert a b c.tflite --epochs 3": "because commands do not train",
    "convert a b c.tflite --limit many": "'many' is not a valid integer",
    "convert a b c.tflite --min-identical 100%": "'100%' is not a valid number",
    "convert --model a": "pass the model as the first",
    "run m.tflite x.npy": "There is no command 'run': use simulate",
    "quantize float.keras": "There is no command 'quantize': use convert",
    "help convert": "use keras-qat COMMAND --help",
    "--recipe int8 plan a": "Put --recipe after the command",
}
"""Command -> the error."""


@pytest.mark.parametrize("command", MISTAKES)
def test_mistakes(command):
    assert MISTAKES[command] in run(*command.split(), code=2)


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
