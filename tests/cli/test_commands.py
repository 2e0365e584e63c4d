"""The command line: what it takes and gives, its exit codes, and that errors are messages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner

import keras_qat
from keras_qat.analysis.verify import OutputReport, Verdict
from keras_qat.arithmetic.kernel_families import FAMILIES
from keras_qat.frontend.keras2.backend import keras
from keras_qat_cli.commands import cli
from keras_qat_cli.labels import measured
from keras_qat_cli.models import takes_pixels
from keras_qat_cli.options import KERNEL_FAMILIES, TARGETS
from tests.helpers import images, scramble
from tests.networks.small import functional, layers, tiny_net

ROOT = Path(__file__).parent.parent.parent
X = np.clip(images(40, (6, 6, 2)), -3, 3)


def run(*args, code=0):
    """What a command prints; its messages, if it ends with another code than 0."""
    done = CliRunner().invoke(cli, [str(arg) for arg in args])
    assert done.exit_code == code, (done.stdout, done.stderr, done.exception)
    assert "Traceback" not in done.output
    return done.stderr if code else done.stdout


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A float model, data, what `calibrate` makes of them, and its file."""
    folder = tmp_path_factory.mktemp("files")
    scramble(tiny_net()).save(folder / "float.keras")
    np.save(folder / "x.npy", X)
    told = run("calibrate", folder / "float.keras", folder / "x.npy", "-o", folder / "qat.keras")
    assert "from 40 examples" in told
    told = run("export", folder / "qat.keras", folder / "model.tflite")
    assert f"model.tflite: {(folder / 'model.tflite').stat().st_size} bytes" in told
    return folder


def test_diagnosis(files):
    arguments = "diagnose", files / "qat.keras", files / "x.npy"
    qat = keras.models.load_model(files / "qat.keras")
    assert run(*arguments) == f"{keras_qat.diagnose(qat, X)}\n"
    assert json.loads(run(*arguments, "--json"))["examples"] == 20


def test_what_was_made_is_what_python_makes(files):
    qat = keras.models.load_model(files / "qat.keras")
    ranges = [(quantizer.minimum, quantizer.maximum) for quantizer in keras_qat.quantizers(qat)]
    again = keras_qat.quantize_model(keras.models.load_model(files / "float.keras"))
    keras_qat.calibrate(again, X)
    for one, other in zip(keras_qat.quantizers(again), ranges, strict=True):
        np.testing.assert_array_equal([one.minimum, one.maximum], other)
    assert (files / "model.tflite").read_bytes() == keras_qat.export_tflite(qat)


@pytest.mark.slow
def test_methods_of_calibration(files):
    told = run(
        *("calibrate", files / "float.keras", files / "x.npy", "-o", files / "cut.keras"),
        *("--method", "percentile", "--percentile", 90, "--json"),
    )
    image = next(e for e in json.loads(told)["ranges"] if e["tensors"] == ["image"])
    assert image["maximum"] == pytest.approx(np.percentile(X, 90), rel=0.1)


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
    """What is said once holds for all commands that read the model."""
    target, qat, file = ("--target", "tflm"), files / "tflm.keras", files / "tflm.tflite"
    told = run("plan", files / "float.keras", *target, "--strict", "--json")
    assert json.loads(told)["target"] == "tflm"
    run("calibrate", files / "float.keras", files / "x.npy", "-o", qat, *target)
    assert "target: tflm" in run("summary", qat)
    run("export", qat, file)
    assert (
        keras_qat.tflite.interpreter.FileInterpreter(file.read_bytes()).inputs["image"]["shape"][0]
        == 1
    )
    told = run("simulate", qat, files / "x.npy", "--json")
    assert json.loads(told)["kernels"] == "tflm"
    told = run("summary", qat, "--target", "edgetpu", code=2)
    assert "tflm.keras is quantized already: --target is for float models" in told


def test_what_a_target_lacks(tmp_path):
    model = functional((8, 8, 3), build=layers.UpSampling2D(3, interpolation="bilinear"))
    model.save(tmp_path / "float.keras")
    arguments = "plan", tmp_path / "float.keras", "--target", "ethos_u55"
    assert "left to the CPU" in run(*arguments)
    assert "1 operator has no kernel on the target ethos_u55" in run(*arguments, "--strict", code=1)


def test_verify(files):
    paths = files / "qat.keras", files / "model.tflite", files / "x.npy"
    assert "100.000%" in run("verify", *paths, "--min-identical", 100, "--max-difference", 0)
    html = "--html", files / "report.html"
    assert "Same and good: " in run("verify", *paths, "--per-layer", "--limit", 8, *html)
    page = (files / "report.html").read_text()
    assert "<table" in page and "conv" in page and "logits" in page
    assert '<td class="number bar good" style="--length: 100.0%"' in page
    parsed = json.loads(run("verify", *paths, "--json", "--limit", 7, "--kernels", "reference"))
    assert parsed["examples"] == 7
    assert parsed["kernels"] == "reference"
    assert parsed["failed"] == []


