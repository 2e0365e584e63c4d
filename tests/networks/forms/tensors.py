"""Concatenated, mapped, merged and copied tensors."""

import numpy as np
import tensorflow as tf

from tests.helpers import images, layers
from tests.networks.forms.form import Form, forms


def concatenated(small, large):
    return tf.concat([small, large], -1)


def stacked(axis):
    return lambda small, large: tf.stack([small, large[..., :4]], axis)


def reshaped(small, large):
    return tf.reshape(concatenated(small, large), [tf.shape(small)[0], 1, 5, 10])


def several(small, large):
    """Concatenates a detector's boxes, as centers and sizes, and scores."""
    return tf.concat([small, large, small * 0.5, small[..., :1]], -1)


PARTS = {
    "slices": (concatenated, lambda both: (both[..., :4], both[:, None, :, -6:-3])),
    "one_index": (
        lambda *pair: layers.Concatenate()([*pair]),
        lambda both: (both[:, ::-1, 2], both[..., 5]),
    ),
    "splits": (concatenated, lambda both: tf.split(both, [1, 3, 6], axis=-1)),
    "stacked": (stacked(2), lambda pairs: (pairs[:, :, 0], pairs[:, 1:, 1, :3])),
    "unstacked": (stacked(-1), lambda pairs: tf.unstack(pairs, axis=-1)),
    "nested": (
        lambda small, large: tf.concat([small, concatenated(small, large)], -1),
        lambda both: (both[..., 1:3], both[..., 4:][..., 4:]),
    ),
    "reshaped": (
        reshaped,
        lambda both: (both[..., :4], tf.split(both, [4, 6], -1)[0], both[:, 0, 1:, 3:4]),
    ),
    "cropped": (
        lambda small, large: tf.concat([tf.concat([small, small], 1), large[..., :4]], 1),
        lambda both: (tf.slice(both, [0, 0, 0], [-1, 5, 4]), layers.Cropping1D((6, 7))(both)),
    ),
    "several": (
        several,
        lambda both: (*tf.split(both, [4, 6, 5], -1), both[:, 1:, -5:], both[..., -4:]),
    ),
}
"""How two tensors are joined, and which parts of the result are read."""


def of_both(join, read):
    return lambda *x: read(join(layers.Dense(4)(x[0]), layers.Dense(6)(x[1]) * 1000.0))


X = [np.random.default_rng(1).normal(size=(16, 5, size)).astype(np.float32) for size in (4, 6)]
JOINED_PARTS = {
    **forms(
        {k: of_both(*row) for k, row in PARTS.items() if k not in ("reshaped", "cropped")},
        *X,
        target="ethos_u55",
    ),
    "all but the first": Form(lambda x: tf.strided_slice(x, [0, 1], [tf.shape(x)[0], -1]), (X[0],)),
    "the last channels": Form(
        lambda x: tf.strided_slice(x, [0, 0, 2], [tf.shape(x)[0], -1, 4]), (X[0],)
    ),
}


def of_one_axis(x):
    """Computes with other axes, sizes and constants."""
    x = x - tf.reduce_mean(x, 0) * tf.constant([1.0, 0.5, 2.0])
    y = tf.reshape(x, [tf.shape(x)[0] * 3])
    return tf.stack([y[1:-1], tf.reverse(y, [0])[2:]], 1) + y[0]


def in_other_axes(x):
    y = tf.transpose(x)
    y = tf.concat([y, tf.expand_dims(y[:, 0], 1)], axis=1)
    return tf.nn.softmax(y, axis=0)


def product(x):
    a, b = tf.split(x, 2)
    return tf.reduce_sum(a[:, None] * b[None], axis=-1)


def rows_of_a_table(x):
    return tf.gather(x, [2, 0]) + tf.gather(x, [1, 1, 2], axis=1)[:2]


FUNCTIONS = {
    "one axis": of_one_axis,
    "other axes": in_other_axes,
    "product": product,
    "rows": rows_of_a_table,
}


class Capsules(layers.Layer):
    """Computes votes of capsules: products with a weight, and values from weights alone."""

    def build(self, shape):
        self.matrices = self.add_weight("matrices", (2, *shape[1:], 5), initializer="random_normal")

    def votes(self, x):
        return tf.matmul(x[:, :, None], 0.5 * self.matrices)

    def call(self, inputs):
        tiled = tf.tile(inputs[:, None], (1, 2, 1, 1))
        return tf.reduce_sum(tf.squeeze(tf.map_fn(self.votes, tiled), 3), 2)


