"""Whether `quantize_model` notices what it understands otherwise than the float model computes."""

import warnings

import pytest
import tensorflow as tf

import keras_qat
from keras_qat.lowering.expand_call import make_symbol, trace_in_place
from keras_qat.lowering.expansions import OF_FLOATS
from keras_qat.lowering.split_layers import LOWERINGS
from tests.helpers import keras, layers
from tests.networks.forms.attention import CHOOSING


@pytest.fixture
def model():
    inputs = keras.Input((4, 3))
    hidden = layers.Lambda(lambda x: tf.abs(x) + 1.0, name="own")(inputs)
    return keras.Model(inputs, layers.Dense(2, name="scores")(hidden))


def test_what_is_understood_otherwise_is_warned_of(model, monkeypatch):
    def wrong(call, context):
        compute = lambda: layers.LeakyReLU(-0.5)(make_symbol(call.inputs[0]))  # noqa: E731
        return trace_in_place(call, compute, context)

    monkeypatch.delitem(OF_FLOATS, "abs")
    monkeypatch.setitem(LOWERINGS, "abs", wrong)
    with pytest.warns(UserWarning, match="differs from the float model.*scores.*own"):
        keras_qat.quantize_model(model)
    inputs = keras.Input((4, 3))
    functional = keras.Model(inputs, layers.Dense(2, name="scores")(tf.abs(inputs) + 1.0))
    with pytest.warns(UserWarning, match="from the float model.*scores.*math.abs"):
        keras_qat.quantize_model(functional)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mask", ["padding and later steps", "padding beside copies"])
def test_rows_that_see_nothing_are_no_difference(mask):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keras_qat.quantize_model(CHOOSING[mask].model())


@pytest.mark.parametrize("examples", [1, None])
def test_numbers_that_are_a_little_off_are_no_difference(examples):
    """One number for each example has no deviation, and hidden scores leave a little of the sum."""
    x, seen = keras.Input((8,), batch_size=examples), keras.Input((8,), batch_size=examples)
    hidden = tf.where(seen > 0.0, layers.Dense(8)(x), -1e9)
    sums = tf.reduce_logsumexp(hidden, -1, keepdims=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keras_qat.quantize_model(keras.Model([x, seen], sums))


def test_states_are_those_of_before():
    inputs = keras.Input((4, 3), batch_size=2)
    hidden = layers.Lambda(lambda x: 2.0 * x)(inputs)
    model = keras.Model(inputs, layers.GRU(2, stateful=True)(hidden))
    model.predict(tf.ones((2, 4, 3)), verbose=0)
    before = model.layers[-1].states[0].numpy()
    keras_qat.quantize_model(model)
    assert (model.layers[-1].states[0].numpy() == before).all() and before.any()