def test_verify_asks_for_more_than_a_faithful_file(files):
    """A file of ranges for other numbers is what its model is, and no good."""
    np.save(files / "other.npy", 200 * X)
    np.save(files / "classes.npy", np.arange(len(X)) % 3)
    qat, file = files / "other.keras", files / "other.tflite"
    run("calibrate", files / "float.keras", files / "other.npy", "-o", qat)
    run("export", qat, file)
    paths = qat, file, files / "x.npy", "--min-identical", 100, "--labels", files / "classes.npy"
    told = run("verify", *paths, "--min-agreement", 95, code=1)
    assert "% of the rows have the same argmax as in float (required: 95 %)" in told
    parsed = json.loads(run("verify", *paths, "--json", "--min-agreement", 0))
    assert parsed["agreement"] < 0.95 and parsed["verdict"]["words"] == "same but poor"
    assert 0 < parsed["outputs"][0]["accuracy"] < 1


def test_sensitivity(files):
    paths, html = (files / "float.keras", files / "x.npy"), files / "layers.html"
    told = run("sensitivity", *paths, "--limit", 8, "--html", html, "--budget", 0.6)
    assert re.search(r"^conv .*\n^logits |^logits .*\n^conv ", told, flags=re.M)
    assert "weight_bits=4)" in told and "bytes of weights" in told
    page = html.read_text()
    assert "<table" in page and "conv" in page and "logits" in page
    assert page.count('<td class="number bar noise"') == 2 * page.count("<tr><td>") > 0
    assert page.count('aria-sort="none"') == 4  # Layer, weights, and a column for each of 2 bits.
    options = "--limit", 8, "--bits", 2, "--bits", 8, "--json", "--budget", 0.7
    parsed = json.loads(run("sensitivity", *paths, *options))
    assert set(parsed["layers"][0]["costs"]) == {"2", "8"}
    assert set(parsed["bits"]) == {"conv", "logits"} and parsed["bytes"] > 0
    assert "quantized already" in run("sensitivity", files / "qat.keras", *paths[1:], code=2)


def test_convert(files, tmp_path):
    """One command makes the same file as three, and a trained model keeps its ranges."""
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
    """The figures are those of the model in Python, whichever way labels are given."""
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
    assert "say with --labels where" in run("evaluate", *arguments, code=2)
    few = "--labels", files / "labels.npy", "--limit", 30
    assert "on 30 examples" in run("evaluate", *arguments, *few)


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
    metric, value = measured(np.array(predictions), np.array(labels), "labels.npy")
    assert (metric, value) == (expected[0], pytest.approx(expected[1]))


@pytest.mark.slow
def test_a_file_that_is_not_as_good_as_asked_for(files):
    told = run(
        "calibrate", files / "float.keras", files / "x.npy", "--limit", 1, "-o", files / "o.h5"
    )
    assert "from 1 example" in told
    paths = files / "o.h5", files / "model.tflite", files / "x.npy"
    told = run("verify", *paths, "--min-identical", 100, "--max-difference", "0.5", code=1)
    assert "% of the output values are identical (required: 100 %); the largest" in told
    assert "Warning: The file was exported from other weights or ranges" in told
    run("verify", *paths, "--min-identical", 0)


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


MODULE = """
import numpy as np
x = np.load({path!r})
def representative():
    for row in x:
        yield [row[np.newaxis]]
"""


@pytest.fixture(scope="module")
def sources(files):
    """The same data in every form of files."""
    np.savez(files / "one.npz", anything=X)
    np.savez(files / "x.npz", x=X, y=np.arange(40))
    np.savez(files / "named.npz", image=X, y=np.arange(40))
    rows = X.reshape(40, -1)
    np.savetxt(files / "x.csv", rows, delimiter=",")
    names = ",".join([*(f"p{place}" for place in range(72)), "label"])
    table = np.c_[rows, np.arange(40)]
    np.savetxt(files / "labels.csv", table, delimiter=",", header=names, comments="")
    (files / "prepare.py").write_text(MODULE.format(path=str(files / "x.npy")))
    return files


SOURCES: dict[str, list[str]] = {
    "x.csv": [],
    "one.npz": [],
    "x.npz": [],
    "named.npz": ["--key", "image"],
    "labels.csv": ["--drop", "label"],
    "prepare:x": [],
    "prepare:representative": [],
}


FEW = ("labels.csv", "x.npz", "prepare:representative")
"""Those that are read by default."""


