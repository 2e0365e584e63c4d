"""TensorFlow operations written out in other operations, which have integer kernels.

Each function here takes the arguments of the operation that it stands for. It is traced like a
custom layer, and used if it gives the numbers that the operation gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, map_values
from keras_qat.graph.missing_values import TESTS_FOR_NAN
from keras_qat.graph.operations import is_operation, kind_of
from keras_qat.graph.tf_operations import array, number
from keras_qat.keras2.backend import keras
from keras_qat.lowering.attention_masks import HIDES
from keras_qat.lowering.boolean_masks import boolean_mask, chosen_of_each
from keras_qat.lowering.conv_lstm import CONVOLUTIONS, unrolled_convolutions
from keras_qat.lowering.einsums import einsum
from keras_qat.lowering.image_equivalents import IMAGES
from keras_qat.lowering.mask_tensors import RECURRENT
from keras_qat.lowering.matrix_equivalents import MATRICES
from keras_qat.lowering.normalizing import WHOLE
from keras_qat.lowering.pool_equivalents import POOLS
from keras_qat.lowering.segments import SEGMENTS
from keras_qat.lowering.signal_equivalents import SIGNALS
from keras_qat.lowering.spectra import spectrum
from keras_qat.lowering.unrolling import unrolled
from keras_qat.lowering.written_out import copies, require, written_out
from keras_qat.ops.composed import NO_WIDE


class Equivalent(keras.layers.Layer):
    """An operation that is traced as a function in its place, and computes numbers by itself.

    Args:
        operation: the call of the operation.
        function: takes the same arguments.
    """

    def __init__(self, operation: Call, function: Callable[..., Any]) -> None:
        super().__init__(name=operation.layer.name)
        self.operation, self.function = operation, function

    def call(self, inputs: Sequence[Any]) -> Any:
        tensors = dict(zip(dict.fromkeys(self.operation.inputs), inputs, strict=True))
        args, kwargs = map_values(
            tensors.__getitem__, (self.operation.args, dict(self.operation.kwargs))
        )
        is_symbolic = any(map(keras.backend.is_keras_tensor, inputs))
        return (self.function if is_symbolic else self.operation.layer)(*args, **kwargs)


def equivalent(call: Call, forced: bool = False, unrolls: bool = False) -> Call | None:
    """Returns the call of an operation, or of a recurrent layer, as one that can be opened.

    None if none is known, or if it is better in float and not forced. A recurrent layer that a row
    computes is opened if `unrolls`.
    """
    function: Callable[..., Any] | None
    if (complex_part := spectrum(call)) and (forced or not complex_part.has_kernels):
        function, reals = complex_part.in_pairs, complex_part.reals
        call = Call(complex_part, reals, {}, copies(call), call.name)
    elif chosen := chosen_of_each(call):
        function, call = chosen
    elif not all(x.is_float for x in call.inputs) and not isinstance(call.layer, RECURRENT):
        function = OF_INTEGERS.get(kind_of(call)) or written_out(call)
    elif is_operation(call.layer):
        is_better_in_float = kind_of(call) in WHOLE and not forced
        function = None if is_better_in_float else EQUIVALENTS.get(kind_of(call))
    elif type(call.layer) in CONVOLUTIONS:
        function = unrolled_convolutions(call)
    else:
        function = unrolled(call, unrolls) or written_out(call)
    if function is None:
        return None
    layer = Equivalent(call, function)
    return Call(layer, (list(dict.fromkeys(call.inputs)),), {}, copies(call), call.name)


def _log_sum(x: Any, axis: Any) -> tuple[Any, Any]:
    """Returns x less its largest value, and the logarithm of the sum of its exponentials."""
    below = x - tf.reduce_max(x, axis, keepdims=True)
    return below, tf.math.log(tf.reduce_sum(tf.exp(below), axis, keepdims=True))


def _log_softmax(logits: Any, axis: Any = None, name: Any = None) -> Any:
    below, total = _log_sum(logits, -1 if axis is None else axis)
    return below - total


def _log_sum_exp(
    input_tensor: Any, axis: Any = None, keepdims: Any = False, name: Any = None
) -> Any:
    require(axis is not None)
    largest = tf.reduce_max(input_tensor, axis, keepdims=True)
    y = largest + _log_sum(input_tensor, axis)[1]
    return y if keepdims else tf.squeeze(y, axis)


def _log_sigmoid(x: Any, name: Any = None) -> Any:
    return -tf.math.softplus(-x)


def _power(x: Any, y: Any, name: Any = None) -> Any:
    base = number(x)
    if base is None:
        require(number(y) is None)
        return tf.exp(y * tf.math.log(x))
    require(base > 0)
    return tf.exp(y * math.log(base))


def _silu(features: Any, beta: Any = 1.0) -> Any:
    beta = number(beta)
    require(beta not in (None, 1.0))
    return features * tf.sigmoid(features * beta)


def _crelu(features: Any, name: Any = None, axis: Any = -1) -> Any:
    return tf.concat([tf.nn.relu(features), tf.nn.relu(-features)], axis)


def _softmax(logits: Any, axis: Any = None, name: Any = None) -> Any:
    """Softmax along the first axis, of tensors that were stacked there."""
    require(axis == 0 and logits.shape[0] is not None)
    order = [*range(1, len(logits.shape)), 0]
    return tf.transpose(tf.nn.softmax(tf.transpose(logits, order)), np.argsort(order).tolist())


def _flattened(x: Any) -> Any:
    require(None not in x.shape[1:])
    return tf.reshape(x, [-1, math.prod(x.shape[1:])])


def _polynomial(coeffs: Any, x: Any, name: Any = None) -> Any:
    first, *rest = coeffs
    for coefficient in rest:
        first = first * x + coefficient
    return first


def _norm(
    tensor: Any, ord: Any = "euclidean", axis: Any = None, keepdims: Any = None, **_: Any
) -> Any:
    require(number(ord) in (1, math.inf) and isinstance(axis, int))
    reduce = tf.reduce_sum if number(ord) == 1 else tf.reduce_max
    return reduce(tf.abs(tensor), axis, keepdims=bool(keepdims))


def _clip_by_norm(t: Any, clip_norm: Any, axes: Any = None, name: Any = None) -> Any:
    require(axes is not None and number(clip_norm) is not None)
    norm = tf.sqrt(tf.reduce_sum(tf.square(t), axes, keepdims=True))
    return t * (clip_norm / tf.maximum(norm, clip_norm))


def _normalize(x: Any, axis: Any = None, epsilon: Any = 1e-12, name: Any = None) -> Any:
    rank, shape = len(x.shape), list(x.shape[1:])
    axes = sorted(a % rank for a in tf.nest.flatten(axis) if isinstance(a, int))
    require(len(axes) > 1 and axes == list(range(axes[0], rank)) and None not in shape)
    kept = shape[: axes[0] - 1]
    flat = tf.reshape(x, [-1, *kept, math.prod(shape[axes[0] - 1 :])])
    return tf.reshape(tf.math.l2_normalize(flat, -1, epsilon), [-1, *shape])


def _unit(
    tensor: Any, ord: Any = "euclidean", axis: Any = None, name: Any = None
) -> tuple[Any, Any]:
    require(ord in ("euclidean", 2) and axis is not None)
    return tf.math.l2_normalize(tensor, axis), tf.norm(tensor, axis=axis, keepdims=True)


def _tensordot(a: Any, b: Any, axes: Any, name: Any = None) -> Any:
    """Moves the axes to sum over to the end, for a product with a matrix or a vector."""
    count = axes if isinstance(axes, int) else 0
    given = [range(-count, 0), range(count)] if count else map(tf.nest.flatten, axes)
    summed, rows = (
        [axis % len(x.shape) for axis in part] for x, part in zip((a, b), given, strict=True)
    )
    require(0 < len(rows) == len(summed) and 0 not in summed)  # The batch stays in front.
    kept, others = (
        [axis for axis in range(len(x.shape)) if axis not in part]
        for x, part in ((a, summed), (b, rows))
    )
    order = kept + summed
    x = a if order == sorted(order) else tf.transpose(a, order)
    matrix = array(b)
    if matrix is not None:
        b = matrix.astype(np.float32)
    if len(rows) == 1 and len(b.shape) == 1:
        return tf.squeeze(tf.matmul(x, b[:, None]), -1)
    if len(rows) == 1 and len(b.shape) == 2:
        return tf.matmul(x, b, transpose_b=rows == [1])
    sizes = [a.shape[axis] for axis in kept[1:]]
    require(None not in [*sizes, *b.shape])
    b = b if rows + others == sorted(rows + others) else tf.transpose(b, rows + others)
    summed_size = math.prod(b.shape[: len(rows)])
    matrix = tf.reshape(b, [summed_size, -1])
    y = tf.matmul(tf.reshape(x, [-1, *sizes, summed_size]), matrix)
    return tf.reshape(y, [-1, *sizes, *b.shape[len(rows) :]])


def _product(input_tensor: Any, axis: Any = None, keepdims: Any = False, name: Any = None) -> Any:
    require(isinstance(axis, int) and (input_tensor.shape[axis] or 99) <= 8)
    first, *rest = tf.unstack(input_tensor, axis=axis)
    for factor in rest:
        first = first * factor
    return tf.expand_dims(first, axis) if keepdims else first


def _products(
    x: Any, axis: Any = 0, exclusive: Any = False, reverse: Any = False, name: Any = None
) -> Any:
    """Multiplies by the products of 1, 2, 4 and more numbers before, so that few are rounded."""
    require(isinstance(axis, int) and axis % len(x.shape) != 0 and x.shape[axis] is not None)
    axis, size = axis % len(x.shape), x.shape[axis]

    def later(y: Any, count: int) -> Any:
        ends = tf.split(y, [count, size - count], axis)[0]
        return tf.concat([tf.ones_like(ends), tf.split(y, [size - count, count], axis)[0]], axis)

    y = tf.reverse(x, [axis]) if reverse else x
    y = later(y, 1) if exclusive else y
    for power in range((size - 1).bit_length()):
        y = y * later(y, 2**power)
    return tf.reverse(y, [axis]) if reverse else y


def _cross(a: Any, b: Any, name: Any = None) -> Any:
    (a_next, a_last), (b_next, b_last) = (
        (tf.gather(x, [1, 2, 0], axis=-1), tf.gather(x, [2, 0, 1], axis=-1)) for x in (a, b)
    )
    return a_next * b_last - a_last * b_next


def _angle(y: Any, x: Any, name: Any = None) -> Any:
    """Computes the angle of the eighth of a circle that mirrors give, and mirrors it back."""
    require(not NO_WIDE)  # Quotients have 16 bits.
    x, y = (end if (known := number(end)) is None else known for end in (x, y))
    width, height = abs(x), abs(y)
    angle = tf.atan(tf.minimum(width, height) / tf.maximum(width, height))
    angle = tf.where(height > width, math.pi / 2 - angle, angle)
    angle = _where(x < 0.0, math.pi - angle, angle)
    return _where(y < 0.0, -angle, angle)


def _where(condition: Any, if_true: Any, if_false: Any) -> Any:
    if isinstance(condition, bool):
        return if_true if condition else if_false
    return tf.where(condition, if_true, if_false)


def _quotient_or_zero(x: Any, y: Any, name: Any = None) -> Any:
    if (divisor := array(y)) is not None:
        return x * tf.math.divide_no_nan(np.float32(1.0), divisor.astype(np.float32))
    return tf.where(tf.equal(y, 0.0), tf.zeros_like(y), x / y)


def _steps_below(lengths: Any, maxlen: Any = None, dtype: Any = tf.bool, name: Any = None) -> Any:
    require(number(maxlen) is not None)
    return tf.cast(tf.range(int(maxlen)) < tf.cast(lengths, tf.int32)[..., tf.newaxis], dtype)


def _clipped(t: Any, clip_value_min: Any, clip_value_max: Any, name: Any = None) -> Any:
    require(number(clip_value_min) is None or number(clip_value_max) is None)
    return tf.maximum(tf.minimum(t, clip_value_max), clip_value_min)


def _truth(x: Any, dtype: Any, name: Any = None) -> Any:
    require(tf.as_dtype(dtype) == tf.bool)
    return tf.not_equal(x, 0.0)


def _order(
    values: Any, axis: Any = -1, direction: Any = "ASCENDING", stable: Any = False, name: Any = None
) -> Any:
    require(axis in (-1, len(values.shape) - 1) and values.shape[-1] is not None)
    values = values if direction == "DESCENDING" else -values
    return tf.math.top_k(values, values.shape[-1]).indices


def _sorted(
    values: Any, axis: Any = -1, direction: Any = "ASCENDING", name: Any = None, **_: Any
) -> Any:
    """Sorts along another axis than the last."""
    rank = len(values.shape)
    order = list(range(rank))
    require(isinstance(axis, int) and 0 < axis % rank < rank - 1)
    order[axis], order[-1] = order[-1], order[axis]
    return tf.transpose(tf.sort(tf.transpose(values, order), -1, direction), order)


def _chosen(condition: Any, x: Any = None, y: Any = None, name: Any = None) -> Any:
    """Chooses by a constant. Large numbers are for masks in front of a softmax."""
    condition = np.asarray(condition)
    numbers = [number(end) for end in (x, y)]
    require(condition.dtype == bool and (x is not None and y is not None))
    require(all(end is None or abs(end) < -HIDES for end in numbers))
    chosen = condition.astype(np.float32)
    return x * chosen + y * (1 - chosen)


def _padded_with(
    tensor: Any, paddings: Any, mode: Any = "CONSTANT", name: Any = None, constant_values: Any = 0
) -> Any:
    value = number(constant_values)
    require(mode.upper() == "CONSTANT" and value and math.isfinite(value))
    return tf.pad(tensor - value, paddings) + value


def _length(input_tensor: Any, axis: Any = None, keepdims: Any = False, name: Any = None) -> Any:
    return tf.norm(input_tensor, axis=axis, keepdims=keepdims)


def _outer(a: Any, b: Any, *flags: Any, name: Any = None, **options: Any) -> Any:
    """Multiplies whole numbers in one column by a row, as spatial transformers copy them."""
    require(not any(flags) and not any(options.values()) and a.shape[-1] == 1)
    return a * b


def _reversed(
    input: Any, seq_lengths: Any, seq_axis: Any = None, batch_axis: Any = None, name: Any = None
) -> Any:
    """Takes the steps of each example from its last one on, and those behind it as they are."""
    require((seq_axis, batch_axis or 0) == (1, 0) and input.shape[1] is not None)
    steps, lengths = np.arange(input.shape[1], dtype=np.int32), tf.cast(seq_lengths, tf.int32)
    from_last = lengths[:, None] - (steps + 1)
    positions = tf.where(from_last >= 0, from_last, steps)
    return tf.gather(input, positions, axis=1, batch_dims=1)


OF_INTEGERS: dict[str, Callable[..., Any]] = {
    "sequence_mask": _steps_below,
    "reverse_sequence": _reversed,
    "matmul": _outer,
}
"""The same of integers."""

EQUIVALENTS: dict[str, Callable[..., Any]] = {
    "log_softmax": _log_softmax,
    "reduce_logsumexp": _log_sum_exp,
    "log_sigmoid": _log_sigmoid,
    "erfc": lambda x, name=None: 1.0 - tf.math.erf(x),
    "atan2": _angle,
    "divide_no_nan": _quotient_or_zero,
    "reciprocal_no_nan": lambda x, name=None: tf.math.divide_no_nan(1.0, x),
    "scalar_mul": lambda scalar, x, name=None: x * scalar,
    "realdiv": lambda x, y, name=None: x / y,
    "squared_difference": lambda x, y, name=None: tf.square(x - y),
    **TESTS_FOR_NAN,
    "rint": lambda x, name=None: tf.round(x),
    "accumulate_n": lambda inputs, *_: tf.add_n(inputs),
    "conj": lambda x, name=None: tf.identity(x),
    "real": lambda input, name=None: tf.identity(input),
    "identity_n": lambda input, name=None: [tf.identity(x) for x in input],
    "cast": _truth,
    "clip_by_value": _clipped,
    "argsort": _order,
    "reduce_euclidean_norm": _length,
    "pow": _power,
    "reduce_prod": _product,
    "cumprod": _products,
    "cross": _cross,
    "l2_normalize": _normalize,
    "normalize": _unit,
    "silu": _silu,
    "softmax": _softmax,
    "crelu": _crelu,
    "floormod": lambda x, y, name=None: x - y * tf.floor(x / y),
    "floor_div": lambda x, y, name=None: tf.floor(x / y),
    "xdivy": lambda x, y, name=None: x / y,
    "polyval": _polynomial,
    "asin": lambda x, name=None: 2.0 * tf.atan(x / (1.0 + tf.sqrt(1.0 - x * x))),
    "acos": lambda x, name=None: math.pi / 2.0 - tf.asin(x),
    "acosh": lambda x, name=None: tf.math.log(x + tf.sqrt(x * x - 1.0)),
    "atanh": lambda x, name=None: (tf.math.log1p(x) - tf.math.log1p(-x)) * 0.5,
    "norm": _norm,
    "clip_by_norm": _clip_by_norm,
    "boolean_mask": boolean_mask,
    "tensordot": _tensordot,
    "einsum": einsum,
    "sort": _sorted,
    "where": _chosen,
    "pad": _padded_with,
    **MATRICES,
    **POOLS,
    **SEGMENTS,
    **SIGNALS,
    "cast_to_floatx": lambda x: tf.identity(x),
    **IMAGES,
    "batch_flatten": _flattened,
}
"""Kind of an operation -> a function that computes the same in other operations."""
