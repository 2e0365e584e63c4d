"""Expands arithmetic operations to layers and operations with integer kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.missing_values import TESTS_FOR_NAN
from keras_qat.graph.operations import read_array, read_scalar
from keras_qat.helper_layers.elementwise_functions import (
    Logarithm,
    Power,
    Quotient,
    Reciprocal,
    SquareRoot,
)
from keras_qat.helper_layers.operations import OnGrid
from keras_qat.keras2.backend import layers
from keras_qat.lowering.activations import swish
from keras_qat.lowering.expand_call import Expansion, is_tensor, require, unwrap
from keras_qat.ops.composed import NO_WIDE


def _divide(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    if is_tensor(y):
        if is_tensor(x):
            return Quotient()([x, y])
        return Reciprocal(unwrap(read_scalar(x)))(y)
    divisor = unwrap(read_array(y))
    require(np.all(divisor))
    if not divisor.ndim:
        return layers.Rescaling(float(1.0 / divisor))(x)
    return tf.multiply(x, (1.0 / divisor).astype(np.float32))


def _add(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Rewrite `1 + x` to `x + 1`. Keras cannot load a saved model with `1 + x`."""
    require(is_tensor(y) and not is_tensor(x))
    return tf.add(y, x)


def _bias_add(value: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    return tf.add(value, bias if is_tensor(bias) else unwrap(read_array(bias)).astype(np.float32))


def _add_n(inputs: Any) -> tf.Tensor:
    require(all(map(is_tensor, inputs)))
    return layers.Add()(list(inputs))


def _power(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Expand `x ** 2` and `x ** 3` to products, and `x ** -1` or `x ** 0.5` to a `Power` layer."""
    exponent = unwrap(read_scalar(y))
    require(is_tensor(x))
    if exponent < 0 or exponent != int(exponent):
        return Power(exponent)(x)
    require(exponent in (2, 3))
    square = layers.Multiply(name="square")([x, x])
    return square if exponent == 2 else layers.Multiply()([square, x])


def _silu(features: tf.Tensor, beta: float = 1.0) -> tf.Tensor:
    require(read_scalar(beta) in (None, 1.0))
    return swish(features)


def _clip(t: tf.Tensor, clip_value_min: Any, clip_value_max: Any) -> tf.Tensor:
    low, high = (unwrap(read_scalar(end)) for end in (clip_value_min, clip_value_max))
    if low == 0 < high:
        return layers.ReLU(high)(t)
    return tf.maximum(tf.minimum(t, high, name="minimum"), low, name="maximum")


def _normalize(
    x: tf.Tensor, axis: Any = None, epsilon: float = 1e-12, dim: object = None
) -> tf.Tensor:
    rank, axes = len(x.shape), tf.nest.flatten([axis])
    require(len(axes) == 1 and isinstance(axes[0], int) and axes[0] % rank not in (0, rank - 1))
    order = list(range(rank))
    order[axes[0]], order[-1] = order[-1], order[axes[0]]
    turned = tf.transpose(x, order, name="turned")
    normalized = tf.math.l2_normalize(turned, axis=-1, epsilon=epsilon, name="normalized")
    return tf.transpose(normalized, order)


def _cast(x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Remove a cast between floating-point types, or to the same type."""
    dtype = tf.as_dtype(dtype)
    require(x.dtype == dtype or (x.dtype.is_floating and dtype.is_floating))
    return x


def _fill_like(
    input: tf.Tensor, dtype: tf.DType = None, *args: object, number: float, **options: object
) -> tf.Tensor:
    is_float = dtype is None or tf.as_dtype(dtype).is_floating
    require(input.dtype.is_floating and is_float and len(input.shape) > 1)
    return layers.Rescaling(0.0, number)(input)


def _compare(x: tf.Tensor, y: tf.Tensor, *, compare: Callable[..., Any]) -> tf.Tensor:
    """Compare `x` with the quantized value nearest to the constant `y`.

    If -1.0 is stored as -1.003, for example, `x == -1.0` would always be False.
    """
    x, y = (x, y) if is_tensor(x) else (y, x)
    wanted = unwrap(read_scalar(y))
    require(x.dtype.is_floating)
    return compare(x, OnGrid(wanted, name="number")(x))


def make_by_layer(make: Any, **options: object) -> Expansion:
    """Return an expansion that calls a new layer, `make(**options)`, on the operation's input."""
    return lambda x: make(**options)(x)


def _any_power(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    base = read_scalar(x)
    if base is None:
        require(read_scalar(y) is None)
        return tf.exp(y * tf.math.log(x))
    require(base > 0)
    return tf.exp(y * math.log(base))


def _scale_silu(features: tf.Tensor, beta: float = 1.0) -> tf.Tensor:
    factor = read_scalar(beta)
    require(factor not in (None, 1.0))
    return features * tf.sigmoid(features * factor)


def _evaluate_polynomial(coeffs: Any, x: tf.Tensor) -> tf.Tensor:
    first, *rest = coeffs
    for coefficient in rest:
        first = first * x + coefficient
    return first


def _cumulative_product(
    x: tf.Tensor, axis: Any = 0, exclusive: bool = False, reverse: bool = False
) -> tf.Tensor:
    """Compute products of 2 adjacent values, then of 4, 8 and so on, to round less often."""
    require(isinstance(axis, int) and axis % len(x.shape) != 0 and x.shape[axis] is not None)
    axis, size = axis % len(x.shape), x.shape[axis]

    def later(y: tf.Tensor, count: int) -> tf.Tensor:
        ends = tf.split(y, [count, size - count], axis)[0]
        return tf.concat([tf.ones_like(ends), tf.split(y, [size - count, count], axis)[0]], axis)

    y = tf.reverse(x, [axis]) if reverse else x
    y = later(y, 1) if exclusive else y
    for power in range((size - 1).bit_length()):
        y = y * later(y, 2**power)
    return tf.reverse(y, [axis]) if reverse else y


def _atan2(y: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Compute the angle for directions from 0 to 45 degrees. Mirror it for other directions."""
    require(not NO_WIDE)  # Quotients have 16 bits.
    x, y = (end if (known := read_scalar(end)) is None else known for end in (x, y))
    width, height = abs(x), abs(y)
    angle = tf.atan(tf.minimum(width, height) / tf.maximum(width, height))
    angle = tf.where(height > width, math.pi / 2 - angle, angle)
    angle = _where(x < 0.0, math.pi - angle, angle)
    return _where(y < 0.0, -angle, angle)


def _where(condition: tf.Tensor, if_true: tf.Tensor, if_false: tf.Tensor) -> tf.Tensor:
    if isinstance(condition, bool):
        return if_true if condition else if_false
    return tf.where(condition, if_true, if_false)


def _divide_no_nan(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    if (divisor := read_array(y)) is not None:
        return x * tf.math.divide_no_nan(np.float32(1.0), divisor.astype(np.float32))
    return tf.where(tf.equal(y, 0.0), tf.zeros_like(y), x / y)


def _clip_by_tensor(t: tf.Tensor, clip_value_min: Any, clip_value_max: Any) -> tf.Tensor:
    require(read_scalar(clip_value_min) is None or read_scalar(clip_value_max) is None)
    return tf.maximum(tf.minimum(t, clip_value_max), clip_value_min)


def _cast_to_bool(x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    require(tf.as_dtype(dtype) == tf.bool)
    return tf.not_equal(x, 0.0)


EARLY: dict[str, Expansion] = {
    "log_sigmoid": lambda x: -tf.math.softplus(-x),
    "erfc": lambda x: 1.0 - tf.math.erf(x),
    "atan2": _atan2,
    "divide_no_nan": _divide_no_nan,
    "reciprocal_no_nan": lambda x: tf.math.divide_no_nan(1.0, x),
    "scalar_mul": lambda scalar, x: x * scalar,
    "realdiv": lambda x, y: x / y,
    "squared_difference": lambda x, y: tf.square(x - y),
    **TESTS_FOR_NAN,
    "rint": lambda x: tf.round(x),
    "accumulate_n": lambda inputs, *_: tf.add_n(inputs),
    "conj": lambda x: tf.identity(x),
    "real": lambda input: tf.identity(input),
    "identity_n": lambda input: [tf.identity(x) for x in input],
    "cast": _cast_to_bool,
    "cast_to_floatx": lambda x: tf.identity(x),
    "clip_by_value": _clip_by_tensor,
    "pow": _any_power,
    "cumprod": _cumulative_product,
    "silu": _scale_silu,
    "crelu": lambda features, axis=-1: tf.concat(
        [tf.nn.relu(features), tf.nn.relu(-features)], axis
    ),
    "floormod": lambda x, y: x - y * tf.floor(x / y),
    "floor_div": lambda x, y: tf.floor(x / y),
    "xdivy": lambda x, y: x / y,
    "polyval": _evaluate_polynomial,
    "asin": lambda x: 2.0 * tf.atan(x / (1.0 + tf.sqrt(1.0 - x * x))),
    "acos": lambda x: math.pi / 2.0 - tf.asin(x),
    "acosh": lambda x: tf.math.log(x + tf.sqrt(x * x - 1.0)),
    "atanh": lambda x: (tf.math.log1p(x) - tf.math.log1p(-x)) * 0.5,
}

OF_FLOATS: dict[str, Expansion] = {
    # A Rescaling needs channels.
    "negative": lambda x: layers.Rescaling(-1.0)(x) if len(x.shape) > 1 else tf.multiply(x, -1.0),
    "silu": _silu,
    "divide": _divide,
    "bias_add": _bias_add,
    # Quantized values cannot be NaN.
    "multiply_no_nan": lambda x, y: tf.multiply(x, y),
    "add_n": _add_n,
    "square": lambda x: layers.Multiply()([x, x]),
    "log": make_by_layer(Logarithm),
    "log1p": make_by_layer(Logarithm, plus_one=True),
    "reciprocal": make_by_layer(Reciprocal),
    "sqrt": make_by_layer(SquareRoot),
    "rsqrt": make_by_layer(SquareRoot, inverse=True),
    "pow": _power,
    # Every runtime has a LeakyReLU, which computes |x| with the slope -1.
    "abs": make_by_layer(layers.LeakyReLU, alpha=-1.0),
    "clip_by_value": _clip,
    "l2_normalize": _normalize,
}

OPERATIONS: dict[str, Expansion] = {
    "add": _add,
    "cast": _cast,
    "zeros_like": partial(_fill_like, number=0.0),
    "ones_like": partial(_fill_like, number=1.0),
    "equal": partial(_compare, compare=tf.equal),
    "not_equal": partial(_compare, compare=tf.not_equal),
}