@pytest.mark.parametrize(
    "source",
    [pytest.param(source, marks=[] if source in FEW else pytest.mark.slow) for source in SOURCES],
)
def test_data(source, sources, monkeypatch):
    monkeypatch.chdir(sources)
    monkeypatch.syspath_prepend(str(sources))
    told = run("simulate", "qat.keras", source, "-o", "codes.npz", "--limit", 9, *SOURCES[source])
    assert "(9, 3)" in told
    codes = keras_qat.simulate(keras.models.load_model("qat.keras"), X[:9]).outputs["logits"].codes
    with np.load("codes.npz") as result:
        assert np.abs(result["logits"].astype(int) - codes).max() <= (1 if "csv" in source else 0)


def test_columns_for_several_inputs(tmp_path):
    inputs = [keras.Input((1,), name="age"), keras.Input((1,), name="height")]
    model = keras.Model(inputs, layers.Dense(2)(layers.Concatenate()(inputs)))
    model.save(tmp_path / "float.keras")
    (tmp_path / "people.csv").write_text("height,name,age\n1.8,Ada,40\n1.6,Emmy,30\n")
    told = run(
        *("calibrate", tmp_path / "float.keras", tmp_path / "people.csv", "--drop", "name"),
        *("-o", tmp_path / "qat.keras", "--json"),
    )
    ranges = {load["tensors"][0]: load["maximum"] for load in json.loads(told)["ranges"]}
    assert ranges["age"] >= 40 or ranges["height"] >= 40  # One range for what is concatenated.


@pytest.mark.slow
def test_images(tmp_path):
    """Their sizes become the model's, and their pixels what it was trained on."""
    model = functional((8, 8, 3), build=lambda x: layers.ReLU()(layers.Conv2D(2, 1)(x)))
    model.save(tmp_path / "float.keras")
    (tmp_path / "photos" / "cats").mkdir(parents=True)
    for size in (8, 20):
        image = np.full((size, size, 3), 255, np.uint8)
        contents = tf.io.encode_png(image).numpy()
        (tmp_path / "photos" / "cats" / f"{size}.PNG").write_bytes(contents)
    arguments = (
        "calibrate",
        tmp_path / "float.keras",
        tmp_path / "photos",
        "-o",
        tmp_path / "q.keras",
    )
    assert "add --pixels 0..255, 0..1 or -1..1" in run(*arguments, code=2)
    for pixels, largest in (("0..255", 255), ("0..1", 1), ("-1..1", 1)):
        ranges = json.loads(run(*arguments, "--json", "--pixels", pixels))["ranges"]
        assert ranges[0]["maximum"] == pytest.approx(largest * (1 + 1 / 1019), rel=1e-4)


@pytest.mark.parametrize("scale", [1 / 255, 1 / 127.5, 0.5])
def test_models_that_scale_pixels_themselves(scale, tmp_path):
    """Such a model says what pixels it takes, before and after quantization."""
    model = functional((4, 4, 3), build=lambda x: layers.Conv2D(2, 1)(layers.Rescaling(scale)(x)))
    for name, saved in (("float", model), ("qat", keras_qat.quantize_model(model))):
        saved.save(tmp_path / f"{name}.keras")
        assert takes_pixels(tmp_path / f"{name}.keras") == (scale < 0.1)


