"""Recurrent layers of custom cells, and of convolutions."""

import functools
from typing import Any

import tensorflow as tf

import keras_qat
from keras_qat.ops.recurrent.unrolled import MOST_STEPS
from tests.comparison import RUNNABLE
from tests.helpers import images, keras, layers
from tests.networks.forms.form import Form, forms

SHAPE = (2, 4)
X = images(24, SHAPE)


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


def translator(x):
    """Passes an encoder's states to a decoder, and also outputs a cell state."""
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
    """Has a matrix as state, with an initial state other than zero, like a Kalman filter."""

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
    """A state with several axes that begins with zeros."""

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
    "other activations": lambda x: layers.GRU(3, "softsign")(
        layers.LSTM(3, recurrent_activation="hard_sigmoid", return_sequences=True)(x)
    ),
}
CELLS = forms(MODELS, X, kernels=RUNNABLE, trains=True, strips=True)


def tiny(x: Any) -> Any:
    return layers.ConvLSTM2D(2, 3, name="conv_lstm")(x)


def of_images(x: Any) -> Any:
    """Applies convolutional recurrent layers in both directions, with all options."""
    again = functools.partial(layers.ConvLSTM2D, return_sequences=True)
    x = again(3, 3, padding="same", strides=2, go_backwards=True, dropout=0.2)(x)
    both = layers.Bidirectional(again(2, (3, 2), recurrent_activation="sigmoid", use_bias=False))
    last = layers.ConvLSTM2D(3, 2, dilation_rate=2, padding="same", recurrent_dropout=0.2)(both(x))
    return layers.Dense(3)(layers.Flatten()(last))


def of_sequences(x: Any) -> Any:
    x = layers.ConvLSTM1D(3, 3, padding="same", return_sequences=True)(x)
    x = layers.ConvLSTM1D(3, 2, dilation_rate=2, recurrent_activation="sigmoid")(x)
    return layers.Dense(3)(layers.Flatten()(x))


def of_steps(x: Any) -> Any:
    return layers.TimeDistributed(layers.ConvLSTM2D(2, 3, return_sequences=True))(x)


SHAPES: dict[Any, tuple[int, ...]] = {
    tiny: (3, 6, 5, 2),
    of_images: (4, 9, 8, 2),
    of_sequences: (4, 9, 2),
    of_steps: (2, 3, 6, 5, 2),
}
RECIPES = {
    "per tensor": (keras_qat.recipes.int8(per_channel=False), 44),
    "4 bits": (keras_qat.recipes.int8(weight_bits=4), 39),
    "activations of 5 bits": (keras_qat.recipes.int8(activation_bits=5), 28),
    "2 bits": (keras_qat.recipes.int8(weight_bits=2, activation_bits=2), 3),
}
CONV_LSTM = {
    **{
        build.__name__: Form(
            build,
            (images(24, shape),),
            kernels=RUNNABLE,
            is_random=build is of_images,
            trains=True,
            strips=True,
        )
        for build, shape in SHAPES.items()
    },
    **{
        name: Form(
            of_images,
            (images(24, SHAPES[of_images]),),
            sqnr=sqnr,
            recipe=recipe,
            kernels=RUNNABLE,
            is_random=True,
        )
        for name, (recipe, sqnr) in RECIPES.items()
    },
    "longest": Form(
        lambda x: layers.ConvLSTM2D(2, 2, return_sequences=True)(x),
        (images(6, (MOST_STEPS, 4, 3, 2)),),
        kernels=("xnnpack", "tflm"),
    ),
}
FORMS = {"cells": CELLS, "conv lstm": CONV_LSTM}
