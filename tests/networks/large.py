"""Networks that sum, compare or move 10^3 to 10^6 values, and networks of 2,000 channels.

Their inputs test accumulators: one example has the largest value everywhere, one the smallest.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tests.end_to_end.exact import model_of
from tests.helpers import layers, rng, scramble
from tests.networks.tables import Network

COUNTS = (1_000, 4_096, 4_128, 8_256, 16_512, 20_000, 100_000, 1_000_000)
"""Values per sum. The kernels of SSE, AVX2 and AVX-512 have limits just below some of them."""

EXAMPLES = 4
LOWEST, LARGEST = -1.0, 3.0


def reaching(shape: tuple[int, ...], model: Any) -> np.ndarray:
    """Returns an example of largest values, one of smallest, and random examples between them."""
    x = rng(0).uniform(LOWEST, LARGEST, (EXAMPLES, *shape)).astype(np.float32)
    x[0], x[1] = LARGEST, LOWEST
    x[2] *= 0.05
    return x


def of(function: Callable[[Any], Any], *shape: int) -> Network:
    """Returns a network of a function of one tensor."""
    return Network(lambda: scramble(model_of(function, shape)), partial(reaching, shape))


def of_layer(make: Callable[[], Any], *shape: int) -> Network:
    """Returns a network of a layer with random weights."""
    return of(lambda x: make()(x), *shape)


def _normalized(x: Any) -> Any:
    centred = x - tf.reduce_mean(x, 1, keepdims=True)
    return centred / tf.sqrt(tf.reduce_mean(tf.square(centred), 1, keepdims=True) + 1e-3)


SUMS = {
    "mean": lambda x: tf.reduce_mean(x, 1),
    "sum": lambda x: tf.reduce_sum(x, -1, keepdims=True),
    "norm": lambda x: tf.norm(x, axis=-1),
    "normalized": _normalized,
    "largest": lambda x: tf.reduce_max(x, -1),
    "smallest": lambda x: tf.reduce_min(x, -1),
    "index": lambda x: tf.argmax(x, -1),
}

FUNCTIONS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "mean of time": (lambda x: tf.reduce_mean(x, 1), (20_000, 3)),
    "mean of the last axis": (lambda x: tf.reduce_mean(x, -1), (3, 4, 9_000)),
    "mean of two axes": (lambda x: tf.reduce_mean(x, (1, 2)), (130, 130)),
    "mean of three axes": (lambda x: tf.reduce_mean(x, (1, 2, 3)), (40, 40, 3)),
    "mean of outer axes": (lambda x: tf.reduce_mean(x, (1, 3)), (9, 2, 9_000)),
    "mean of inner axes": (lambda x: tf.reduce_mean(x, (2, 4), True), (2, 2, 2, 9_000)),
    "sum of squares": (lambda x: tf.reduce_sum(x * x, 1), (20_000,)),
    "sum of parts": (lambda x: tf.add_n(tf.unstack(x, axis=1)), (40, 3)),
    "cumulative sum": (lambda x: tf.cumsum(x, 1), (2_000,)),
    "product": (lambda x: tf.matmul(x, x, transpose_b=True), (8, 5_000)),
    "product of tokens": (lambda x: tf.matmul(x, x, transpose_a=True), (1_024, 8)),
    "joined": (lambda x: tf.concat([x, tf.tanh(x)], -1), (3, 2_000)),
}

LAYERS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "global pooling": (layers.GlobalAveragePooling2D, (300, 300, 1)),
    "global pooling of channels": (layers.GlobalAveragePooling2D, (30, 30, 2_000)),
    "global pooling, channels first": (
        partial(layers.GlobalAveragePooling2D, "channels_first"),
        (3, 112, 112),
    ),
    "global pooling of volumes": (layers.GlobalAveragePooling3D, (30, 30, 30, 2)),
    "average pooling": (partial(layers.AveragePooling2D, 100), (200, 200, 2)),
    "largest of windows": (partial(layers.MaxPooling2D, 100), (200, 200, 2)),
    "softmax of 1000": (layers.Softmax, (1_000,)),
    "softmax of 5000": (layers.Softmax, (5_000,)),
    "softmax of 100000": (layers.Softmax, (100_000,)),
    "1000 classes": (partial(layers.Dense, 1_000, "softmax"), (300,)),
    "dense of 5000": (partial(layers.Dense, 3), (5_000,)),
    "dense of 40000": (partial(layers.Dense, 3), (40_000,)),
    "dense of 1000000": (partial(layers.Dense, 2), (1_000_000,)),
    "dense of steps": (partial(layers.Dense, 3), (5, 20_000)),
    "convolution": (partial(layers.Conv2D, 3, 3), (4, 4, 2_048)),
    "convolution to many": (partial(layers.Conv2D, 2_000, 1, activation="relu"), (3, 3, 5)),
    "convolution of 251 taps": (partial(layers.Conv1D, 2, 251), (500, 3)),
    "depthwise of 31 x 31": (partial(layers.DepthwiseConv2D, 31), (40, 40, 3)),
    "depthwise of 2000": (partial(layers.DepthwiseConv2D, 3), (5, 5, 2_000)),
    "transposed": (partial(layers.Conv2DTranspose, 2, 3, 2), (3, 3, 2_000)),
    "batch normalization": (layers.BatchNormalization, (4, 2_000)),
    "steps": (partial(layers.GRU, 3), (60, 2)),
    "wide cell": (partial(layers.LSTM, 4), (3, 2_000)),
}

ONES: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "dense of 100000 ones": (partial(layers.Dense, 1), (100_000,)),
    "convolution of ones": (partial(layers.Conv2D, 1, 7), (7, 7, 2_048)),
}
"""Layers with products that add up to more than 32 bits if weights have the usual scale."""


def of_ones(make: Callable[..., Any], *shape: int) -> Network:
    """Returns a network of a layer with equal weights."""
    layer = partial(make, kernel_initializer="ones")
    return Network(lambda: model_of(lambda x: layer()(x), shape), partial(reaching, shape))


LARGE: dict[str, Network] = {
    **{
        f"{name} of {count}": of(function, count)
        for name, function in SUMS.items()
        for count in COUNTS
    },
    **{name: of(function, *shape) for name, (function, shape) in FUNCTIONS.items()},
    **{name: of_layer(make, *shape) for name, (make, shape) in LAYERS.items()},
    **{name: of_ones(make, *shape) for name, (make, shape) in ONES.items()},
}
"""Name -> network with one output."""