ERRORS = {
    "no model": (["plan", "no.keras"], "'no.keras' does not exist"),
    "no model file": (["plan", "x.npy"], r"x.npy is not a model: pass a .*\.keras, \.h5"),
    "damaged": (["plan", "damaged.keras"], "damaged.keras is no Keras model, or it is damaged"),
    "no data": (["verify", "qat.keras", "model.tflite", "no.npy"], "There is no file no.npy"),
    "float model": (
        ["export", "float.keras", "m.tflite"],
        "float.keras is a float model.*calibrate",
    ),
    "no TFLite file": (["verify", "qat.keras", "x.npy", "x.npy"], "x.npy is not a TFLite file"),
    "option of another tool": (
        ["convert", "float.keras", "x.npy", "m.tflite", "--bits", "4"],
        "There is no --bits: give --recipe low_bits",
    ),
    "no directory": (
        ["calibrate", "float.keras", "x.npy", "-o", "no/q.keras"],
        "no does not exist",
    ),
    "scope": (["plan", "float.keras", "--scope", "logit"], "Did you mean 'logits'"),
    "other columns": (["simulate", "qat.keras", "labels.csv"], "73 numbers in a row.*72"),
    "no column": (["simulate", "qat.keras", "labels.csv", "--drop", "lable"], "no column lable"),
    "no array": (["simulate", "qat.keras", "two.npz", "--key", "c"], "no array c, but a, b"),
    "no labels": (
        ["evaluate", "qat.keras", "two.npz", "--labels", "y.npy"],
        "^Error: There is no file y.npy",
    ),
    "shapes": (["simulate", "qat.keras", "wide.npy"], r"^Error: wide.npy: .*\(None, 6, 6, 2\)"),
    "several arrays": (["simulate", "qat.keras", "two.npz"], "arrays a, b: choose one with --key"),
    "other labels": (
        ["evaluate", "qat.keras", "x.npy", "--labels", "short.npy"],
        "^Error: short.npy: there are 5 labels for 40 examples",
    ),
    "no module": (
        ["simulate", "qat.keras", "nothing_here:x"],
        "^Error: nothing_here:x: There is no module nothing_here",
    ),
    "no name": (["simulate", "qat.keras", "json:x"], "json.* has no attribute 'x'"),
    "no images": (["simulate", "qat.keras", "."], "has no images"),
    "option": (["export", "qat.keras", "m.onnx", "--pack-int4"], "for .tflite files only"),
    "source": (["export", "qat.keras", "m.cc", "--batch-size", "1"], "for .tflite files only"),
    "target": (
        ["plan", "float.keras", "--target", "ethos"],
        "'ethos' is not one of 'xnnpack', 'tflm'",
    ),
    "calibrated to TFLite": (
        ["calibrate", "float.keras", "x.npy", "-o", "q.tflite"],
        "q.tflite: the model is written to .keras, .h5",
    ),
    "calibrated in place": (
        ["calibrate", "float.keras", "x.npy", "-o", "./float.keras"],
        "float.keras is the model that is read, and would be lost",
    ),
    "ending": (["export", "qat.keras", "m.tfl"], "m.tfl: an export is written to .tflite, .onnx"),
    "codes": (["simulate", "qat.keras", "x.npy", "-o", "codes.txt"], "written to .npz files"),
    "no directory for codes": (
        ["simulate", "qat.keras", "x.npy", "-o", "no/codes.npz"],
        "the directory no does not exist",
    ),
    "no directory for a page": (
        ["verify", "qat.keras", "model.tflite", "x.npy", "--html", "no/page.html"],
        "the directory no does not exist",
    ),
    "planned twice": (["plan", "qat.keras"], "qat.keras is quantized already. Pass the float"),
    "recipe of a quantized model": (
        ["calibrate", "qat.keras", "x.npy", "-o", "q.keras", "--recipe", "int16x8"],
        "quantized already: --recipe is for float models",
    ),
    "command": (["plam", "float.keras"], "No such command 'plam'"),
    "import": (
        ["--import", "nothing_here", "plan", "float.keras"],
        "There is no module nothing_here",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case, sources, monkeypatch):
    monkeypatch.chdir(sources)
    np.savez("two.npz", a=X, b=X)
    np.save("wide.npy", X[:, :, :1])
    np.save("short.npy", np.arange(5) % 3)
    Path("damaged.keras").write_bytes(b"PK")
    args, message = ERRORS[case]
    told = run(*args, code=2)
    assert re.search(message, told.replace("\n", " ")), told
    assert len(told) < 800


def test_debug_shows_tracebacks(files):
    done = CliRunner().invoke(cli, ["--debug", "plan", str(files / "x.npy")])
    assert isinstance(done.exception, ValueError)


@pytest.mark.parametrize("command", cli.commands)
def test_help(command):
    assert "Usage" in run(command, "--help")


@pytest.mark.slow
def test_as_a_program(files):
    """Standard output holds nothing but the result."""
    program = [sys.executable, "-m", "keras_qat", "verify", "--json", "--min-identical", "100"]
    paths = [str(files / name) for name in ("qat.keras", "model.tflite", "x.npy")]
    done = subprocess.run([*program, *paths], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["identical"] == 1


def test_nothing_waits_for_tensorflow(files):
    """Neither completion nor help does, and neither do arguments that cannot be used."""
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
    assert set(FAMILIES) == set(KERNEL_FAMILIES)


def test_the_rounding_of_servers(files):
    arguments = files / "qat.keras", files / "x.npy", "--kernels", "onnxruntime"
    told = run("evaluate", *arguments, "--labels", files / "labels.npy")
    assert "in integers (onnxruntime kernels)" in told
    written = "-o", files / "server.npz"
    assert json.loads(run("simulate", *arguments, *written, "--json"))["kernels"] == "onnxruntime"
    qat = keras.models.load_model(files / "qat.keras")
    qat.kernels = "onnxruntime"
    expected = keras_qat.simulate(qat, X).outputs["logits"].codes
    with np.load(files / "server.npz") as codes:
        np.testing.assert_array_equal(codes["logits"], expected)
    files_only = files / "qat.keras", files / "model.tflite", files / "x.npy"
    assert "'onnxruntime' is not one of" in run(
        "verify", *files_only, "--kernels", "onnxruntime", code=2
    )


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
