"""Lowers layers that merge tensors."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value, map_values
from keras_qat.graph.facts import solve
from keras_qat.graph.operations import kind_of
from keras_qat.graph.tf_operations import array, operands, operation_class
from keras_qat.helper_layers.operations import OnGrid
from keras_qat.keras2.backend import layers
from keras_qat.keras2.layers_and_models import clone
from keras_qat.lowering.builder import Lowering, LoweringContext, PartsBuilder, replace_by
from keras_qat.ops.op import FixedRange, SharedRange
from keras_qat.ops.registry import op_of

LIMITS = {"maximum": 1, "minimum": -1}
"""Operation that takes the larger or smaller of two numbers -> sign of those that it prefers."""


def with_same_axes(lowering: Lowering | None = None) -> Lowering:
    """Returns a lowering of a layer that merges tensors, which first have equally many axes.

    Keras adds axes behind the first one; operators would add them in front of it. Of one tensor in
    a list the layer passes that on.
    """

    def lower(call: Call, context: LoweringContext) -> list[Call]:
        if len(call.inputs) == 1:
            return replace_by(call, context, layers.Activation, "linear")
        rank = max(len(value.shape) for value in call.inputs)
        parts, inputs = PartsBuilder(call, context), list(call.inputs)
        for index, value in enumerate(inputs):
            added = rank - len(value.shape)
            sizes = [-1 if size is None else size for size in value.shape[1:]]
            if added and sizes.count(-1) <= 1:
                reshape = parts.new(f"axes{index}", layers.Reshape, [1] * added + sizes)
                shape = (value.shape[0], *[1] * added, *value.shape[1:])
                inputs[index] = parts.add(reshape, value, shape=shape)
        if parts.calls:
            return parts.end(call.layer, inputs)
        return lowering(call, context) if lowering else []

    return lower


def merge_two_by_two(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers a sum of n tensors to n - 1 sums of two, the most that TFLite's operators take."""
    if len(call.inputs) <= 2:
        return []
    parts = PartsBuilder(call, context)
    first, *middle, last = call.inputs
    for index, value in enumerate(middle, start=1):
        layer = parts.new(f"part{index}", type(call.layer), dtype=call.layer.dtype_policy)
        shape = tf.broadcast_static_shape(*map(tf.TensorShape, (first.shape, value.shape)))
        first = parts.add(layer, [first, value], shape=shape)
    return parts.end(call.layer, [first, last])


