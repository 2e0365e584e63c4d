"""Operations that are computed as what they can be written out in."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.graph.operations import KINDS
from keras_qat.keras2.backend import keras
from keras_qat.lowering.expansions import EARLY, EARLY_OF_INTEGERS
from tests.helpers import build_model
from tests.networks.forms.equivalents import FUNCTIONS, SHAPE


def test_all_have_a_form():
    assert {KINDS.get(name, name) for name in FUNCTIONS} == EARLY.keys() | EARLY_OF_INTEGERS.keys()


OTHERS = {
    "math.reduce_prod": lambda x: tf.reduce_prod(tf.tile(x, [1, 2, 1]), axis=1),
    "nn.log_softmax": lambda x: tf.compat.v1.nn.log_softmax(x, dim=-1),
    "norm": lambda x: tf.compat.v1.norm(x, ord=1, axis=-1, keep_dims=True),
    "where: it needs a mask and two tensors": lambda x: tf.where(np.tri(6, 8) > 0, x, -1e9),
    "pad: pads with values other than 0": lambda x: tf.pad(
        x, [[0, 0], [1, 2], [0, 1]], constant_values=-np.inf
    ),
}
"""Operations with options that are not written out, and with those of TensorFlow 1."""


@pytest.mark.parametrize("name", OTHERS)
def test_other_options_stay_in_float(name):
    model = build_model(SHAPE, OTHERS[name])
    (reason,) = keras_qat.plan(model).float_layers.values()
    assert reason.startswith("no int8 rule for tf.") and reason.endswith(name)
    assert keras_qat.quantize_model(model).output_shape == model.output_shape


def test_numbers_are_those_of_the_operation(monkeypatch):
    x = keras.Input(SHAPE)
    model = keras.Model(x, tf.math.log_sigmoid(x))
    assert not keras_qat.plan(model).float_layers
    monkeypatch.setitem(EARLY, "log_sigmoid", lambda x: -1.01 * tf.math.softplus(-x))
    assert keras_qat.plan(model).float_layers
