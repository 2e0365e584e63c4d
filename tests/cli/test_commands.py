"""Tests the command line: arguments, output, exit codes, and what it imports."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import keras_qat
from keras_qat.analysis.verify import OutputReport, Verdict
from keras_qat.arithmetic.kernel_families import FAMILIES
from keras_qat.keras2.backend import keras
from keras_qat_cli.labels import measure_accuracy
from keras_qat_cli.options import KERNELS, TARGETS
from tests.cli.running import X, run
from tests.helpers import quantize_on
from tests.networks.small import functional, layers

ROOT = Path(__file__).parent.parent.parent


def test_what_was_made_is_what_python_makes(files):
    qat = keras.models.load_model(files / "qat.keras")
    ranges = [(quantizer.minimum, quantizer.maximum) for quantizer in keras_qat.quantizers(qat)]
    again = quantize_on(keras.models.load_model(files / "float.keras"), X)
    for one, other in zip(keras_qat.quantizers(again), ranges, strict=True):
        np.testing.assert_array_equal([one.minimum, one.maximum], other)
    assert (files / "model.tflite").read_bytes() == keras_qat.export_tflite(qat)


def test_plan_and_summary(files):
    assert "conv/kernel" in run("plan", files / "float.keras")
    parsed = json.loads(run("plan", files / "float.keras", "--scope", "logits", "--json"))
    assert set(parsed["float_layers"]) == {"conv", "bn", "relu", "flatten"}
    told = run("plan", files / "float.keras", "--scope", "logits", "--strict", code=1)
    assert "4 layers stay in float: conv" in told
    for name in ("float", "qat"):
        parsed = json.loads(run("summary", files / f"{name}.keras", "--json"))
        assert parsed["weight_bytes"] == 292
        assert (parsed["layers"][0]["scale"] is None) == (name == "float")


def test_targets(files):
    """A target is saved with the model, and holds for all later commands."""
    target, qat, file = ("--target", "tflm"), files / "tflm.keras", files / "tflm.tflite"
    told = run("plan", files / "float.keras", *target, "--strict", "--json")
    assert json.loads(told)["target"] == "tflm"
    run("calibrate", files / "float.keras", files / "x.npy", "-o", qat, *target)
    assert "target: tflm" in run("summary", qat)
    run("export", qat, file)
    exported = keras_qat.tflite.interpreter.FileInterpreter(file.read_bytes())
    assert exported.inputs["image"].shape[0] == 1
    told = run("simulate", qat, files / "x.npy", "--json")
    assert json.loads(told)["kernels"] == "tflm"
    told = run("summary", qat, "--target", "edgetpu", code=2)
    assert "tflm.keras is already quantized: --target is for float models" in told


def test_what_a_target_lacks(tmp_path):
    model = functional((8, 8, 3), build=layers.UpSampling2D(3, interpolation="bilinear"))
    model.save(tmp_path / "float.keras")
    arguments = "plan", tmp_path / "float.keras", "--target", "ethos_u55"
    assert "left to the CPU" in run(*arguments)
    assert "1 operator has no kernel on the target ethos_u55" in run(*arguments, "--strict", code=1)


def test_verify(files):
    paths = files / "qat.keras", files / "model.tflite", files / "x.npy"
    assert "100.000%" in run("verify", *paths, "--min-identical", 100, "--max-difference", 0)
    assert "Same and good: " in run("verify", *paths, "--per-layer", "--limit", 8)
    parsed = json.loads(run("verify", *paths, "--json", "--limit", 7, "--kernels", "reference"))
    assert parsed["examples"] == 7
    assert parsed["kernels"] == "reference"
    assert parsed["failed"] == []


@pytest.mark.slow
def test_verify_asks_for_more_than_a_faithful_file(files):
    """A file with wrong ranges equals its model, but the model is not good."""
    np.save(files / "other.npy", 200 * X)
    np.save(files / "classes.npy", np.arange(len(X)) % 3)
    qat, file = files / "other.keras", files / "other.tflite"
    run("calibrate", files / "float.keras", files / "other.npy", "-o", qat, "--accept-data")
    run("export", qat, file)
    poor = "the model has low accuracy, see the verdict (--min-agreement"
    assert poor in run("verify", qat, file, files / "x.npy", code=1)
    assert poor in run("convert", qat, files / "x.npy", files / "again.tflite", code=1)
    paths = qat, file, files / "x.npy", "--min-identical", 100, "--labels", files / "classes.npy"
    assert poor in run("verify", *paths, code=1)
    told = run("verify", *paths, "--min-agreement", 95, code=1)
    assert "% of the rows have the same argmax as in float (required: 95 %)" in told
    parsed = json.loads(run("verify", *paths, "--json", "--min-agreement", 0))
    assert parsed["agreement"] < 0.95 and parsed["verdict"]["words"] == "same but poor"
    assert 0 < parsed["outputs"][0]["accuracy"] < 1


def test_data_that_are_warned_of_are_a_failure(files, tmp_path):
    keras.utils.set_random_seed(0)
    scaled = layers.BatchNormalization(name="norm")
    model = functional((6, 6, 2), build=lambda x: layers.Conv2D(3, 3)(scaled(x)))
    scaled.set_weights([np.ones(2), np.zeros(2), np.zeros(2), np.full(2, 0.1)])
    model.save(tmp_path / "float.keras")
    np.save(tmp_path / "raw.npy", np.clip(255 * np.abs(X) / 3, 0, 255))
    paths = tmp_path / "float.keras", tmp_path / "raw.npy"
    file, qat = tmp_path / "model.tflite", tmp_path / "qat.keras"
    for command in (("convert", *paths, file), ("calibrate", *paths, "-o", qat)):
        told = run(*command, code=1)
        assert "not prepared as in training" in told and "--accept-data" in told
        run(*command, "--accept-data")
    assert file.exists() and qat.exists()


def test_convert(files, tmp_path):
    """One command writes the same file as three, and keeps the ranges of a trained model."""
    file, qat = tmp_path / "model.tflite", tmp_path / "qat.keras"
    told = run("convert", files / "float.keras", files / "x.npy", file, "--save", qat)
    assert f"{file.stat().st_size} bytes, ranges from 40 examples" in told
    assert "100.000%" in told
    assert file.read_bytes() == (files / "model.tflite").read_bytes()
    np.save(tmp_path / "other.npy", X[:3] / 2)
    told = run("convert", qat, tmp_path / "other.npy", tmp_path / "again.tflite")
    assert "its own ranges" in told
    assert (tmp_path / "again.tflite").read_bytes() == file.read_bytes()


def test_convert_fails_below_the_required_share(files, tmp_path, monkeypatch):
    output = OutputReport(0.9, 1, 0.1, "logits", None)
    report = keras_qat.Report(4, "xnnpack", (output,), Verdict("same"))
    monkeypatch.setattr(keras_qat, "verify", lambda *arguments, **options: report)
    paths = files / "qat.keras", files / "x.npy", tmp_path / "model.tflite"
    assert "90.0000 % of the output" in run("convert", *paths, "--min-identical", 95, code=1)
    run("convert", *paths, "--min-identical", 90)


def test_evaluate(files):
    """The figures equal the model's in Python, with labels in every format."""
    qat = keras.models.load_model(files / "qat.keras")
    labels = qat.predict(X, verbose=0).argmax(-1)
    labels[:10] = (labels[:10] + 1) % 3
    in_float = keras.models.load_model(files / "float.keras").predict(X, verbose=0).argmax(-1)
    np.save(files / "labels.npy", labels)
    np.savez(files / "labelled.npz", image=X, y=np.eye(3)[labels])
    names = ",".join([*(f"p{index}" for index in range(72)), "kind"])
    table = np.c_[X.reshape(40, -1), labels]
    np.savetxt(files / "kinds.csv", table, delimiter=",", header=names, comments="")
    for data, given in (("x.npy", files / "labels.npy"), ("labelled.npz", "y")):
        told = run("evaluate", files / "qat.keras", files / data, "--labels", given, "--json")
        result = json.loads(told)
        assert (result["metric"], result["examples"]) == ("accuracy", 40)
        assert result["values"] == {
            "in integers (xnnpack kernels)": 0.75,
            "in float": pytest.approx(np.mean(in_float == labels)),
        }
    told = run("evaluate", files / "float.keras", files / "kinds.csv", "--labels", "kind")
    assert "accuracy on 40 examples" in told and "integers" not in told
    arguments = files / "qat.keras", files / "x.npy"
    told = run("evaluate", *arguments, "--labels", files / "labels.npy", "--kernels", "tflm")
    assert "in integers (tflm kernels)" in told
    assert "contains no labels. Pass --labels" in run("evaluate", *arguments, code=2)
    few = "--labels", files / "labels.npy", "--limit", 30
    assert "on 30 examples" in run("evaluate", *arguments, *few)


