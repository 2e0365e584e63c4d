"""Lowering of TensorFlow operations on symbolic tensors."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.frontend.graph import Call, Value, values_in
from keras_qat.frontend.helper_layers import Roll
from keras_qat.frontend.keras2.backend import keras
from keras_qat.frontend.tf_operations import array, is_operation, number, operands
from keras_qat.lowering.activations import split_swish
from keras_qat.lowering.attention import split_einsum
from keras_qat.lowering.builder import Lowering, LoweringContext, PartsBuilder, replace_by
from keras_qat.lowering.image_ops import split_old_resize, split_patches, split_resize
from keras_qat.lowering.merges import convert_fixed_ranges, convert_second_factor

__all__ = ["OPERATIONS"]

_layers = keras.layers


def _split_silu(call: Call, context: LoweringContext) -> list[Call]:
    (_, beta) = operands(call, "features", "beta")
    return split_swish(call, context) if beta in (None, 1.0) else []


def _split_division(call: Call, context: LoweringContext) -> list[Call]:
    """x / number -> Rescaling(1 / number); x / array -> times what 1 / array is."""
    x, divisor = operands(call, "x", "y")
    divisor = array(divisor)
    if not isinstance(x, Value) or divisor is None or not np.all(divisor):
        return []
    factor = (1.0 / divisor).astype(np.float32)
    if not factor.ndim:
        return replace_by(call, context, _layers.Rescaling, float(1.0 / divisor))
    parts = PartsBuilder(call, context)
    return parts.end(parts.new("", type(call.layer), tf.math.multiply), x, factor)


def _split_bias(call: Call, context: LoweringContext) -> list[Call]:
    """tf.nn.bias_add to the last axis -> a sum."""
    x, bias, layout = operands(call, "value", "bias", "data_format")
    if not isinstance(bias, Value):
        bias = array(bias)
        bias = None if bias is None else bias.astype(np.float32)
    if bias is None or (layout or "").startswith("NC"):
        return []
    parts = PartsBuilder(call, context)
    return parts.end(parts.new("", type(call.layer), tf.math.add), x, bias)


def _split_square(call: Call, context: LoweringContext) -> list[Call]:
    """The square of a tensor -> Multiply of it and itself."""
    x = call.inputs[0]
    return replace_by(call, context, _layers.Multiply, inputs=[x, x]) if x.is_float else []


def _split_power(call: Call, context: LoweringContext) -> list[Call]:
    """x ** 2 and x ** 3 -> Multiply."""
    x, exponent = operands(call, "x", "y")
    if not isinstance(x, Value) or not x.is_float or number(exponent) not in (2, 3):
        return []
    if number(exponent) == 2:
        return _split_square(call, context)
    parts = PartsBuilder(call, context)
    square = parts.add(parts.new("square", _layers.Multiply), [x, x], shape=x.shape)
    return parts.end(parts.new("", _layers.Multiply), [square, x])


def _split_getitem(call: Call, context: LoweringContext) -> list[Call]:
    """x[..., a] -> x[:, :, a]: no configuration holds an Ellipsis."""
    if len(call.args) != 2:  # As it was saved: it has none.
        return []
    x, key = call.args
    items = list(key) if isinstance(key, (list, tuple)) else [key]
    places = [place for place, each in enumerate(items) if each is Ellipsis]
    if len(places) != 1:
        return []
    known = sum(each is not None and each is not Ellipsis for each in items)
    whole = dict.fromkeys(("start", "stop", "step"))
    items[places[0] : places[0] + 1] = [whole] * (len(x.shape) - known)
    return PartsBuilder(call, context).end(call.layer, x, tuple(items))


def _split_add_n(call: Call, context: LoweringContext) -> list[Call]:
    """tf.add_n -> Add."""
    (tensors,) = operands(call, "inputs")
    if len(tensors) < 2 or len(call.inputs) != len(tensors):
        return []
    return replace_by(call, context, _layers.Add, inputs=list(tensors))


def _split_cast(call: Call, context: LoweringContext) -> list[Call]:
    """tf.cast to the type that a tensor has -> a linear activation, which is nothing.

    So is a cast between float32 and half precision, which files do not have.
    """
    x, y = call.inputs[0], call.output
    is_nothing = x.dtype == y.dtype or (x.is_float and y.is_float)
    return replace_by(call, context, _layers.Activation, "linear") if is_nothing else []


def _split_squared_difference(call: Call, context: LoweringContext) -> list[Call]:
    """The square of a difference -> Subtract, Multiply."""
    if len(call.inputs) != 2:
        return []
    parts = PartsBuilder(call, context)
    subtract = parts.new("subtract", _layers.Subtract)
    difference = parts.add(subtract, call.inputs, shape=call.output.shape)
    return parts.end(parts.new("", _layers.Multiply), [difference, difference])


def _split_sum(call: Call, context: LoweringContext) -> list[Call]:
    """A sum along axes of known sizes -> mean, Rescaling by their number."""
    x, axis, keepdims = operands(call, "input_tensor", "axis", "keepdims")
    if not isinstance(x, Value):
        return _split_list(call, context, _layers.Add)
    axes = [each for each in tf.nest.flatten(axis) if isinstance(each, int)]
    sizes: list[Any] = [x.shape[each] for each in axes]
    if not sizes or None in sizes or x.shape[0] is not None:
        return []
    parts, options = PartsBuilder(call, context), {"axis": axis, "keepdims": bool(keepdims)}
    mean = parts.new("mean", type(call.layer), tf.math.reduce_mean)
    middle = parts.add(mean, x, kwargs=options, shape=call.output.shape)
    return parts.end(parts.new("", _layers.Rescaling, float(math.prod(sizes))), middle)


def _split_list(call: Call, context: LoweringContext, make: Any) -> list[Call]:
    """A list of tensors reduced along the axis that they are stacked along -> a layer of them."""
    tensors, axis, keepdims = operands(call, "input_tensor", "axis", "keepdims")
    are_several = isinstance(tensors, (list, tuple)) and len(tensors) > 1
    if not are_several or axis not in (0, [0], (0,)) or keepdims:
        return []
    if not all(isinstance(each, Value) and each.is_float for each in tensors):
        return []
    return replace_by(call, context, make, inputs=list(tensors))


def _split_clip(call: Call, context: LoweringContext) -> list[Call]:
    """tf.clip_by_value with numbers -> ReLU, or the smaller and the larger one."""
    x, *limits = operands(call, "t", "clip_value_min", "clip_value_max")
    low, high = map(number, limits)
    if low is None or high is None:
        return []
    if low == 0 < high:
        return replace_by(call, context, _layers.ReLU, high)
    parts = PartsBuilder(call, context)
    minimum = parts.new("minimum", type(call.layer), tf.math.minimum)
    maximum = parts.new("maximum", type(call.layer), tf.math.maximum)
    return parts.end(maximum, parts.add(minimum, x, high, shape=call.output.shape), low)


def _split_roll(call: Call, context: LoweringContext) -> list[Call]:
    """tf.roll -> Roll, as TFLite has no operation for it, but for what it is made of."""
    _, shift, axis = operands(call, "input", "shift", "axis")
    shifts, axes = tf.nest.flatten(shift), tf.nest.flatten(axis)
    if not all(isinstance(each, int) for each in [*shifts, *axes]):
        return []
    return replace_by(call, context, Roll, shifts, axes)


def _split_reshape(call: Call, context: LoweringContext) -> list[Call]:
    """tf.reshape to sizes that tensors were asked for -> to numbers, as far as they are known."""
    x, shape = operands(call, "tensor", "shape")
    if not isinstance(shape, (list, tuple)) or not any(isinstance(each, Value) for each in shape):
        return []
    batch, *sizes = [_size_of(each) if isinstance(each, Value) else each for each in shape]
    rest = math.prod(each for each in sizes if isinstance(each, int))
    if batch != BATCH or None in x.shape[1:] or not all(isinstance(each, int) for each in sizes):
        return []
    sizes = [math.prod(x.shape[1:]) // -rest if each == -1 else each for each in sizes]
    call.output.shape = (x.shape[0], *sizes)
    return PartsBuilder(call, context).end(call.layer, x, [-1, *sizes])


BATCH = "batch"
"""In the place of a size: that of the first axis, which is not known."""


def _size_of(value: Value) -> Any:
    """The size that an integer of a graph stands for, e.g. `tf.shape(x)[1]`; None if unknown."""
    call = value.producer
    asked = call.inputs[0].producer if call is not None and call.inputs else None
    if call is None or asked is None or not is_operation(call.layer):
        return None
    if getattr(asked.layer, "symbol", "") not in ("compat.v1.shape", "shape"):
        return None
    if call.layer.symbol == "unstack":
        axis = values_in(call.outputs).index(value)
    else:
        (axis,) = [each for each in tf.nest.flatten(call.args[1:]) if isinstance(each, int)] or [-1]
    shape = asked.inputs[0].shape
    if not 0 <= axis < len(shape):
        return None
    return BATCH if axis == 0 and shape[0] is None else shape[axis]


def _split_normalization(call: Call, context: LoweringContext) -> list[Call]:
    """tf.math.l2_normalize along another axis than the last -> along the last, transposed."""
    x, axis, epsilon = operands(call, "x", "axis", "epsilon")
    rank, axes = len(x.shape), tf.nest.flatten([axis])
    if len(axes) != 1 or not isinstance(axes[0], int) or axes[0] % rank in (0, rank - 1):
        return []
    order = list(range(rank))
    order[axes[0]], order[-1] = rank - 1, axes[0] % rank
    shape, operation = [x.shape[each] for each in order], type(call.layer)
    parts = PartsBuilder(call, context)
    turned = parts.add(parts.new("turned", operation, tf.transpose), x, order, shape=shape)
    options = {"axis": -1} if epsilon is None else {"axis": -1, "epsilon": epsilon}
    normalize = parts.new("normalized", operation, tf.math.l2_normalize)
    normalized = parts.add(normalize, turned, kwargs=options, shape=shape)
    return parts.end(parts.new("", operation, tf.transpose), normalized, order)


def _split_copies(call: Call, context: LoweringContext) -> list[Call]:
    """A tensor for each example of a batch, such as a class token -> zeros of each, and a sum.

    The sizes of all tensors are known then, as runtimes want it.
    """
    symbol = str(call.layer.symbol)
    x, counts, *axis = operands(call, "input", *COPIES[symbol])
    rank = len(x.shape) if isinstance(x, Value) else 0
    count, *others = counts if isinstance(counts, (list, tuple)) else [counts]
    is_batch = isinstance(count, Value) and _size_of(count) == BATCH
    if not rank or not x.is_float or x.shape[0] != 1 or not is_batch or axis not in ([], [0]):
        return []
    keeps = x.shape[1:] if symbol == "broadcast_to" else [1] * (rank - 1)
    if symbol != "repeat" and list(others) != list(keeps):
        return []
    batch = count.producer.inputs[0].producer.inputs[0]
    if not batch.is_float or not len(batch.shape) > 1:
        return []
    parts, operation, ones = (
        PartsBuilder(call, context),
        type(call.layer),
        [1] * (len(batch.shape) - 1),
    )
    first = parts.add(
        parts.new("first", operation, tf.slice),
        batch,
        [0] * len(batch.shape),
        [-1, *ones],
        shape=(None, *ones),
    )
    if len(batch.shape) != rank:
        shape = (None, *[1] * (rank - 1))
        reshape = parts.new("reshape", operation, tf.reshape)
        first = parts.add(reshape, first, [-1, *shape[1:]], shape=shape)
    zeros = parts.add(parts.new("zeros", _layers.Rescaling, 0.0), first, shape=first.shape)
    return parts.end(parts.new("", operation, tf.math.add), zeros, x)


COPIES = {"tile": ("multiples",), "repeat": ("repeats", "axis"), "broadcast_to": ("shape",)}
"""Names of arguments behind the tensor."""

OPERATIONS: dict[str, Lowering] = {
    "nn.silu": _split_silu,
    "math.negative": partial(replace_by, make=_layers.Rescaling, scale=-1.0),
    "math.divide": _split_division,
    "math.truediv": _split_division,
    "__operators__.truediv": _split_division,
    "nn.bias_add": _split_bias,
    "__operators__.getitem": _split_getitem,
    "math.add_n": _split_add_n,
    "cast": _split_cast,
    "math.square": _split_square,
    "math.pow": _split_power,
    "math.squared_difference": _split_squared_difference,
    # LeakyReLU with the slope -1, of which runtimes have a kernel everywhere.
    "math.abs": partial(replace_by, make=_layers.LeakyReLU, alpha=-1.0),
    "math.reduce_sum": _split_sum,
    "math.reduce_mean": partial(_split_list, make=_layers.Average),
    "math.reduce_max": partial(_split_list, make=_layers.Maximum),
    "math.reduce_min": partial(_split_list, make=_layers.Minimum),
    "clip_by_value": _split_clip,
    "roll": _split_roll,
    "reshape": _split_reshape,
    "image.resize": split_resize,
    "compat.v1.image.resize_images": split_old_resize,
    "image.extract_patches": split_patches,
    "math.l2_normalize": _split_normalization,
    **dict.fromkeys(COPIES, _split_copies),
    "einsum": split_einsum,
    "linalg.matmul": convert_second_factor,
    **dict.fromkeys(("concat", "stack", "math.maximum", "math.minimum"), convert_fixed_ranges),
}
"""TensorFlow's name of an operation on symbolic tensors -> what splits it."""
