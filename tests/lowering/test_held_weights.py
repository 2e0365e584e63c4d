"""Weights of objects that a layer holds and that are no layers."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from tests.comparison import assert_kept
from tests.helpers import rng

layers = keras.layers

ROWS = rng().normal(size=(16, 4)).astype(np.float32)


class Plain:
    """A product with a bias, in an object that Keras does not know."""

    def __init__(self, rows, columns, name):
        super().__init__()
        self.kernel = tf.Variable(rng().normal(size=(rows, columns)).astype(np.float32), name=name)
        self.rest = {"biases": (tf.Variable(tf.zeros(columns), name=f"{name}_bias"),)}

    def __call__(self, x):
        return tf.matmul(x, self.kernel) + self.rest["biases"][0]


class Module(Plain, tf.Module):
    """The same, which Keras trains."""


class Held(layers.Layer):
    """Calls an object, and others in a list of an object."""

    def __init__(self, kind=Module, **kwargs):
        super().__init__(**kwargs)
        self.first = kind(4, 8, "first")
        self.first.again = self
        self.first.inside = [kind(8, 3, "second")]

    def call(self, x):
        return self.first.inside[0](tf.nn.relu(self.first(x)))

    def get_config(self):
        return super().get_config()


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [Module, Plain])
def test_objects_in_layers(kind, tmp_path):
    inputs = keras.Input((4,))
    model = keras.Model(inputs, Held(kind, name="held")(inputs))
    assert len(model.trainable_weights) == (4 if kind is Module else 0)
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, ROWS)
    np.testing.assert_allclose(qat(ROWS), model(ROWS), atol=0.2)
    assert [w.shape for w in qat.trainable_weights] == [w.shape for w in model.trainable_weights]
    assert_kept(qat, ROWS, tmp_path)


def test_training_objects_in_layers():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, Held(Module, name="held")(inputs))
    qat = keras_qat.quantize_model(model)
    qat.compile("sgd", "mse")
    before = model.layers[1].first.kernel.numpy()
    qat.fit(ROWS, np.zeros((16, 3)), verbose=0)
    np.testing.assert_array_equal(model.layers[1].first.kernel, before)
    with keras.utils.custom_object_scope({"Held": Held}):
        stripped = keras_qat.strip_quantization(qat)
    assert not np.allclose(stripped.layers[1].first.kernel, before)
    np.testing.assert_allclose(qat(ROWS), stripped(ROWS), atol=0.3)


class Reader(layers.Layer):
    """Reads a kernel in an object of another layer."""

    def __init__(self, held, **kwargs):
        super().__init__(**kwargs)
        self.held = held

    def call(self, x):
        return tf.matmul(x, self.held.first.kernel, transpose_b=True)


def test_objects_of_other_layers(tmp_path):
    inputs, held = keras.Input((4,)), Held(Module, name="held")
    wide = layers.Dense(8, name="wide")(held(inputs))
    model = keras.Model(inputs, Reader(held, name="reader")(wide))
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, ROWS)
    assert len(qat.trainable_weights) == 6
    assert_kept(qat, ROWS, tmp_path)


class OfTable(layers.Layer):
    """Adds a table that NumPy made, in float64, and that does not train."""

    def build(self, shape):
        self.table = tf.Variable(np.sin(np.arange(32.0)).reshape(8, 4), trainable=False)

    def call(self, x):
        return x + tf.cast(self.table, x.dtype)


def test_constants_of_numpy_in_variables(tmp_path):
    inputs = keras.Input((8, 4))
    model, x = keras.Model(inputs, OfTable()(inputs)), rng().normal(size=(16, 8, 4))
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    np.testing.assert_allclose(qat(x), model(x), atol=0.05)
    assert_kept(qat, x, tmp_path)


NUMBERS = {
    "rows of a table": (np.arange(5, dtype=np.int32), lambda x, held, table: x + table(held)),
    "in bytes": (np.arange(5, dtype=np.uint8), lambda x, held, table: x + table(held)),
    "steps": (np.array([3, 1, 0], np.int64), lambda x, held, _: tf.gather(x, held, axis=1)),
    "compared": (
        np.array([3, 1, 0, 2, 1], np.int32),
        lambda x, held, _: tf.where((held > 1)[:, None], x, -x),
    ),
    "a mask": (
        np.array([[1], [0], [1], [1], [0]], bool),
        lambda x, held, _: tf.where(held, x, 0.0),
    ),
    "real numbers": (np.arange(5, dtype=np.float32), lambda x, held, table: x + table(held)),
}


class HoldsNumbers(layers.Layer):
    """Holds numbers that are no signals in a variable that does not train."""

    def __init__(self, form, **kwargs):
        super().__init__(**kwargs)
        numbers, self.function = NUMBERS[form]
        self.held = tf.Variable(numbers, trainable=False)
        self.table = layers.Embedding(5, 4)

    def call(self, x):
        return self.function(x, self.held, self.table)


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", NUMBERS)
def test_weights_of_whole_numbers(form, tmp_path):
    inputs = keras.Input((5, 4))
    model = keras.Model(inputs, layers.Dense(3)(HoldsNumbers(form)(inputs)))
    data = rng().normal(size=(16, 5, 4)).astype(np.float32)
    qat = keras_qat.quantize_model(model, strict=form != "real numbers")
    keras_qat.calibrate(qat, data)
    np.testing.assert_allclose(qat(data), model(data), atol=0.1)
    assert_kept(qat, data, tmp_path)
