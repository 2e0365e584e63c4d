"""Files of models that the command line loads."""

import json

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.keras2.backend import keras
from tests.cli.running import X, run
from tests.helpers import scramble
from tests.networks.small import functional, tiny_net

OLD_KERAS = tuple(map(int, tf.__version__.split(".")[:2])) < (2, 16)

CUSTOM = """
import tensorflow as tf
from keras_qat import keras
@keras.utils.register_keras_serializable("mine")
class Double(keras.layers.Layer):
    def call(self, x):
        return 2.0 * x
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float.h5", "float"], ids=["h5", "SavedModel"])
def test_kinds_of_files(name, tmp_path, monkeypatch):
    """Float and quantization-aware."""
    monkeypatch.chdir(tmp_path)
    scramble(tiny_net()).save(name)
    np.save("x.npy", X)
    quantized = name.replace("float", "qat")
    run("calibrate", name, "x.npy", "-o", quantized)
    run("export", quantized, "model.tflite")
    assert "100.000%" in run("verify", quantized, "model.tflite", "x.npy", "--min-identical", 100)


@pytest.mark.skipif(OLD_KERAS, reason="Keras 3 comes with newer versions of TensorFlow")
def test_files_of_keras_3(tmp_path):
    import keras as keras_3

    model = keras_3.Sequential([keras_3.Input((4,)), keras_3.layers.Dense(3, name="logits")])
    model.save(tmp_path / "model.keras")
    parsed = json.loads(run("plan", tmp_path / "model.keras", "--json"))
    assert [item["tensor"] for item in parsed["tensors"]][1:] == ["logits/kernel", "logits"]


def test_custom_layers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_layers.py").write_text(CUSTOM)
    import my_layers

    functional((4,), build=lambda x: my_layers.Double(name="double")(x)).save("model.h5")
    known = keras.utils.get_custom_objects()
    before = known.pop("mine>Double")
    try:
        told = run("plan", "model.h5", code=2)
        assert "Keras cannot load model.h5. Import custom layers with --import" in told
    finally:
        known["mine>Double"] = before
    assert "double" in run("--import", "my_layers", "plan", "model.h5")
