"""Indices that are computed from float values, or are such: files without float have integers."""

import numpy as np
import tensorflow as tf

from tests.helpers import keras, layers
from tests.networks.forms.form import Form, forms

TOKENS = np.random.default_rng(0).integers(0, 9, (16, 5)).astype(np.float32)


def pooled(x):
    return layers.GlobalAveragePooling1D()(layers.Embedding(9, 4, mask_zero=True)(x))


def compared(x):
    kept = tf.cast(tf.not_equal(x, 0.0), tf.float32)[..., None]
    return layers.Dense(3)(layers.Embedding(9, 4)(x) * kept)


def sentence():
    x = keras.Input((5,))
    return keras.Model(x, layers.GlobalAveragePooling1D()(layers.Embedding(9, 4)(x)))


OF_TOKENS = {
    "a mask": pooled,
    "a comparison": compared,
    "a cast": lambda x: layers.Dense(3)(tf.one_hot(tf.cast(x, tf.int64), 9)),
    "a table and a cast": lambda x: (
        layers.Embedding(9, 4)(x)
        * tf.gather(tf.range(0.1, 1.0, 0.1), tf.cast(x, tf.int32))[..., None]
    ),
    "a part": lambda x: layers.Embedding(9, 4)(x[:, 1:3]),
    "parts of it": lambda x: layers.Embedding(9, 4)(
        layers.Concatenate()([x[:, :2], *tf.split(x[:, 2:4], 2, 1)])
    ),
    "turned": lambda x: layers.Embedding(9, 4)(tf.transpose(layers.Reshape((5, 1))(x), [0, 2, 1])),
    "shifted": lambda x: layers.Embedding(30, 4)(3.0 * x + 1),
    "each step": lambda x: layers.TimeDistributed(sentence())(layers.RepeatVector(3)(x)),
    "two tables": lambda x: layers.Embedding(9, 4)(x) + layers.Embedding(9, 4)(x),
}


INTEGER = tf.int32


TABLE = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)


def rows(positions):
    """Entries of a table of 12."""
    return layers.Dense(2)(tf.gather(tf.constant(TABLE), positions))


OF_POSITIONS = {
    "floor": lambda x: tf.cast(tf.floor(x), INTEGER),
    "ceil": lambda x: tf.cast(tf.math.ceil(x), INTEGER),
    "rounded": lambda x: tf.cast(tf.round(x), INTEGER),
    "cut off": lambda x: tf.cast(x, INTEGER),
    "the next one": lambda x: tf.cast(tf.minimum(tf.floor(x) + 1.0, 11.0), INTEGER),
    "clipped": lambda x: tf.cast(tf.clip_by_value(tf.floor(x * 3) - 9, 0, 11), INTEGER),
    "of 64 bits": lambda x: tf.cast(tf.floor(x), tf.int64),
    "moved": lambda x: tf.cast(tf.reshape(tf.stack([tf.floor(x)] * 2, 1), (-1, 8)), INTEGER),
    "a slice": lambda x: tf.cast(tf.slice(tf.floor(x) + 1.0, [0, 0], [-1, 2]), INTEGER) - 1,
    "parts": lambda x: tf.cast(tf.split(tf.floor(x) + 1.0, 2, -1)[1], INTEGER) - 1,
    "each": lambda x: (
        tf.stack([tf.cast(part, INTEGER) for part in tf.unstack(tf.floor(x) + 1.0, axis=-1)], 1) - 1
    ),
    "differences": lambda x: tf.cast(tf.abs(x - tf.floor(x)) * 11.99, INTEGER),
    "and a sum of both": lambda x: tf.cast(tf.floor(x / 2) + tf.math.ceil(x / 2), INTEGER),
    "of truth values": lambda x: tf.cast(tf.floor(x / 2) + tf.cast(x > 4.0, "float32"), INTEGER),
}


def looked_up(form):
    """Rows of 12 that numbers from 0 to 11 choose."""

    def build(x):
        dense = layers.Dense(4, use_bias=False, kernel_initializer="identity")
        return rows(OF_POSITIONS[form](dense(x) * 11.0))

    return build


NUMBERS = np.random.default_rng(1).uniform(0, 1, (64, 4)).astype(np.float32)
FORMS = {
    "float tokens": {
        **forms(OF_TOKENS, TOKENS, target="ethos_u55"),
        "each step of several": Form(
            layers.TimeDistributed(layers.Embedding(9, 4)),
            (TOKENS.reshape(4, 4, 5),),
            target="ethos_u55",
        ),
    },
    # A number within a step of a border may be on its other side.
    "float positions": forms(
        {form: looked_up(form) for form in OF_POSITIONS},
        NUMBERS,
        target="ethos_u55",
        sqnr={"": 8, "differences": 2},
        scrambles=False,
    ),
}
