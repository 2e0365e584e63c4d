"""Tests operations of Keras 3 on symbolic tensors: converted to Keras 2, saved and loaded."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import keras_qat
from keras_qat.keras2.backend import keras as keras_2
from tests.imports.keras3.comparison import assert_equal_outputs, inputs_of

keras = pytest.importorskip("keras", minversion="3.0")
ops = keras.ops
WEIGHTS = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(4, 3)

ARITHMETIC: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x + x,
    "with_number": lambda x: 1.0 - x * 2,
    "with_array": lambda x: x * np.arange(4.0, dtype=np.float32),
    "with_integers": lambda x: ops.cast(x * 4, "int32") * 0.5,
    "division": lambda x: x / 3 + 2.0 / (x * x + 1),
    "remainders": lambda x: x // 1.5 + x % 2,
    "powers": lambda x: x**2 + ops.sqrt(ops.abs(x)) + ops.square(x),
    "negative": lambda x: -x,
    "comparisons": lambda x: ops.where(ops.logical_and(x > 0, x < 1), x, 0.0),
    "extrema": lambda x: ops.maximum(ops.minimum(x, 0.5), -0.5),
    "clip": lambda x: ops.clip(x, 0, 1),
    "functions": lambda x: ops.exp(x) + ops.sin(x) + ops.log1p(ops.abs(x)) + ops.erf(x),
    "rsqrt": lambda x: ops.rsqrt(x * x + 1),
}
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "relu": ops.relu,
    "relu6": ops.relu6,
    "relu_with_options": lambda x: keras.activations.relu(x, 0.1, 6.0),
    "leaky_relu": lambda x: ops.leaky_relu(x, 0.1),
    "hard_sigmoid": ops.hard_sigmoid,
    "hard_silu": ops.hard_silu,
    "silu": ops.silu,
    "gelu": lambda x: ops.gelu(x, approximate=True),
    "softmax": lambda x: ops.softmax(x, axis=1),
    "log_softmax": ops.log_softmax,
    "mish": keras.layers.Activation("mish"),
    "glu": ops.glu,
    "celu": lambda x: ops.celu(x, 0.5),
    "squareplus": ops.squareplus,
    "threshold": lambda x: ops.threshold(x, 0.1, 0.0),
}
REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda x: ops.mean(x, axis=[1, 2]),
    "mean_of_integers": lambda x: ops.mean(ops.cast(x * 9, "int32"), axis=1),
    "sum": lambda x: ops.sum(x, -1, keepdims=True),
    "max": lambda x: ops.max(x, 1) - ops.amin(x, 2),
    "range_of_all": lambda x: x / (ops.max(x) - ops.min(x)),
    "variance": lambda x: ops.var(x, -1) + ops.std(x, -1),
    "norm": lambda x: ops.norm(x, axis=-1),
    "normalize": ops.normalize,
    "layer_norm": ops.layer_normalization,
    "argmax": lambda x: ops.argmax(x, -1, keepdims=True),
    "one_hot": lambda x: ops.one_hot(ops.argmin(x, -1), 4),
    "cumulative": lambda x: ops.cumsum(x, 1),
    "top": lambda x: ops.top_k(x, 2)[0],
    "logsumexp": lambda x: ops.logsumexp(x, -1),
}
SHAPES: dict[str, Callable[[Any], Any]] = {
    "slice": lambda x: x[:, 1:, ..., 0],
    "new_axis": lambda x: x[:, None, ::2],
    "take": lambda x: ops.take(x, [0, -1], axis=1),
    "reshape": lambda x: ops.reshape(x, (-1, 16, 4)),
    "transpose": lambda x: ops.transpose(x, (0, 2, 1, 3)),
    "swapaxes": lambda x: ops.swapaxes(x, 1, -1),
    "moveaxis": lambda x: ops.moveaxis(x, [1, -1], [-1, 1]),
    "concatenate": lambda x: ops.concatenate([x, x], -1),
    "stack": lambda x: ops.stack([x, x], 1),
    "split": lambda x: ops.split(x, 2, -1)[1],
    "unstack": lambda x: ops.unstack(x, 4, -1)[1],
    "squeeze": lambda x: ops.squeeze(ops.expand_dims(x[:, :1], 3), (1, 3)),
    "pad": lambda x: ops.pad(x, ((0, 0), (1, 1), (1, 0), (0, 0))),
    "repeat": lambda x: ops.repeat(x, 2, 1),
    "tile": lambda x: ops.tile(x, (1, 2, 1, 1)),
    "flip": lambda x: ops.roll(ops.flip(x, 1), 1, 2),
    "depth_to_space": lambda x: ops.depth_to_space(x, 2),
}
PRODUCTS: dict[str, Callable[[Any], Any]] = {
    "matmul": lambda x: x @ x,
    "einsum": lambda x: ops.einsum("bijc,bjkc->bikc", x, x),
    "tensordot": lambda x: ops.tensordot(x, WEIGHTS, axes=[[3], [0]]),
    "convolution": lambda x: ops.conv(x, np.ones((3, 3, 4, 2), np.float32)),
    "pooling": lambda x: ops.max_pool(x, 2) + ops.average_pool(x, 2),
    "resize": lambda x: ops.image.resize(x, (8, 8)),
}
CASES = {**ARITHMETIC, **{f"{name}_": case for name, case in ACTIVATIONS.items()}}
CASES.update({f"{name}_of_axes": case for name, case in REDUCTIONS.items()})
CASES.update({**SHAPES, **PRODUCTS})


def test_operations():
    """One model is faster. Its layers are named after the operations."""
    inputs = keras.Input((4, 4, 4))
    model = keras.Model(inputs, {name: case(inputs) for name, case in CASES.items()})
    assert len(model.outputs) == len(CASES)
    converted = keras_qat.from_keras_3(model)
    x = inputs_of(model)
    assert_equal_outputs(model, converted, x)
    reloaded = keras_2.Model.from_config(converted.get_config())
    assert_equal_outputs(model, reloaded, x)


def test_what_cannot_be_said_is_refused():
    inputs = keras.Input((4, 4))
    model = keras.Model(inputs, ops.vectorized_map(lambda row: row * 2, inputs))
    with pytest.raises(ValueError, match=r"'vectorized_map' \(VectorizedMap\).*Lambda"):
        keras_qat.from_keras_3(model)
