"""Recurrent layers whose steps are calls of their cell: custom cells, states of an LSTM."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from tests.helpers import images

layers = keras.layers

pytestmark = pytest.mark.legacy

SHAPE = (2, 4)
X = images(24, SHAPE)
KERNELS = ["xnnpack", "reference", *["tflm"] * bool(importlib.util.find_spec("tflite_micro"))]


@keras.utils.register_keras_serializable("cells")
class Minimal(layers.Layer):
    """The cell of Keras' documentation."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = self.state_size = units

    def build(self, input_shape):
        self.kernel = self.add_weight("kernel", (input_shape[-1], self.units))
        self.recurrent = self.add_weight("recurrent", (self.units, self.units))

    def call(self, inputs, states):
        output = tf.tanh(tf.matmul(inputs, self.kernel) + tf.matmul(states[0], self.recurrent))
        return output, [output]

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@keras.utils.register_keras_serializable("cells")
class Branching(Minimal):
    """A cell that cannot be opened."""

    def call(self, inputs, states):
        return super().call(inputs if tf.reduce_max(inputs) > 0 else -inputs, states)


def translator(x):
    """An encoder's states for a decoder, and another output that is a cell state."""
    _, *states = layers.LSTM(5, return_state=True, name="encoder")(x)
    decoder = layers.LSTM(5, return_state=True, return_sequences=True, name="decoder")
    y, _, cell = decoder(x, initial_state=states)
    return layers.Concatenate()([layers.Flatten()(y), cell])


def both_ways(x):
    ways = layers.Bidirectional(layers.LSTM(2, return_state=True, return_sequences=True))
    y, *states = ways(x)
    return layers.Concatenate()([layers.Flatten()(y), *states])


@keras.utils.register_keras_serializable("cells")
class Filter(layers.Layer):
    """As a Kalman filter: a state is a matrix, and the first one is not zero."""

    state_size = (3, tf.TensorShape([3, 3]))
    output_size = 3

    def get_initial_state(self, inputs=None, batch_size=None, dtype=None):
        return [tf.zeros((batch_size, 3)), tf.tile(tf.eye(3)[None], [batch_size, 1, 1])]

    def build(self, input_shape):
        self.kernel = self.add_weight("kernel", (input_shape[-1], 3))

    def call(self, inputs, states):
        x, spread = states
        x = tf.tanh(x + tf.matmul(inputs, self.kernel) * spread[:, :, 0])
        return x, [x, 0.5 * spread]


@keras.utils.register_keras_serializable("cells")
class Image(Minimal):
    """A state with several axes, which begins with zeros."""

    def build(self, input_shape):
        self.state_size = tf.TensorShape([2, 2])

    def call(self, inputs, states):
        state = 0.5 * states[0] + tf.reshape(inputs, [-1, 2, 2])
        return state, [state]


MODELS = {
    "reset before": lambda x: layers.GRU(3, "relu", reset_after=False)(x),
    "own first states": lambda x: layers.RNN(Filter(), return_sequences=True)(x),
    "state of several axes": lambda x: layers.RNN(Image(4))(x),
    "steps of several axes": lambda x: layers.RNN(Image(4))(layers.Reshape((2, 2, 2))(x)),
    "custom cell": lambda x: layers.RNN(Minimal(5), return_sequences=True, name="rnn")(x),
    "stacked cells": lambda x: layers.RNN([layers.LSTMCell(4), layers.GRUCell(3)])(x),
    "backwards": lambda x: layers.RNN(
        layers.SimpleRNNCell(4), go_backwards=True, return_sequences=True
    )(x),
    "states": translator,
    "both ways": both_ways,
    "other activations": lambda x: layers.GRU(3, "relu")(
        layers.LSTM(3, recurrent_activation="hard_sigmoid", return_sequences=True)(x)
    ),
}


def model_of(name, shape=SHAPE):
    keras.utils.set_random_seed(3)
    x = keras.Input(shape, name="x")
    return keras.Model(x, MODELS[name](x))


