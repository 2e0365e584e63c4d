"""Activations of one's own, functions and layers, in layers of Keras."""

from __future__ import annotations

import pytest
import tensorflow as tf

from keras_qat.keras2.backend import keras
from tests.comparison import assert_in_integers
from tests.helpers import images, scramble

layers = keras.layers


def gated(x):
    return x * tf.sigmoid(1.7 * x)


class Slope(layers.Layer):
    def build(self, shape):
        self.slope = self.add_weight("slope", shape[-1:], initializer="ones")

    def call(self, x):
        return x * tf.sigmoid(self.slope * x)


def named(x):
    """Gives a layer a name, as of a function, and calls it by the name."""
    with keras.utils.custom_object_scope({"gated": layers.Activation(gated)}):
        return layers.Activation("gated")(layers.Dense(3, activation="gated")(x))


FORMS = {
    "LSTM": lambda x: layers.LSTM(3, activation=gated)(x),
    "GRU": lambda x: layers.GRU(3, activation=gated, recurrent_activation="sigmoid")(x),
    "name of a layer": named,
    "layer": lambda x: layers.LSTM(3, activation=layers.Activation(gated))(x),
    "layer with weights": lambda x: layers.Conv1D(3, 2, activation=Slope())(x),
    "separable": lambda x: layers.SeparableConv1D(3, 2, activation=gated)(x),
    "each step": lambda x: layers.TimeDistributed(layers.Dense(3, activation=gated))(x),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", FORMS)
def test_in_integers(form, tmp_path):
    inputs, x = keras.Input((4, 3)), images(32, (4, 3))
    model = scramble(keras.Model(inputs, layers.Dense(2)(FORMS[form](inputs))))
    assert_in_integers(model, x, tmp_path)
