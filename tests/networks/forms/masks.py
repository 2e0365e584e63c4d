"""Masked scores, in attention and elsewhere."""

import numpy as np
import tensorflow as tf

from tests.helpers import images, keras, layers, rng
from tests.networks.forms.form import Form, forms

SIZE = 8


def entropy(hidden):
    shares = tf.nn.softmax(hidden)
    return -tf.reduce_sum(shares * tf.nn.log_softmax(hidden), -1, keepdims=True)


def of_two(hidden):
    return tf.concat([tf.nn.softmax(hidden), tf.reduce_max(hidden, -1, keepdims=True)], -1)


BELOW = {
    "several": of_two,
    "entropy": entropy,
    "logsumexp": lambda x: tf.reduce_logsumexp(x, -1, keepdims=True),
    "exp of log_softmax": lambda x: tf.exp(tf.nn.log_softmax(x)),
    "negative": lambda x: tf.reduce_min(-x, -1, keepdims=True),
    "line": lambda x: tf.nn.softmax(1.0 - (-2.0 * x + 0.5)),
    "cast": lambda x: tf.nn.softmax(tf.cast(x, "float32")),
    "softplus": lambda x: tf.math.softplus(x + 1.0),
    "tanh": tf.tanh,
    "relu": lambda x: tf.nn.relu(x + 3.0),
    "maximum": lambda x: tf.maximum(0.2, x),
    "pooled": lambda x: layers.GlobalMaxPooling1D()(layers.MaxPooling1D(2)(x[..., None])),
}
ABOVE = {
    "reduce_min": lambda x: tf.reduce_min(x, 1, keepdims=True),
    "argmin": lambda x: tf.one_hot(tf.argmin(x, -1), SIZE),
    "softmin": lambda x: tf.nn.softmax(-x),
    "minimum": lambda x: tf.minimum(x, [0.1] * SIZE),
    "sigmoid": tf.sigmoid,
    "nearest": lambda x: tf.math.top_k(-x, 2)[0],
}
MASKS = {
    "sum": lambda mask, x, end: x + (1.0 - mask) * end,
    "less one": lambda mask, x, end: x - (mask - 1.0) * end,
    "quotient": lambda mask, x, end: x + (1.0 - mask) / (1.0 / end),
    "where": lambda mask, x, end: tf.where(mask > 0.0, x, end),
    "infinite": lambda mask, x, end: tf.where(mask == 0.0, end * np.inf, x),
}


def hidden(mask, reader, end):
    return lambda x, seen: reader(MASKS[mask](seen, layers.Dense(SIZE)(x), end))


def data():
    seen = rng(2).random((64, SIZE)) < 0.7
    seen[:, :2] = True
    return rng(1).normal(size=(64, SIZE)).astype(np.float32), seen.astype(np.float32)


AGAIN = {
    "where": lambda seen, x: (tf.where(seen, x, -1e9), tf.where(seen, x, 0.0)),
    "negated": lambda seen, x: (
        x + (1.0 - tf.cast(seen, tf.float32)) * -1e9,
        tf.where(tf.logical_not(seen), 0.0, x),
    ),
}
"""A mask, and the same mask that replaces what it hides."""


def again(form):
    """The same mask hides scores and replaces their logarithms."""

    def build(x, seen):
        logs = tf.nn.log_softmax(AGAIN[form](seen, layers.Dense(SIZE)(x))[0])
        return -tf.reduce_sum(tf.exp(logs) * AGAIN[form](seen, logs)[1], -1)

    return build


LATER = {
    "sum": lambda hidden, bias: bias + hidden,
    "difference": lambda hidden, bias: hidden - bias,
    "one for each row": lambda hidden, bias: hidden + bias[:, :1],
}


def added_later(form, mask):
    """Values that are added to masked scores are not lost."""

    def build(x, seen):
        masked = LATER[form](MASKS[mask](seen, layers.Dense(SIZE)(x), -1e9), layers.Dense(SIZE)(x))
        return tf.exp(masked - tf.reduce_max(masked, -1, keepdims=True))

    return build