def test_several_outputs(tmp_path):
    """Each output with labels is measured, also by `verify`."""
    keras.utils.set_random_seed(0)
    x = keras.Input((6, 6, 2), name="image")
    hidden = layers.Flatten()(x)
    outputs = [layers.Dense(3, name="kind")(hidden), layers.Dense(1, name="size")(hidden)]
    model = keras.Model(x, outputs, name="two")
    qat = quantize_on(model, X)
    qat.save(tmp_path / "two.keras")
    keras_qat.export_tflite(qat, tmp_path / "two.tflite")
    kinds, sizes = model.predict(X, verbose=0)
    kinds = kinds.argmax(-1)
    np.savez(tmp_path / "x.npz", image=X, kind=kinds)
    np.save(tmp_path / "sizes.npy", sizes + 1)
    paths = tmp_path / "two.keras", tmp_path / "x.npz"
    labels = "--labels", "kind=kind", "--labels", f"size={tmp_path / 'sizes.npy'}"
    told = run("evaluate", *paths, *labels)
    assert "kind: accuracy on 40 examples\nin float                           100.00%" in told
    assert "size: mean absolute error on 40 examples\nin float    " in told
    result = json.loads(run("evaluate", *paths, *labels, "--json"))["outputs"]
    in_integers = [output["values"]["in integers (xnnpack kernels)"] for output in result.values()]
    predicted = qat.predict(X, verbose=0)
    assert in_integers[0] == np.mean(predicted[0].argmax(-1) == kinds)
    assert in_integers[1] == pytest.approx(np.mean(np.abs(predicted[1] - sizes - 1)))
    verified = tmp_path / "two.keras", tmp_path / "two.tflite", tmp_path / "x.npz"
    report = json.loads(run("verify", *verified, *labels[:2], "--json"))
    assert report["outputs"][0]["name"] == "kind"
    assert [output["accuracy"] is None for output in report["outputs"]] == [False, True]
    told = run("evaluate", *paths, "--labels", "kind", code=2)
    assert "has the outputs kind, size. Name the output" in told and "--labels kind=kind" in told
    told = run("evaluate", *paths, "--labels", "sort=kind", code=2)
    assert "labels for 'sort', but 'two' has the outputs kind, size" in told
    assert "was passed 2 times" in run("evaluate", *paths, "--labels", "a", "--labels", "b", code=2)