def mapped(function, loop):
    def in_loop(x):
        return getattr(tf, loop)(function, x)

    return lambda x: layers.Lambda(in_loop)(layers.Dense(3)(x))


def rows_that_an_input_names(x, rows):
    """Gathers rows at positions from an input, as for masked words."""

    def taken(pair):
        return tf.map_fn(lambda one: tf.gather(one[0], one[1]), pair, fn_output_signature="float32")

    return layers.Dense(2)(layers.Lambda(taken)((layers.Dense(3)(x), rows)))


def correlated(convolution, stride, padding):
    """Correlates each image with its own template, as in trackers."""

    def of_one(pair):
        template, image = pair
        return convolution(image[None], template, stride, padding)[0]

    return lambda *inputs: layers.Lambda(lambda pair: tf.vectorized_map(of_one, pair))(inputs)


def convolved_by_a_constant(x):
    kernel = np.random.default_rng(0).normal(size=(2, 2, 3, 4)).astype(np.float32)
    return layers.Lambda(
        lambda x: tf.map_fn(lambda one: tf.nn.conv2d(one[None], kernel, 2, "SAME")[0], x)
    )(x)


IMAGES = images(8, (6, 5, 3))
EXAMPLES = images(8, (4, 3))
MAPPED_EXAMPLES = {
    **forms({name: mapped(f, "map_fn") for name, f in FUNCTIONS.items()}, EXAMPLES),
    "rows, vectorized": Form(mapped(rows_of_a_table, "vectorized_map"), (EXAMPLES,)),
    "rows that an input names": Form(
        rows_that_an_input_names,
        (EXAMPLES, np.random.default_rng(1).integers(0, 4, (8, 2), np.int32)),
    ),
    "convolutions by another input": Form(
        correlated(tf.nn.conv2d, [1, 2, 2, 1], "VALID"), (images(8, (3, 2, 3, 4)), IMAGES)
    ),
    "convolutions by channels of another input": Form(
        correlated(tf.nn.depthwise_conv2d, [1] * 4, "SAME"), (images(8, (3, 3, 3, 2)), IMAGES)
    ),
    "convolutions by a constant": Form(convolved_by_a_constant, (IMAGES,)),
    "functions that read a weight": Form(lambda x: Capsules()(x), (EXAMPLES,)),
}
ROWS = {
    "as wide as the others leave": lambda x: [tf.shape(x)[0], 3, -1],
    "as many as there are": lambda x: [tf.shape(x)[0], -1, 4],
    "flat": lambda x: [tf.shape(x)[0], -1],
    "halves": lambda x: (tf.shape(x)[0], -1, 2),
    "counted by rows": lambda x: [tf.shape(tf.reshape(x, [-1, 4]))[0], 2, -1],
}
COPIED = {
    "broadcast_to": lambda x, row: tf.broadcast_to(row, tf.shape(x)),
    "broadcast_to of more axes": lambda x, row: tf.broadcast_to(row[None], tf.shape(x)),
    "tile": lambda x, row: tf.tile(row[None], tf.stack([tf.shape(x)[0], 1, 1])),
}


class Loop(layers.Layer):
    """Custom steps with initial states of zeros, ones or another value for each example."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.step = layers.Dense(3, "tanh")

    def call(self, inputs):
        count = tf.shape(inputs)[0]
        state, gate = tf.zeros((count, 3)), tf.fill([count, 3], 0.5)
        for index in range(2):
            state = self.step(tf.concat([inputs[:, index], state, tf.ones([count, 1])], -1))
            gate = gate * state
        return gate


class FromTokens(layers.Layer):
    """Creates initial states with sizes of token ids, or all of `tf.shape`, as in decoders."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding = layers.Embedding(9, 3)

    def call(self, tokens):
        state = tf.zeros((tf.shape(tokens)[0], 3))
        for index in range(2):
            first = self.embedding(tokens[:, index])
            largest = tf.maximum(tf.fill(tf.shape(first), 0.01), first)
            state = 0.5 * state + largest * tf.ones([tf.shape(tokens)[0] * 1, 1])
        return state * tf.zeros(tf.shape(tokens)[:1])[:, None] + state


