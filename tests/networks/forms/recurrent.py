"""Recurrent layers as steps in integers, with masks, activations and custom calls."""

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.lowering.recurrent import MERGES
from keras_qat.ops.recurrent.unrolled import MOST_STEPS
from tests.comparison import RUNNABLE
from tests.helpers import images, keras, layers
from tests.networks.forms.form import Form, forms

SHAPE = (3, 4)


def tiny(x: Any) -> Any:
    return layers.SimpleRNN(3)(x)


def small(x: Any) -> Any:
    return layers.Dense(3)(layers.GRU(3, name="gru")(x))


def mixed(x: Any) -> Any:
    """Applies each kind of layer in both directions, with all options."""
    x = layers.GRU(4, return_sequences=True, go_backwards=True, dropout=0.2)(x)
    hard = {"recurrent_activation": "hard_sigmoid", "return_sequences": True}
    both = layers.Bidirectional(layers.GRU(3, reset_after=False, **hard), "sum")
    x = layers.SimpleRNN(4, return_sequences=True, recurrent_dropout=0.2)(both(x))
    relu = functools.partial(layers.SimpleRNN, 3, activation="relu", use_bias=False)
    last = layers.Bidirectional(relu())(x)
    sequence = layers.Flatten()(relu(return_sequences=True, unroll=True)(x))
    return layers.Dense(3)(layers.Concatenate()([last, sequence]))


def lstm(**options: Any) -> Any:
    return layers.LSTM(3, **options)


def all_merges(x: Any) -> Any:
    """Applies each merge mode to last steps and to sequences, and one that returns both tensors."""
    result = []
    for merge in MERGES:
        for sequences in (False, True):
            y = layers.Bidirectional(lstm(return_sequences=sequences), merge_mode=merge)(x)
            result.append(layers.Flatten()(y))
    first, second = layers.Bidirectional(lstm(return_sequences=True), merge_mode=None)(x)
    other = layers.Bidirectional(
        lstm(go_backwards=True), backward_layer=lstm(use_bias=False), name="turned"
    )
    return layers.Concatenate()([*result, layers.Flatten()(first), other(second)])


def nested(x: Any) -> Any:
    """Applies a model at each step. A state begins with zeros for each example and step."""
    sequence = keras.Input(SHAPE)
    y = layers.LSTM(6, return_sequences=True)(layers.Dense(5, activation="relu")(sequence))
    inner = keras.Model(sequence, layers.Dense(2)(layers.LSTM(3)(y)))
    return layers.LSTM(4)(layers.TimeDistributed(inner)(x))


def longest(x: Any) -> Any:
    return layers.GRU(3, return_sequences=True)(x)


X, OF_SEQUENCES = images(24, SHAPE), images(8, (2, *SHAPE))
UNROLLED = {
    **{
        f.__name__: Form(f, (X,), kernels=RUNNABLE, is_random=f is mixed, trains=True, strips=True)
        for f in (small, mixed)
    },
    "all merges": Form(all_merges, (X,), kernels=RUNNABLE),
    "longest": Form(longest, (images(6, (MOST_STEPS, 2)),), kernels=("xnnpack", "tflm")),
    "nested": Form(nested, (OF_SEQUENCES,), kernels=("xnnpack", "tflm")),
    **forms(
        {
            f"{kind.__name__} at each step, {sequences=}": lambda x, k=kind, s=sequences: (
                layers.TimeDistributed(k(3, return_sequences=s))(x)
            )
            for kind in (layers.GRU, layers.LSTM)
            for sequences in (False, True)
        },
        OF_SEQUENCES,
        kernels=("xnnpack", "tflm"),
    ),
}
STEPS = 4
WORDS = np.random.default_rng(0).integers(1, 9, (12, STEPS), np.int32)
WORDS[1, 2:], WORDS[2, :2], WORDS[3, 2], WORDS[4] = 0, 0, 0, 0
"""Sentences with padding after, before and between words, and one of padding only."""


def masked(kind, both_ways, sequences, depth=1):
    def build(ids):
        x = layers.Dropout(0.1)(layers.Embedding(9, 4, mask_zero=True)(ids))
        for index in range(depth):
            layer = kind(3, return_sequences=sequences or index < depth - 1)
            x = (layers.Bidirectional(layer) if both_ways else layer)(x)
        return layers.Dense(2)(x)

    return build


def given(x, mask):
    return layers.Dense(2)(layers.GRU(3)(x, mask=mask))


MASKED_RECURRENT = {
    **forms(
        {
            f"{kind.__name__}, {both_ways=}, {sequences=}": masked(kind, both_ways, sequences)
            for kind in (layers.GRU, layers.LSTM, layers.SimpleRNN)
            for both_ways in (False, True)
            for sequences in (False, True)
        },
        WORDS,
        is_random=True,
        strips=True,
    ),
    "a stack": Form(masked(layers.GRU, True, False, depth=2), (WORDS,), is_random=True),
    "a mask that is given": Form(
        given, (np.random.default_rng(0).normal(size=(8, STEPS, 4)).astype("f"), WORDS[:8] > 2)
    ),
}


def gated(x):
    return x * tf.sigmoid(1.7 * x)


