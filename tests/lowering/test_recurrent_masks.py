"""Tests that recurrent layers read masks of any layer before them, and of enclosing models."""

from functools import partial

import pytest
import tensorflow as tf

from tests.helpers import keras, layers
from tests.lowering.test_masks import SIZE, STEPS, TOKENS, Positions, Shift, embedded

pytestmark = pytest.mark.legacy

KINDS = (layers.GRU, layers.LSTM, layers.SimpleRNN)


def both(layer, **options):
    return layers.Bidirectional(layer, **options)


def of_tokens(function):
    def build(kind):
        tokens, x = embedded()
        return tokens, function(kind, x)

    return build


def real_tokens(kind):
    tokens = keras.Input((STEPS,))
    return tokens, kind(4)(layers.Embedding(TOKENS, SIZE, mask_zero=True)(tokens))


def masking(kind):
    x = keras.Input((STEPS, 3))
    return x, kind(4)(layers.Masking()(x))


def concatenated(kind):
    """Concatenates two sequences with different masks. A step is valid if both masks say so."""
    first, x = embedded()
    second, y = embedded()
    return [first, second], kind(4, return_sequences=True)(layers.Concatenate()([x, y]))


def behind_own_layer(kind):
    tokens = keras.Input((STEPS,), dtype="int32")
    return tokens, both(kind(3, return_sequences=True), merge_mode="sum")(Positions()(tokens))


def given(kind):
    tokens, x = embedded()
    mask = tf.not_equal(tokens, 3)
    return tokens, both(kind(3))(layers.Dense(4)(x), mask=mask)


def shared(kind):
    """Calls one layer with and without a mask."""
    tokens, x = embedded()
    inner, plain = both(kind(3)), layers.Embedding(TOKENS, SIZE)(tokens)
    return tokens, layers.Concatenate()([inner(plain), inner(x)])


def stacked(kind, x):
    x = both(kind(3, return_sequences=True))(x)
    x = kind(4, return_sequences=True, go_backwards=True)(layers.Dropout(0.1)(x))
    return kind(3)(x)


def behind_float(kind, x):
    """A layer that stays in float passes the mask on."""
    options = {"activation": "selu", "recurrent_dropout": 0.1}
    first = kind(4, **options, return_sequences=True, name="float")
    return kind(4)(first(Shift()(x)))


def decoder(kind, x):
    x, *states = kind(4, return_sequences=True, return_state=True)(x)
    return kind(4, go_backwards=True)(x, initial_state=states)


def states_of_both(kind, x):
    x, *states = both(kind(3, return_sequences=True, return_state=True))(x)
    return kind(3)(x, initial_state=states[len(states) // 2 :])


MODELS = {
    "real_tokens": real_tokens,
    "masking": masking,
    "time_distributed": of_tokens(
        lambda kind, x: both(kind(3))(layers.TimeDistributed(layers.Dense(5, activation="relu"))(x))
    ),
    "concatenated": concatenated,
    "behind_own_layer": behind_own_layer,
    "given": given,
    "shared": shared,
    "stacked": of_tokens(stacked),
    "behind_float": of_tokens(behind_float),
    "decoder": of_tokens(decoder),
    "states_of_both": of_tokens(states_of_both),
    "own_activation": of_tokens(
        lambda kind, x: both(kind(3, activation="selu", return_sequences=True))(x)
    ),
    "cell": of_tokens(lambda kind, x: layers.RNN(kind(4).cell, return_sequences=True)(x)),
}


def reader(size=SIZE, name=None):
    """Returns layers that read the mask of an enclosing model, in three ways."""
    x = keras.Input((STEPS, size))
    y = Shift()(x)
    parts = [layers.GRU(4)(y), layers.GlobalAveragePooling1D()(x), layers.Flatten()(y)]
    return keras.Model(x, layers.Concatenate()(parts), name=name)


def nested_sequential(_, x):
    return keras.Sequential([layers.Dense(5), both(layers.LSTM(3)), layers.Dense(4)])(x)


def two_levels():
    """The mask of one model is passed to another model."""
    tokens = keras.Input((STEPS,), dtype="int32")
    embed = keras.Sequential([layers.Embedding(TOKENS, SIZE, mask_zero=True), layers.Dropout(0.1)])
    x = keras.Input((STEPS, SIZE))
    project = keras.Sequential([layers.Dense(6, activation="relu")])
    middle = keras.Model(x, reader(6)(project(x)))
    return tokens, middle(embed(tokens))


def shared_model():
    """Calls one model with and without a mask."""
    tokens, x = embedded()
    inner, plain = reader(), layers.Embedding(TOKENS, SIZE)(tokens)
    return tokens, layers.Concatenate()([inner(x), inner(plain)])


def nested_given():
    """A mask that is passed to a model replaces the existing mask."""
    tokens, x = embedded()
    inner = reader()
    parts = [inner(x, mask=tf.not_equal(tokens, number)) for number in (3, 4)]
    return tokens, layers.Subtract()(parts)


def nested_output(_, x):
    """A layer after a model reads the mask that went through the model."""
    inner = keras.Sequential([layers.Dense(5, activation="relu"), layers.Dropout(0.1)])
    return layers.GRU(4)(inner(x))


NESTED = {
    "nested": partial(of_tokens(lambda _, x: reader()(x)), None),
    "nested_sequential": partial(of_tokens(nested_sequential), None),
    "two_levels": two_levels,
    "shared_model": shared_model,
    "nested_given": nested_given,
    "nested_output": partial(of_tokens(nested_output), None),
}
