"""Networks with layers that stay in float, and the reason that `plan` states."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.ops.recurrent.unrolled import MOST_STEPS
from tests.helpers import keras, layers
from tests.networks.forms.cells_and_convolutions import tiny
from tests.networks.forms.masks import MASK
from tests.networks.forms.recurrent import Smoothed, small


@dataclasses.dataclass(frozen=True)
class FloatForm:
    """A network with a layer that stays in float.

    Args:
        reason: a regular expression that matches the reason.
        build: a function of the tensors of all inputs.
        shapes: shapes of the inputs. All inputs except the first are integers.
    """

    reason: str
    build: Callable[..., Any]
    shapes: tuple[tuple[int | None, ...], ...]

    def model(self) -> Any:
        first, *others = self.shapes
        inputs = [keras.Input(first), *(keras.Input(shape, dtype="int32") for shape in others)]
        return keras.Model(inputs, self.build(*inputs))


class ComplexWeights(layers.Layer):
    def build(self, shape):
        self.factor = self.add_weight("factor", (48,), tf.complex64, "ones")

    def call(self, x):
        return tf.math.real(tf.cast(x, tf.complex64) * self.factor)


class ConstantLoss(layers.Layer):
    """Adds a loss that does not depend on an input."""

    def call(self, x):
        self.add_loss(tf.constant(1.0))
        return x * 2.0


class Factors(layers.Layer):
    """Multiplies by a factor, and does more in training than adding noise."""

    def __init__(self, kind, **kwargs):
        super().__init__(**kwargs)
        self.kind, self.dense = kind, layers.Dense(3)

    def build(self, shape):
        self.factors = [self.add_weight(f"factor_{i}", (3,), initializer="ones") for i in (0, 1)]

    def call(self, x, training=None):
        y = self.dense(x)
        if not training:
            return y * 2.0 if self.kind == "number" else y * self.factors[0]
        noise = tf.random.normal(tf.shape(y))
        if self.kind == "order":
            return self.dense((x + noise) * self.factors[0])
        y += noise
        if self.kind == "number":
            return y * 3.0
        return (y * self.factors[0])[:, :1] if self.kind == "shape" else y * self.factors[1]


@tf.custom_gradient
def counted(x):
    return x * 1.0, lambda gradient: gradient.numpy()


def of_other_examples(*inputs):
    def function(inputs):
        x, rows, columns = inputs
        others = tf.tile(tf.range(tf.shape(x)[0])[::-1, None], (1, 5))
        return tf.gather_nd(x, tf.stack([others, rows, columns], -1))

    return layers.Lambda(function)(inputs)


def in_lambda(function):
    return lambda x: layers.Lambda(function)(layers.Dense(3)(x))


MAPPED = {
    "another tensor": lambda x: tf.map_fn(lambda one: one * x[0], x),
    "an operation": lambda x: tf.map_fn(lambda one: one[tf.argmax(one[:, 0])], x),
    "open sizes": lambda x: tf.map_fn(lambda one: tf.reduce_sum(tf.where(one > 0)), x, tf.int64),
    "no example": lambda x: tf.map_fn(lambda one: tf.ones(3), x),
}


def lstm(**options):
    return lambda x: layers.LSTM(3, **options)(x)


def both_ways(**options):
    return lambda x: layers.Bidirectional(layers.LSTM(3, **options))(x)


def conv_lstm(**options):
    return lambda x: layers.ConvLSTM2D(2, 2, **options)(x)


OPAQUE, TOO_MANY = "cannot be traced", f"more than {MOST_STEPS} steps"
IN_TRAINING = "it computes differently in training"
LONG = (40, 4)
"""Recurrent layers of up to 32 steps would be traced step by step."""

OF_STEPS = {
    "LSTM, relu": ("its activations are not tanh and sigmoid", lstm(activation="relu")),
    "LSTM, states": ("its states are inputs or outputs", lambda x: lstm(return_state=True)(x)[1]),
    "Bidirectional, relu": (
        "Bidirectional.*its activations are not tanh and sigmoid",
        both_ways(activation="relu"),
    ),
    "Bidirectional, states": (
        "Bidirectional.*its states are inputs",
        lambda x: both_ways(return_state=True)(x)[0],
    ),
    "GRU, relu": ("not tanh and sigmoid or hard_sigmoid", lambda x: layers.GRU(3, "relu")(x)),
    "SimpleRNN, selu": ("are not tanh and relu", lambda x: layers.SimpleRNN(3, "selu")(x)),
    "a long cell": ("it has more than 32 steps", lambda x: layers.RNN(layers.GRUCell(3))(x)),
}

IMAGES = (3, 6, 5, 2)
ROWS = {
    **{name: (*row, LONG) for name, row in OF_STEPS.items()},
    "a long GRU": (TOO_MANY, lambda x: layers.GRU(3)(x), (MOST_STEPS + 1, 4)),
    "a norm of any length": (
        "the number of channels is unknown",
        lambda x: layers.Normalization(None, 0.2, 0.3)(x),
        (None,),
    ),
    "a GRU of any length": ("the number of steps is unknown", small, (None, 4)),
    "ConvLSTM, states": (
        "it is stateful or reads or returns states",
        lambda x: layers.ConvLSTM2D(2, 3, return_state=True)(x)[1],
        IMAGES,
    ),
    "ConvLSTM, relu": ("not tanh and sigmoid", conv_lstm(activation="relu", dropout=0.2), IMAGES),
    "ConvLSTM, channels first": (
        "channels come first",
        conv_lstm(data_format="channels_first"),
        IMAGES,
    ),
    "ConvLSTM of volumes": ("along three axes", lambda x: layers.ConvLSTM3D(2, 2)(x), (*IMAGES, 1)),
    "a long ConvLSTM": (TOO_MANY, conv_lstm(), (MOST_STEPS + 1, 3, 3, 2)),
    "a ConvLSTM of any length": ("the number of steps is unknown", tiny, (None, 6, 5, 2)),
    "a ConvLSTM of any size": ("its image size is unknown", tiny, (3, None, None, 2)),
    **{f"map of {name}": (OPAQUE, in_lambda(f), (4, 3)) for name, f in MAPPED.items()},
    "layers at each of any number of steps": (
        "",
        lambda x: layers.TimeDistributed(layers.Conv2D(4, 3))(x),
        (None, 8, 8, 3),
    ),
    "a long scan": (OPAQUE, lambda x: Smoothed("plain")(x), (33, 2)),
    "a scan of any length": (OPAQUE, lambda x: Smoothed("plain")(x), (None, 2)),
    "gather_nd of other examples": ("", of_other_examples, (4, 3, 2), (5,), (5,)),
    "a mask of several examples": (
        "",
        lambda x: layers.MultiHeadAttention(2, 3)(x, x, attention_mask=np.tile(MASK, (2, 1, 1))),
        (5, 4),
    ),
    "complex weights": ("its weights are complex numbers", lambda x: ComplexWeights()(x), (48,)),
    "a constant loss": ("add_loss", lambda x: ConstantLoss()(x), (4,)),
    "gradients in NumPy": (OPAQUE, lambda x: layers.Lambda(counted)(x), (4,)),
    "a crop that makes images larger": ("", lambda x: layers.CenterCrop(8, 4)(x), (6, 7, 2)),
    **{
        f"another {kind} in training": (IN_TRAINING, lambda x, kind=kind: Factors(kind)(x), (3,))
        for kind in ("number", "weight", "order", "shape")
    },
}
IN_FLOAT = {
    name: FloatForm(reason, build, tuple(shapes)) for name, (reason, build, *shapes) in ROWS.items()
}