class Slope(layers.Layer):
    def build(self, shape):
        self.slope = self.add_weight("slope", shape[-1:], initializer="ones")

    def call(self, x):
        return x * tf.sigmoid(self.slope * x)


def named(x):
    """Names a layer like a function, and calls it by the name."""
    with keras.utils.custom_object_scope({"gated": layers.Activation(gated)}):
        return layers.Activation("gated")(layers.Dense(3, activation="gated")(x))


FUNCTIONS = {
    "LSTM": lambda x: layers.LSTM(3, activation=gated)(x),
    "GRU": lambda x: layers.GRU(3, activation=gated, recurrent_activation="sigmoid")(x),
    "name of a layer": named,
    "layer": lambda x: layers.LSTM(3, activation=layers.Activation(gated))(x),
    "layer with weights": lambda x: layers.Conv1D(3, 2, activation=Slope())(x),
    "separable": lambda x: layers.SeparableConv1D(3, 2, activation=gated)(x),
    "each step": lambda x: layers.TimeDistributed(layers.Dense(3, activation=gated))(x),
}
OWN_ACTIVATIONS = forms(
    {name: lambda x, f=f: layers.Dense(2)(f(x)) for name, f in FUNCTIONS.items()},
    images(32, (2, 3)),
    sqnr=38,
)


def with_more(kind):
    """Returns a subclass that scales its input and applies a ReLU to its output."""

    class Own(kind):
        def call(self, inputs, mask=None, training=None, initial_state=None):
            options = {"training": training, "initial_state": initial_state}
            return tf.nn.relu(super().call(2.0 * inputs, mask=mask, **options))

    return Own


class Elapsed(layers.Layer):
    """A cell that reads values and the time between them, as in continuous-time networks."""

    state_size = 3

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(3, activation="tanh")

    def call(self, inputs, states):
        x, elapsed = inputs
        y = 0.5 * states[0] + elapsed * self.dense(tf.concat([x, states[0]], -1))
        return y, [y]


class Transitions(layers.AbstractRNNCell):
    """Adds the best path to each tag, like the decoding cell of conditional random fields."""

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
    """Creates a recurrent layer in its call, around a cell that reads a weight."""

    def build(self, shape):
        self.scores = self.add_weight("scores", (3, 3))

    def call(self, x):
        options = {"return_sequences": True, "return_state": True, "zero_output_for_mask": True}
        steps, last = layers.RNN(Transitions(tf.tanh(self.scores)), **options)(
            x, initial_state=x[:, 0], mask=tf.cast(x[..., 0] * 0 + 1, tf.bool)
        )
        return steps + last[:, None]


class Convolved(layers.Layer):
    """Convolves, with the options that Bidirectional requires of a recurrent layer."""

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


SUBCLASSES = {
    "Bidirectional of a convolution": lambda x: layers.Bidirectional(Convolved())(x),
    "Bidirectional of the last step": lambda x: layers.Bidirectional(
        Convolved(return_sequences=False), merge_mode="sum"
    )(x),
    "RNN made in a call": lambda x: Decoded()(x),
    "RNN of two sequences": lambda x: layers.RNN(Elapsed())((x, x[..., :1])),
    "RNN": lambda x: with_more(layers.RNN)(layers.GRUCell(3), return_sequences=True)(x),
    "LSTM": lambda x: with_more(layers.LSTM)(3)(x),
    "GRU": lambda x: with_more(layers.GRU)(3, go_backwards=True, return_sequences=True)(x),
    "LSTM with a mask": lambda x: with_more(layers.LSTM)(3)(layers.Masking()(x)),
}
PADDED = images(32, (2, 3))
PADDED[::2, 1:] = 0.0
OWN_RECURRENT = forms(
    {name: lambda x, f=f: layers.Dense(2)(f(x)) for name, f in SUBCLASSES.items()}, PADDED, sqnr=37
)


class Smoothed(layers.Layer):
    """Computes exponential averages with a weight, as in audio front ends."""

    def __init__(self, kind, **kwargs):
        super().__init__(**kwargs)
        self.kind = kind

    def build(self, shape):
        self.share = self.add_weight("share", shape[-1:], initializer="ones")

    def step(self, state, x):
        return 0.3 * self.share * x + 0.7 * state

    def both(self, states, rows):
        return self.step(states[0], rows[0]), tf.maximum(states[1], rows[1])

    def call(self, x):
        rows = tf.transpose(x, (1, 0, 2))
        if self.kind == "both":
            rows = sum(tf.scan(self.both, (rows, -rows), initializer=(x[:, 0], x[:, 1])))
        elif self.kind == "first":
            rows = tf.scan(self.step, rows)
        else:
            rows = tf.scan(self.step, rows, x[:, 1], reverse=self.kind == "reverse")
        return tf.transpose(rows, (1, 0, 2))


SCANS = forms(
    {
        kind: lambda x, kind=kind: Smoothed(kind)(x)
        for kind in ("both", "first", "plain", "reverse")
    },
    images(32, (3, 2)),
)
FORMS = {
    "unrolled": UNROLLED,
    "masked recurrent": MASKED_RECURRENT,
    "own activations": OWN_ACTIVATIONS,
    "own recurrent": OWN_RECURRENT,
    "scans": SCANS,
}