class FromOneToken(layers.Layer):
    """Adds embeddings to zeros of the batch size. Examples are scalars."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding = layers.Embedding(9, 3)

    def call(self, token):
        total = tf.zeros((tf.shape(token)[0], 3)) + tf.fill(tf.shape(token), 0.5)[:, None]
        return total + self.embedding(token) + tf.ones(tf.shape(token)[:1])[:, None]


class Largest(layers.Layer):
    """Begins with a very low value, like RWKV's steps."""

    def call(self, x):
        largest, total = tf.fill(tf.shape(x[:, 0]), -1e4), tf.zeros_like(x[:, 0])
        for index in range(3):
            before, largest = largest, tf.maximum(largest, x[:, index])
            total = total * tf.exp(before - largest) + tf.exp(x[:, index] - largest)
        return total


class Decaying(layers.Layer):
    """Begins with a very low value and decays the largest value, like RWKV's steps."""

    def build(self, shape):
        self.decay = self.add_weight("decay", (4,), initializer="ones")

    def call(self, x):
        largest, total = tf.ones_like(x[:, 0]) * -1e38, tf.zeros_like(x[:, 0])
        for index in range(2):
            before = largest - tf.exp(self.decay)
            largest = tf.maximum(before, x[:, index])
            total = tf.exp(before - largest) * total + tf.exp(x[:, index] - largest)
        return total - tf.zeros_like(total)


class Limited(layers.Layer):
    """Clips at limits that no value reaches."""

    def call(self, x):
        return tf.minimum(tf.maximum(x, tf.ones_like(x) * -1e9), 1e9 - tf.zeros_like(x))


def of_rows(sizes):
    """Reshapes so that the unknown first axis counts rows: three times the examples."""
    return lambda x: tf.reshape(layers.Dense(4)(tf.reshape(x, [-1, 4])), sizes(x))


def merged(merge):
    return lambda *values: merge()(list(values))


def parts_with_the_name_of_another(x):
    y = layers.SeparableConv2D(2, 2, name="conv")(x)
    return layers.Conv2D(2, 2, name="conv_depthwise")(y)


def of_shapes(*shapes):
    return tuple(images(4, shape, seed) for seed, shape in enumerate(shapes))


ROW = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
PAIRS = np.arange(16, dtype=np.int32).reshape(8, 2) % 9
MERGES_AND_COPIES = {
    **{
        f"{merge.__name__} of {shapes}": Form(merged(merge), of_shapes(*shapes))
        for merge in (layers.Add, layers.Subtract, layers.Maximum, layers.Average)
        for shapes in (((), (1,)), ((3, 4), (4,)))
    },
    "Add of three": Form(merged(layers.Add), of_shapes((4,), (3, 4, 4), (4,))),
    **forms(
        {
            f"{merge.__name__} of one": lambda x, merge=merge: merge()([layers.Dense(3)(x)])
            for merge in (layers.Add, layers.Concatenate, layers.Maximum)
        },
        images(8, (4,)),
    ),
    "add_n of one": Form(lambda x: tf.add_n([layers.Dense(3)(x)]), (images(8, (4,)),)),
    "names of parts": Form(parts_with_the_name_of_another, (images(16, (4, 4, 2)),)),
    **forms({f"rows, {name}": of_rows(f) for name, f in ROWS.items()}, images(8, (3, 4))),
    **forms(
        {
            f"copied by {name}": lambda x, f=f: tf.sin(x) * f(x, tf.constant(ROW))
            for name, f in COPIED.items()
        },
        images(8, (3, 4)),
    ),
    "uniform states": Form(lambda x: Loop()(x), (images(32, (2, 4)),)),
    "uniform beside tokens": Form(lambda x: FromTokens()(x), (PAIRS,)),
    "uniform beside single tokens": Form(lambda x: FromOneToken()(x), (PAIRS.ravel(),)),
    **forms(
        {kind.__name__: lambda x, k=kind: k()(x) for kind in (Largest, Decaying, Limited)},
        images(32, (3, 4)),
    ),
}
FORMS = {
    "joined parts": JOINED_PARTS,
    "mapped examples": MAPPED_EXAMPLES,
    "merges and copies": MERGES_AND_COPIES,
}