HIDDEN_NUMBERS = {
    **forms(
        {
            f"{name} of {mask}": hidden(mask, reader, end)
            for readers, masks, end in (
                (BELOW, ("sum", "where"), -1e9),
                (ABOVE, MASKS, 1e9),
                ({"sigmoid below": tf.sigmoid}, MASKS, -1e9),
            )
            for name, reader in readers.items()
            for mask in masks
        },
        *data(),
        sqnr=25,
    ),
    **forms({f"again, {form}": again(form) for form in AGAIN}, data()[0], data()[1] > 0.0, sqnr=25),
    **forms(
        {
            f"later, {form} of {mask}": added_later(form, mask)
            for form in LATER
            for mask in ("sum", "where", "infinite")
        },
        *data(),
        sqnr=25,
    ),
}
SHAPE = (8, 4)
WITHIN = np.equal(*np.meshgrid(np.arange(8) // 4, np.arange(8) // 4))
"""The visible steps of each step: the steps of its window."""

HELD_MASKS = {
    "sum": (np.where(WITHIN, 0.0, -100.0), lambda x, mask: x + tf.cast(mask, tf.float32)),
    "truth": (WITHIN, lambda x, mask: tf.where(mask, x, -1e9)),
    "product": (WITHIN.astype(np.float32), lambda x, mask: x * mask - 1e10 * (1.0 - mask)),
    "counts": (WITHIN.astype(np.int32), lambda x, mask: tf.where(mask == 0, -1e9, x)),
}
"""The contents of a variable, and how it masks scores."""


@keras.utils.register_keras_serializable("tests")
class Attention(layers.Layer):
    """Attention with a mask in a variable."""

    def __init__(self, form, **kwargs):
        super().__init__(**kwargs)
        self.form, self.dense = form, layers.Dense(4)

    def build(self, input_shape):
        self.mask = tf.Variable(HELD_MASKS[self.form][0], trainable=False)

    def call(self, x):
        y = self.dense(x)
        return (
            tf.nn.softmax(HELD_MASKS[self.form][1](y @ tf.transpose(y, [0, 2, 1]), self.mask)) @ y
        )

    def get_config(self):
        return {**super().get_config(), "form": self.form}


class Windows(layers.Layer):
    """Scales windows, and holds their mask and an offset for another layer."""

    def build(self, input_shape):
        self.mask = tf.Variable(HELD_MASKS["sum"][0], trainable=False)
        self.offset, self.scale = tf.Variable(tf.zeros(4)), self.add_weight("scale", (4,))

    def call(self, x):
        return x * self.scale


class Within(layers.Layer):
    """Attention with a mask from a variable of another layer."""

    def call(self, x, mask=None, offset=None):
        assert mask.get_shape() == (8, 8)
        scores = x @ tf.transpose(x, [0, 2, 1]) + tf.cast(mask, tf.float32)
        return tf.nn.softmax(scores) @ x + offset


def given_weights(x):
    """A layer reads weights of another layer."""
    windows = Windows()
    y = layers.Dense(4)(windows(x))
    return Within()(y, mask=windows.mask, offset=windows.offset)


MASKS_IN_VARIABLES = {
    **forms(
        {name: lambda x, name=name: Attention(name)(x) for name in HELD_MASKS},
        images(32, SHAPE),
        strips=True,
        scrambles=False,
    ),
    "given weights": Form(given_weights, (images(16, SHAPE),), scrambles=False),
}
STEPS = 5
MASK = rng(3).random((1, STEPS, STEPS)) < 0.6
MASK[..., 0] = True
DROP = {"dropout": 0.5}


def images_of(*sequences):
    """Returns tensors of rows, columns and channels."""
    return [layers.Dense(8)(x[..., None]) for x in sequences]


OPTIONS = {
    "scale": lambda x, seen: layers.Attention(use_scale=True, **DROP)([x, x]),
    "concat": lambda x, seen: layers.Attention(score_mode="concat", **DROP)(
        [x, x], use_causal_mask=True
    ),
    "masks": lambda x, seen: layers.Attention(**DROP)(
        [x, x, layers.Dense(4)(x)], [seen, seen], return_attention_scores=True
    ),
    "additive": lambda x, seen: layers.AdditiveAttention(**DROP)([x, x], [None, seen]),
    "additive without": lambda x, seen: layers.AdditiveAttention(False, **DROP)([x, x]),
    "causal": lambda x, seen: layers.Attention(causal=True)([x, x]),
    "four axes": lambda x, seen: layers.Attention(**DROP)(
        [x[:, None] * np.ones((1, 2, 1, 1), np.float32)] * 2
    ),
    "constant": lambda x, seen: layers.MultiHeadAttention(2, 3, **DROP)(
        x, x, attention_mask=MASK, use_causal_mask=True
    ),
    "images": lambda x, seen: layers.MultiHeadAttention(
        2, 3, output_shape=(3, 2), activity_regularizer="l2", **DROP
    )(*images_of(x, x[:, :3])),
    "constant of heads": lambda x, seen: layers.MultiHeadAttention(2, 3)(
        x, x, attention_mask=tf.stack([MASK, np.tri(STEPS, dtype=bool)[None]], 1)
    ),
}
SEEN = rng(2).random((32, STEPS)) < 0.6
SEEN[:, 0] = True
ATTENTION_OPTIONS = {
    name: Form(
        build, (images(32, (STEPS, 4)), SEEN), is_random=name not in ("causal", "constant of heads")
    )
    for name, build in OPTIONS.items()
}
FORMS = {
    "hidden numbers": HIDDEN_NUMBERS,
    "masks in variables": MASKS_IN_VARIABLES,
    "attention options": ATTENTION_OPTIONS,
}
