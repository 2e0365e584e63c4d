"""Tests what a type checker, and thus an editor, knows about the library in a user's script."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import keras_qat

SCRIPT = """
from typing import assert_type

import numpy as np
import keras_qat

model = keras_qat.keras.Sequential()
planned = keras_qat.plan(model, "int8")
assert_type(planned, keras_qat.Plan)
assert_type(planned.rows[0].reason, str)
assert_type(planned.float_layers, dict[str, str])

qat = keras_qat.quantize_model(model, keras_qat.recipes.int8(), scope=["conv"], kernels="tflm")
assert_type(qat, keras_qat.QuantizedModel)
assert_type(qat.recipe, keras_qat.Recipe)
assert_type(qat.kernels, str)
qat.compile("adam", "mse")
qat.fit(np.zeros(3), callbacks=[keras_qat.callbacks.QuantDelay(100)])

x = np.zeros((4, 8), np.float32)
keras_qat.calibrate(qat, x, method="percentile", percentile=99.9)
(first, *_) = keras_qat.quantizers(qat)
assert_type(first, keras_qat.Quantizer)
assert_type(first.quantizes, tuple[str, ...])
assert_type(keras_qat.export_tflite(qat, "model.tflite"), bytes)
report = keras_qat.verify(qat, "model.tflite", x, per_layer=True)
assert_type(report, keras_qat.Report)
assert_type(report.identical, float)
assert_type(keras_qat.simulate(qat, x), keras_qat.Simulation)
assert_type(keras_qat.summary(qat), keras_qat.Summary)
assert_type(keras_qat.summary(qat).layers[0].bits, int | None)
assert_type(keras_qat.resolve(qat), keras_qat.ResolvedGraph)
"""

MISTAKES = {
    'keras_qat.calibrate(1, 2, method="mean")': "method",
    "keras_qat.verify(1, 2, 3)": "verify",
    "keras_qat.plan(1).rowz": "rowz",
}
"""An incorrect line -> the words that the checker must report."""


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    """Returns a function that checks a script strictly against the library, and returns errors."""
    pytest.importorskip("mypy")
    folder = tmp_path_factory.mktemp("types")

    def run(script: str) -> str:
        (folder / "script.py").write_text(script)
        command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary"]
        # TensorFlow and Keras have no types, and following them takes minutes.
        command += ["--ignore-missing-imports", "--follow-imports=silent", "script.py"]
        command += ["--python-version=3.11", "--cache-dir=cache"]
        path = os.environ | {"MYPYPATH": str(Path(keras_qat.__file__).parent.parent)}
        done = subprocess.run(command, cwd=folder, env=path, capture_output=True, text=True)
        return done.stdout + done.stderr

    return run


@pytest.mark.slow
def test_a_script(check):
    assert check(SCRIPT) == ""


@pytest.mark.slow
def test_mistakes_in_a_script(check):
    result = check("import keras_qat\n" + "\n".join(MISTAKES)).splitlines()
    for line, (mistake, name) in enumerate(MISTAKES.items(), start=2):
        assert any(f":{line}:" in item and name in item for item in result), (mistake, result)


def test_everything_public_is_there_and_documented():
    for name in keras_qat.__all__:
        result = getattr(keras_qat, name)
        assert name == "__version__" or (result.__doc__ or "").strip(), name
    assert sorted(keras_qat.__all__) == keras_qat.__all__
    assert (Path(keras_qat.__file__).parent / "py.typed").exists()