@pytest.mark.parametrize(
    ("predictions", "labels", "expected"),
    [
        ([[0.2, 0.8], [0.6, 0.4]], [1, 1], ("accuracy", 0.5)),
        ([[0.2, 0.8], [0.6, 0.4]], [[1], [0]], ("accuracy", 1.0)),
        ([[0.2], [0.6]], [0, 1], ("accuracy", 1.0)),
        ([[-2.0], [0.3]], [0, 1], ("accuracy", 1.0)),
        ([[0.5, 2.0]], [[1.0, 1.5]], ("mean absolute error", 0.5)),
        ([[7.0], [8.0]], [6, 10], ("mean absolute error", 1.5)),
        ([[[0.1, 0.9], [0.9, 0.1]]], [[1, 1]], ("accuracy", 0.5)),
    ],
)
def test_metrics(predictions, labels, expected):
    metric, value = measure_accuracy(np.array(predictions), np.array(labels), "labels.npy")
    assert (metric, value) == (expected[0], pytest.approx(expected[1]))


def test_labels_of_another_shape():
    with pytest.raises(ValueError, match=r"labels.npy: labels of shape \(2, 3\) do not match"):
        measure_accuracy(np.zeros((2, 10)), np.ones((2, 3)), "labels.npy")


def test_simulate(files):
    golden = files / "golden.npz"
    told = run(
        "simulate", files / "qat.keras", files / "x.npy", "-o", golden, "--kernels", "reference"
    )
    assert "logits: int8 (40, 3), scale 0." in told
    simulated = keras_qat.simulate(keras.models.load_model(files / "qat.keras"), X, "reference")
    with np.load(golden) as codes:
        assert set(codes) == set(simulated.tensors)
        np.testing.assert_array_equal(codes["logits"], simulated.outputs["logits"].codes)
    outputs = json.loads(run("simulate", files / "qat.keras", files / "x.npy", "--json"))["outputs"]
    assert outputs["logits"]["zero_point"] == simulated.outputs["logits"].zero_point


