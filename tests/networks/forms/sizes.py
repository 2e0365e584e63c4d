"""Values computed from the sizes of tensors, which are constants of the file."""

import numpy as np
import tensorflow as tf

from tests.helpers import images, layers
from tests.networks.forms.form import Form, forms

SHAPE = (8, 6)


def halved(x):
    """Divides a size by an integer, which returns float64."""
    return tf.reshape(x, [-1, tf.cast(tf.shape(x)[1] / 2, tf.int32), 2 * x.shape[2]])


def with_positions(x):
    count = tf.shape(x)[1]
    positions = tf.cast(tf.range(count), tf.float32) / tf.cast(count, tf.float32)
    return x + positions[tf.newaxis, :, tf.newaxis]


def flattened(x):
    """Reads all sizes except the last two, like code for any number of axes."""
    y = tf.stack([x, x], axis=-1)
    return tf.reshape(y, tf.concat([tf.shape(y)[:-2], [12]], axis=0))


def multiplied(x):
    """Flattens like `K.batch_flatten`."""
    y = tf.reshape(x, [tf.shape(x)[0], tf.reduce_prod(tf.shape(x)[1:])])
    return tf.reshape(y, [-1, *SHAPE])


def on_a_grid(x):
    """Computes anchors like detectors, copied for each example."""
    count, rows, columns = tf.unstack(tf.shape(x))
    parts = tf.meshgrid(tf.range(0.0, columns), tf.range(0.0, rows))
    return x + tf.tile(tf.expand_dims(parts[0] * 0.1 - parts[1] * 0.2, 0), [count, 1, 1])


def clipped(x):
    """Clips boxes to the size of an image."""
    _, rows, columns = tf.unstack(tf.cast(tf.shape(x), tf.float32))
    return tf.clip_by_value(x * 5.0, 0.0, columns - 1.0) / rows


def of_earlier_steps(x):
    """Computes masks like temporal fusion transformers."""
    earlier = tf.cumsum(tf.eye(tf.shape(x)[1], batch_shape=tf.shape(x)[:1]), 1)
    return tf.matmul(earlier, x)


def largest(x):
    """Sorts like sparsemax."""
    return x - tf.math.top_k(x, k=tf.shape(x)[-1]).values


def by_rank(x):
    """Counts axes from the number of axes, like code for any number of axes."""
    last = tf.rank(x) - 1
    swapped = tf.transpose(x, tf.concat([tf.range(last - 1), [last], [last - 1]], 0))
    y = tf.concat([x, tf.roll(x, tf.shape(x)[1] // 2, 1)], axis=last)
    y += tf.expand_dims(tf.reduce_mean(swapped, axis=last - 1), last)
    return y - tf.expand_dims(tf.reduce_max(x, axis=last), last)


def one_hot(x):
    return x + 0.1 * tf.one_hot(tf.argmax(x, axis=tf.rank(x) - 1), depth=tf.shape(x)[-1])


def cut(x):
    """Shifts relative positions as in Conformers, without any number in the code."""
    rows, columns = tf.shape(x)[1], tf.shape(x)[2]
    y = tf.reshape(tf.pad(x, [[0, 0], [0, 0], [1, 0]]), [-1, columns + 1, rows])
    y = tf.reshape(y[:, 1:], [-1, rows, columns])
    return y[:, : rows // 2 + 1, :columns] + tf.slice(x, [0, 0, 0], [-1, rows // 2 + 1, columns])


class OfTable(layers.Layer):
    """Reads the first rows of a table that another layer also reads, as for rotary embeddings."""

    def __init__(self):
        super().__init__()
        self.table = tf.constant(np.cos(np.arange(96.0)).reshape(16, 6), tf.float32)
        self.inner = Product()

    def call(self, x):
        return self.inner(x, self.table[: tf.shape(x)[1]][None])


class Product(layers.Layer):
    def call(self, x, table):
        return x * table


class Heads(layers.Layer):
    """Leaves the sizes of each head unknown, as in ports of vision transformers."""

    def __init__(self):
        super().__init__()
        self.both, self.end = layers.Dense(12), layers.Dense(6)

    def call(self, x):
        count, steps = tf.unstack(tf.shape(x)[:2])
        y = tf.transpose(tf.reshape(self.both(x), (count, steps, 2, 3, -1)), (2, 0, 3, 1, 4))
        scores = tf.nn.softmax(tf.matmul(y[0], y[1], transpose_b=True))
        y = tf.transpose(tf.matmul(scores, y[1]), (0, 2, 1, 3))
        return self.end(tf.reshape(y, (count, steps, -1)))


def heads(x):
    """Creates the weights, which unknown sizes would prevent."""
    layer = Heads()
    layer(np.zeros((1, *SHAPE), np.float32))
    return layer(x)


def between_layers(function):
    return lambda x: layers.Dense(3)(function(layers.Dense(6, activation="relu")(x)))


FUNCTIONS = (
    *(halved, with_positions, flattened, multiplied, on_a_grid, clipped, of_earlier_steps, cut),
    *(by_rank, one_hot),
)
FORMS = {
    "sizes": {
        **forms(
            {f.__name__: between_layers(f) for f in FUNCTIONS},
            images(32, SHAPE),
            kernels=("xnnpack",),
            trains=True,
        ),
        **forms(
            {
                f"{f.__name__} in a Lambda": between_layers(lambda x, f=f: layers.Lambda(f)(x))
                for f in FUNCTIONS
            },
            images(32, SHAPE),
        ),
        "of a table": Form(between_layers(lambda x: OfTable()(x)), (images(8, SHAPE),)),
    },
    "sizes, not on TensorFlow 2.15": {
        "largest": Form(between_layers(largest), (images(32, SHAPE),), trains=True),
        "heads": Form(between_layers(heads), (images(8, SHAPE),)),
    },
}