QUICKEST = "custom cell"
CASES = [QUICKEST, *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS if n != QUICKEST)]


@pytest.mark.parametrize("name", CASES)
def test_steps_are_integers(name, tmp_path):
    model = model_of(name)
    qat = keras_qat.quantize_model(model, strict=True)
    assert len(qat.trainable_weights) == len(model.trainable_weights)
    keras_qat.set_quantization(qat, False)
    np.testing.assert_allclose(qat(X), model(X), atol=1e-5)
    keras_qat.set_quantization(qat, True)
    before = qat.get_weights()
    qat.compile(keras.optimizers.SGD(0.1), "mse")
    qat.fit(X, np.ones((len(X), *model.output_shape[1:])), verbose=0)
    assert any(map(np.any, map(np.not_equal, before, qat.get_weights())))
    keras_qat.calibrate(qat, X)
    contents, one = keras_qat.export_tflite(qat), keras_qat.export_tflite(qat, batch_size=1)
    for kernels in KERNELS:
        qat.kernels = kernels
        report = keras_qat.verify(qat, one if kernels == "tflm" else contents, X, kernels=kernels)
        assert report.identical == 1 and report.is_good and not report.float_operations
    qat.save(tmp_path / "qat.keras")
    loaded = keras.models.load_model(tmp_path / "qat.keras")
    loaded.kernels = "xnnpack"
    assert keras_qat.export_tflite(loaded) == contents
    keras_qat.set_quantization(qat, False)
    stripped = keras_qat.strip_quantization(qat)
    np.testing.assert_allclose(stripped(X), qat(X), atol=1e-5)


OWN = ["reset before", "own first states", "state of several axes", "steps of several axes"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", OWN)
def test_steps_are_those_of_the_float_model(name):
    model = model_of(name)
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.set_quantization(qat, False)
    np.testing.assert_allclose(qat(X), model(X), atol=1e-5)


@pytest.mark.slow
def test_dropout_is_the_same_for_all_steps():
    """Each example loses whole channels of its sequence, in training alone."""
    x = keras.Input((4, 6))
    y, _, state = layers.LSTM(3, dropout=0.5, return_sequences=True, return_state=True)(x)
    model = keras.Model(x, [y, state])
    qat = keras_qat.quantize_model(model, strict=True)
    (dropout,) = [layer for layer in qat.layers if layer.name.endswith("dropout")]
    dropped = dropout(np.ones((64, 4, 6), np.float32), training=True).numpy()
    assert set(np.unique(dropped)) == {0.0, 2.0} and np.all(dropped == dropped[:, :1])
    keras_qat.set_quantization(qat, False)
    data = images(8, (4, 6))
    np.testing.assert_allclose(qat(data)[1], model(data)[1], atol=1e-5)
    assert np.any(qat(data, training=True)[1] != model(data)[1])


def reason_of(model, **options):
    (reason,) = keras_qat.plan(model, **options).float_layers.values()
    return reason


def test_other_layers_stay_whole():
    assert "it has more than 32 steps" in reason_of(model_of("custom cell", (33, 4)))
    assert "or any number" in reason_of(model_of("custom cell", (None, 4)))
    for layer in (
        layers.RNN(layers.LSTMCell(3, dropout=0.5)),
        layers.GRU(3, "relu", recurrent_dropout=0.5),
    ):
        x = keras.Input(SHAPE)
        assert reason_of(keras.Model(x, layer(x)))
    x = keras.Input(SHAPE)
    model = keras.Model(x, layers.RNN(Branching(3), name="rnn")(x))
    with pytest.warns(UserWarning, match="rnn: .*reduce_max"):
        qat = keras_qat.quantize_model(model)
    assert len(qat.layers) == len(model.layers) + 2
    recipe = keras_qat.recipes.int8().override("rnn", quantize=False)
    assert reason_of(model_of("custom cell"), recipe=recipe)
