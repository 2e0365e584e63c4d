"""Constants, integers and indices."""

import numpy as np
import tensorflow as tf

from tests.helpers import images, keras, layers
from tests.networks.forms.form import Form, forms

TABLE = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
ROWS_OF_CONSTANTS = forms(
    {
        "numbers": lambda i: tf.gather(TABLE[:, 0], i),
        "rows": lambda i: tf.nn.embedding_lookup(TABLE, i),
        "matrices": lambda i: tf.gather(TABLE.reshape(4, 3, 3), i),
        "by hand": lambda i: keras.backend.gather(tf.constant(TABLE), i),
    },
    np.random.default_rng(0).integers(0, 4, (16, 5), np.int32),
    sqnr=40,
)
MATRICES = np.random.default_rng(0).normal(size=(40, 6, 5)).astype("float32")
CONSTANT_PRODUCTS = forms(
    {
        "an equation": lambda x: tf.einsum("bni,nij->bnj", x, MATRICES),
        "an equation, constant first": lambda x: tf.einsum(
            "nij,bni->bjn", tf.constant(MATRICES), x
        ),
        "a product": lambda x: tf.matmul(x[:, :, None], MATRICES),
        "a product, constant first": lambda x: tf.matmul(
            MATRICES, b=x[..., None], transpose_a=True
        ),
    },
    np.random.default_rng(1).normal(size=(16, 40, 6)).astype("float32"),
    sqnr=34,
)
EACH = np.array([1.0, 0.2, -1.0, 3.0], np.float32)
LIMITS = forms(
    {
        "all below": lambda x: tf.maximum(x, 1.0),
        "all above": lambda x: tf.minimum(-0.5, x),
        "clipped": lambda x: tf.clip_by_value(x, 0.8, 2.0),
        "one for each channel": lambda x: tf.maximum(x, EACH) + tf.minimum(x, EACH),
        "beyond a fixed range": lambda x: tf.maximum(tf.sigmoid(x), 1.5),
        "within a fixed range": lambda x: tf.maximum(tf.sigmoid(x), 0.6),
    },
    np.random.default_rng(0).uniform(0.1, 0.5, (16, 4)).astype(np.float32),
    sqnr=44,
)
STEPS = np.arange(4)[None]
FUNCTIONS = {
    "tile": lambda x: tf.tile(STEPS, [tf.shape(x)[0], 1]),
    "broadcast_to": lambda x: tf.broadcast_to(tf.constant(STEPS), [tf.shape(x)[0], 4]),
    "repeat": lambda x: tf.repeat(STEPS, tf.shape(x)[0], axis=0),
    "gather": lambda x: tf.gather(STEPS[0, ::-1], tf.argsort(x)),
    "fill": lambda x: tf.fill([tf.shape(x)[0], 4], np.int64(3)),
    "where": lambda x: tf.where(x > 0, STEPS[0], np.int64(2)),
}
OF_POSITIONS = {
    "clip_by_value": lambda x: tf.clip_by_value(x, tf.zeros([], tf.int32), 6),
    "relu6": tf.nn.relu6,
    "relu6 behind another": lambda x: tf.nn.relu6(tf.nn.relu6(x) + 1),
    "matmul": lambda x: 2 + tf.reshape(tf.matmul(x[..., None], tf.ones((1, 2), tf.int32)), (-1, 8)),
}


def added(function):
    """Adds a value that an integer selects, so the result depends on the integer."""

    def build(x):
        y = keras.layers.Dense(4)(x)
        return tf.one_hot(function(y), 4)[:, 1] + y

    return build


def looked_up(function):
    """Looks up indices up to 6, which TFLite's converter would clip by an integer ReLU6."""
    return lambda x: keras.layers.Embedding(12, 2)(function(x % 12 - 2))


INTEGER_TYPES = {
    **forms({name: added(f) for name, f in FUNCTIONS.items()}, images(16, (4,)), sqnr=38),
    **forms(
        {f"{name} of positions": looked_up(f) for name, f in OF_POSITIONS.items()},
        np.arange(64, dtype=np.int32).reshape(16, 4),
        sqnr=42,
    ),
}


def split(x):
    tokens, values = tf.split(x, [1, 2], axis=-1)
    return layers.Flatten()(layers.Embedding(9, 4)(tokens)), layers.Dense(4)(values)


def unstacked(x):
    tokens, *rest = tf.unstack(x, axis=1)
    return layers.Embedding(9, 4)(tokens), layers.Dense(4)(tf.stack(rest, 1))


def sliced(x):
    tokens = tf.cast(x[:, 0], tf.int32)
    return layers.Embedding(9, 4)(tokens), layers.Dense(4)(x[:, 1:])


TOKEN_IDS = np.random.default_rng(0).integers(0, 9, (16, 5)).astype(np.float32)
ROWS = np.concatenate([TOKEN_IDS[:, :1], TOKEN_IDS[:, 1:3] / 4.0 - 1.0], 1)
"""The token ids are not exact in 8 bits, so the file must round them."""

TOKENS = {
    f"{build.__name__}, {target}": Form(build, (ROWS,), target=target, in_float=True)
    for build in (split, unstacked, sliced)
    for target in (None, "ethos_u55")
}
SHAPE = (4, 3, 2)


def with_examples(x, rows, columns):
    batch = tf.shape(x)[0]
    examples = tf.tile(tf.reshape(tf.range(batch), (batch, 1)), (1, 5))
    return tf.gather_nd(x, tf.stack([examples, rows, columns], -1))


def single_numbers(x, rows, columns):
    batch, indices = tf.shape(x)[0], [rows, columns, tf.minimum(rows, 1)]
    examples = tf.repeat(tf.range(batch)[:, None], 5, axis=1)
    return tf.gather_nd(params=x, indices=tf.stack([examples, *indices], axis=2))


INDEXED = {
    "with_examples": with_examples,
    "in_one_tensor": lambda x, *ids: tf.gather_nd(
        x, tf.concat([i[..., None] for i in ids], -1), batch_dims=1
    ),
    "single_numbers": single_numbers,
    "rows_alone": lambda x, rows, columns: tf.gather_nd(x, rows[..., None], batch_dims=1),
}
DRAW = np.random.default_rng(1)
GATHER_ND = forms(
    {
        name: lambda *inputs, f=function: layers.Lambda(lambda x: f(*x))(inputs)
        for name, function in INDEXED.items()
    },
    images(8, SHAPE),
    DRAW.integers(0, 4, (8, 5), np.int32),
    DRAW.integers(0, 3, (8, 5), np.int32),
)
FORMS = {
    "rows of constants": ROWS_OF_CONSTANTS,
    "constant products": CONSTANT_PRODUCTS,
    "limits": LIMITS,
    "integer types": INTEGER_TYPES,
    "tokens": TOKENS,
    "gather nd": GATHER_ND,
}
