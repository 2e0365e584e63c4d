"""Subclasses of Keras' recurrent layers whose `call` does more than theirs."""

from __future__ import annotations

import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from tests.comparison import assert_in_integers
from tests.helpers import images, scramble

layers = keras.layers


def with_more(kind):
    """Returns a subclass that scales what it reads and rectifies what it gives."""

    class Own(kind):
        def call(self, inputs, mask=None, training=None, initial_state=None):
            options = {"training": training, "initial_state": initial_state}
            return tf.nn.relu(super().call(2.0 * inputs, mask=mask, **options))

    return Own


class Transitions(layers.AbstractRNNCell):
    """Adds the best way to each tag, as the cell by which conditional random fields decode."""

    def __init__(self, scores, **kwargs):
        super().__init__(**kwargs)
        self.scores = scores

    @property
    def state_size(self):
        return 3

    def build(self, shape):
        super().build(shape)

    def call(self, x, states):
        y = x + tf.reduce_max(states[0][:, :, None] + self.scores, 1)
        return tf.one_hot(tf.argmax(y, -1), 3), y


class Decoded(layers.Layer):
    """Makes a recurrent layer in its call, around a cell that reads a weight."""

    def build(self, shape):
        self.scores = self.add_weight("scores", (3, 3))

    def call(self, x):
        options = {"return_sequences": True, "return_state": True, "zero_output_for_mask": True}
        steps, last = layers.RNN(Transitions(tf.tanh(self.scores)), **options)(
            x, initial_state=x[:, 0], mask=tf.cast(x[..., 0] * 0 + 1, tf.bool)
        )
        return steps + last[:, None]


class Convolved(layers.Layer):
    """Convolves, with the options that Bidirectional asks of a recurrent layer."""

    def __init__(self, filters=4, return_sequences=True, go_backwards=False, **kwargs):
        super().__init__(**kwargs)
        self.filters, self.return_state = filters, False
        self.return_sequences, self.go_backwards = return_sequences, go_backwards
        self.conv = layers.Conv1D(filters, 3, padding="causal", activation="relu")

    def call(self, x):
        x = self.conv(tf.reverse(x, [1]) if self.go_backwards else x)
        return x if self.return_sequences else x[:, -1]

    def get_config(self):
        options = {"return_sequences": self.return_sequences, "go_backwards": self.go_backwards}
        return super().get_config() | {"filters": self.filters} | options


FORMS = {
    "Bidirectional of a convolution": lambda x: layers.Bidirectional(Convolved())(x),
    "Bidirectional of the last step": lambda x: layers.Bidirectional(
        Convolved(return_sequences=False), merge_mode="sum"
    )(x),
    "RNN made in a call": lambda x: Decoded()(x),
    "RNN": lambda x: with_more(layers.RNN)(layers.GRUCell(3), return_sequences=True)(x),
    "LSTM": lambda x: with_more(layers.LSTM)(3)(x),
    "GRU": lambda x: with_more(layers.GRU)(3, go_backwards=True, return_sequences=True)(x),
    "LSTM with a mask": lambda x: with_more(layers.LSTM)(3)(layers.Masking()(x)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", FORMS)
def test_in_integers(form, tmp_path):
    inputs, x = keras.Input((2, 3)), images(32, (2, 3))
    x[::2, 1:] = 0.0
    model = scramble(keras.Model(inputs, layers.Dense(2)(FORMS[form](inputs))))
    assert_in_integers(model, x, tmp_path)


def test_bidirectional_of_a_layer_that_is_not_recurrent():
    inputs = keras.Input((2, 3))
    model = keras.Model(inputs, FORMS["Bidirectional of a convolution"](inputs))
    assert not keras_qat.plan(model).float_layers