def split_extremum(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers a maximum or minimum of n tensors to pairs, each in one range."""
    return merge_two_by_two(call, context) or convert_fixed_ranges(call, context)


def split_limit(call: Call, context: LoweringContext) -> list[Call]:
    """Gives a tensor's range the constant that it is compared with, where results may be that.

    No result of a maximum is below the constant, which may be above all of the tensor.
    """
    x, limit = operands(call, "x", "y")
    x, limit = (x, array(limit)) if isinstance(x, Value) else (limit, array(x))
    sign = LIMITS[kind_of(call)]
    if limit is None or not isinstance(x, Value) or not x.is_float or limit.ndim > len(x.shape):
        return []
    farthest = float(sign * np.max(sign * limit))
    fixed = solve(x, find_fixed_range)
    if sign * farthest <= 0 or (fixed and fixed[0] <= farthest <= fixed[1]):
        return []  # In every range, or in this one.
    parts = PartsBuilder(call, context)
    if fixed:
        x = parts.add(parts.new("input", layers.Rescaling, 1.0), x, shape=x.shape)
    on_grid = rounded_to_grid(parts, x, limit.tolist())
    extremum = parts.new("", layers.Maximum if sign > 0 else layers.Minimum, dtype=x.dtype)
    return parts.end(extremum, [x, on_grid])


def rounded_to_grid(parts: PartsBuilder, x: Value, number: Any) -> Value:
    """Adds numbers that are rounded to a tensor's range, which then has them within."""
    layer = parts.new("number", OnGrid, number, dtype=x.dtype)
    output = Value(parts.path(layer), tuple(layer.compute_output_shape(x.shape)), x.dtype)
    return parts.add(layer, x, output=output)


def split_dot(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers Dot(normalize=True) to two UnitNormalizations and Dot."""
    layer = call.layer
    axes = [layer.axes] * 2 if isinstance(layer.axes, int) else layer.axes
    if not layer.normalize:
        return convert_second_factor(call, context)
    parts = PartsBuilder(call, context)
    normalized = [
        parts.add(parts.new(f"norm{index}", layers.UnitNormalization, axis), x, shape=x.shape)
        for index, (axis, x) in enumerate(zip(axes, call.inputs, strict=True))
    ]
    return parts.end(parts.new("", clone, layer, normalize=False), normalized)


def convert_fixed_ranges(call: Call, context: LoweringContext) -> list[Call]:
    """Puts a Rescaling(1) on fixed-range inputs that are joined with other ranges.

    A Concatenate of a sigmoid with another tensor is an example: TFLite's operator takes one range.
    A convolution that multiplies by 1 changes the range exactly; QUANTIZE rounds zero points again.
    """
    known: dict[Value, Any] = {}
    fixed = {value: solve(value, find_fixed_range, known) for value in call.inputs}
    if len(set(fixed.values())) == 1:
        return []
    return _rescaled(call, context, [value for value, limits in fixed.items() if limits])


def convert_second_factor(call: Call, context: LoweringContext) -> list[Call]:
    """Puts a Rescaling(1) on the right-hand side of a matmul whose range begins at 0.

    A softmax is an example. XNNPACK asks for a range that is symmetric around 0.
    """
    limits = solve(call.inputs[1], find_fixed_range) if len(call.inputs) == 2 else None
    return _rescaled(call, context, [call.inputs[1]]) if limits and limits[0] == 0 else []


def _rescaled(call: Call, context: LoweringContext, values: list[Value]) -> list[Call]:
    """Puts a Rescaling(1) in front of some inputs of a call."""
    parts, converted = PartsBuilder(call, context), {}
    for value in values:
        if len(value.shape) >= 2:
            layer = parts.new(f"input{call.inputs.index(value)}", layers.Rescaling, 1.0)
            converted[value] = parts.add(layer, value, shape=value.shape)
    args, kwargs = map_values(lambda value: converted.get(value, value), (call.args, call.kwargs))
    return parts.end(call.layer, *args, kwargs=kwargs) if converted else []


def find_fixed_range(value: Value) -> Generator[Value, Any, tuple[float, float] | None]:
    """Find the fixed range of a tensor, also through layers that keep their input's range."""
    call = value.producer
    op = op_of(call) if call else None
    if call is not None and op is not None and isinstance(op.output, SharedRange):
        ranges = set()
        for x in call.inputs:
            ranges.add((yield x))
        return ranges.pop() if len(ranges) == 1 else None
    if op is None or not isinstance(op.output, FixedRange):
        return None
    return op.output.minimum, op.output.maximum


def split_average(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers Average to Add and Rescaling."""
    parts, scale = PartsBuilder(call, context), 1.0 / len(call.inputs)
    add = parts.new("add", layers.Add)
    return parts.chain(add, parts.new("", layers.Rescaling, scale))


def split_custom_scale(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers InceptionResNetV2's CustomScaleLayer, a + scale * b, to Rescaling and Add."""
    parts, (a, b) = PartsBuilder(call, context), call.inputs
    scale = parts.new("scale", layers.Rescaling, call.layer.scale)
    scaled = parts.add(scale, b, shape=b.shape)
    return parts.end(parts.new("", layers.Add), [a, scaled])


def split_of_numbers(call: Call, context: LoweringContext) -> list[Call]:
    """Gives the numbers of Rescaling or Normalization, one for each example, an axis meanwhile.

    Integers, as pixels of 8 bits, are cast first, which these layers do themselves.
    """
    (x,), parts = call.inputs, PartsBuilder(call, context)
    if not x.is_float and call.output.is_float:
        cast = parts.new("cast", operation_class(), tf.cast)
        real = parts.add(cast, x, kwargs={"dtype": call.output.dtype}, shape=x.shape)
        return parts.end(call.layer, real)
    if len(x.shape) != 1:
        return []
    column = parts.add(parts.new("column", layers.Reshape, (1,)), x)
    scaled = parts.add(call.layer, column, shape=column.shape)
    return parts.end(parts.new("flat", layers.Reshape, ()), scaled)


def stack_lists(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers tf.matmul of lists of tensors to one of what tf.stack makes of them."""
    pair, parts = operands(call, "a", "b"), PartsBuilder(call, context)
    if not any(isinstance(item, (list, tuple)) for item in pair):
        return []
    for index, tensors in enumerate(pair):
        if isinstance(tensors, (list, tuple)):
            if not all(isinstance(tensor, Value) for tensor in tensors):
                return []
            stack = parts.new("ab"[index], type(call.layer), tf.stack)
            shape = (len(tensors), *tensors[0].shape)
            pair[index] = parts.add(stack, list(tensors), shape=shape)
    flags = {name: option for name, option in call.kwargs.items() if name not in "ab"}
    matmul = parts.new("", type(call.layer), tf.matmul)
    return parts.end(matmul, *pair, *call.args[2:], kwargs=flags)
