"""Tests that a SavedModel with unknown classes or functions is refused: it has no code to read."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import build_model, keras, layers


def hard_gate(x):
    return x * tf.nn.relu6(x + 3.0)


class Scale(layers.Layer):
    def build(self, shape):
        self.g = self.add_weight("g", (shape[-1],), initializer="ones")

    def call(self, x):
        return x * self.g


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        return self.dense(x)


def functional(layer):
    return build_model((4, 6), lambda x: layers.Dense(2)(layer(x)))


def subclassed():
    model = Subclassed()
    model(np.ones((2, 4), np.float32))
    return model


MODELS = {
    "activation": (lambda: functional(layers.Dense(5, hard_gate)), "hard_gate"),
    "layer": (lambda: functional(Scale()), "Scale"),
    "wrapped": (lambda: functional(layers.TimeDistributed(Scale(), name="td")), "Scale"),
    "model": (subclassed, "Subclassed"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_unknown_code_is_named(name, tmp_path):
    make, missing = MODELS[name]
    make().save(tmp_path / "saved", save_format="tf")
    revived = keras.models.load_model(tmp_path / "saved", compile=False)
    for verb in (keras_qat.plan, keras_qat.quantize_model):
        with pytest.raises(ValueError, match=rf"custom_objects={{'{missing}': {missing}}}"):
            verb(revived)


def test_known_code_is_quantized(tmp_path):
    functional(layers.Dense(5, hard_gate)).save(tmp_path / "saved", save_format="tf")
    custom = {"hard_gate": hard_gate}
    loaded = keras.models.load_model(tmp_path / "saved", custom, compile=False)
    assert not keras_qat.plan(loaded).float_layers


def test_objects_of_tensorflow_are_no_keras_models(tmp_path):
    module = tf.Module()
    module.double = tf.function(lambda x: 2 * x, input_signature=[tf.TensorSpec([None, 2])])
    tf.saved_model.save(module, str(tmp_path))
    with pytest.raises(ValueError, match=r"tf\.saved_model\.load returns.*load_model"):
        keras_qat.plan(tf.saved_model.load(str(tmp_path)))
