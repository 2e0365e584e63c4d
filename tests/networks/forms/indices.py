"""Indices as inputs or computed from float values. Files without float have integers for them."""

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


FORMS = {
    "float tokens": {
        **forms(OF_TOKENS, TOKENS, target="ethos_u55"),
        "each step of several": Form(
            layers.TimeDistributed(layers.Embedding(9, 4)),
            (TOKENS.reshape(4, 4, 5),),
            target="ethos_u55",
        ),
    }
}