@pytest.mark.slow
def test_as_a_program(files):
    """Standard output only contains the result."""
    program = [sys.executable, "-m", "keras_qat", "verify", "--json", "--min-identical", "100"]
    paths = [str(files / name) for name in ("qat.keras", "model.tflite", "x.npy")]
    done = subprocess.run([*program, *paths], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["identical"] == 1


def test_nothing_waits_for_tensorflow(files):
    """Completion, help and invalid arguments do not import TensorFlow."""
    unusable = [
        "plan qat.keras",
        "summary x.npy",
        "export float.keras m.tflite",
        "convert float.keras no.npy m.tflite",
        "convert float.keras x.npy no/m.tflite",
        "evaluate qat.keras x.npy",
        "--import nothing_here plan float.keras",
    ]
    code = (
        "import os, sys, keras_qat_cli\n"
        "from keras_qat_cli.commands import cli\n"
        f"for line in {unusable}:\n"
        "    try:\n        cli(line.split())\n"
        "    except SystemExit as end:\n        assert end.code == 2, line\n"
        "try:\n"
        "    os.environ['_KERAS_QAT_COMPLETE'] = 'bash_source'\n"
        "    keras_qat_cli.main()\n"
        "finally:\n    assert 'tensorflow' not in sys.modules\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        cwd=files,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "_keras_qat_completion" in shown.stdout
    assert shown.stderr.count("Error: ") == len(unusable) and "AssertionError" not in shown.stderr


def test_all_targets_are_listed():
    assert keras_qat.targets.known()[: len(TARGETS)] == TARGETS


def test_all_kernel_families_are_listed():
    assert set(FAMILIES) == set(KERNELS)


def test_files_for_microcontrollers(files, tmp_path):
    run("export", files / "qat.keras", tmp_path / "model.tflite", "--batch-size", 1)
    run("export", files / "qat.keras", tmp_path / "model.cc", "--output-dtype", "int8")
    size = (tmp_path / "model.tflite").stat().st_size
    assert f"kFileSize = {size};" in (tmp_path / "model.cc").read_text()
    assert (tmp_path / "model.h").exists()


def test_files_of_pixels_for_a_target(files, tmp_path):
    path, pixels = tmp_path / "model.tflite", ("--input-dtype", "uint8", "--rescaling", 1 / 255, 0)
    run("export", files / "qat.keras", path, "--target", "tflm", *pixels)
    (image,) = keras_qat.TFLiteModel(path).inputs.values()
    assert image.dtype == "uint8"
    assert image.shape[0] == 1


def test_the_best_file_is_written(files):
    """Classes are judged by accuracy. The saved model computes the same as the file."""
    model = keras.models.load_model(files / "float.keras")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.save(files / "compiled.keras")
    classes = model.predict(X, verbose=0).argmax(-1)
    np.savez(files / "more.npz", x=np.concatenate([X, X + 0.01]), y=np.tile(classes, 2))
    np.savez(files / "seen.npz", x=X, y=classes)
    np.savez(files / "others.npz", x=X + 0.02, y=classes)
    file, saved = files / "tuned.tflite", files / "tuned.keras"
    options = file, "--max-drop", 50, "--minutes", 1, "--labels", "y", "--save", saved
    arguments = "tune", files / "compiled.keras", files / "more.npz"
    assert "40 of 40 validation examples" in run(*arguments, files / "seen.npz", *options, code=2)
    result = json.loads(run(*arguments, files / "others.npz", *options, "--json"))
    assert (result["metric"], result["best"]["size"]) == ("accuracy", file.stat().st_size)
    assert "100.000%" in run("verify", saved, file, files / "x.npy")


@pytest.mark.slow
def test_a_budget_that_is_not_met_is_exit_status_1(files):
    model = keras.models.load_model(files / "float.keras")
    labels = model.predict(X + 0.02, verbose=0)
    model.compile("adam", "mse")
    model.save(files / "compiled.keras")
    np.savez(files / "judged.npz", x=X + 0.02, y=labels)
    np.savez(files / "train.npz", x=X, y=labels)
    said = run(
        *("tune", files / "compiled.keras", files / "train.npz", files / "judged.npz"),
        *(files / "tuned.tflite", "--labels", "y", "--max-drop", 0, "--minutes", 0.01),
        code=1,
    )
    assert "loses more than 0 points" in said
    assert (files / "tuned.tflite").exists()
