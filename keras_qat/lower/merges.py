"""Lowering of layers that merge tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import tensorflow as tf

from keras_qat.keras2.backend import keras
from keras_qat.keras2.graph import Call, Value, clone, map_values
from keras_qat.lower.parts import Made, between, chain, path
from keras_qat.ops.op import FixedRange, SharedRange
from keras_qat.ops.registry import op_of

__all__ = [
    "convert_fixed_ranges",
    "convert_second_factor",
    "merge_two_by_two",
    "split_average",
    "split_custom_scale",
    "split_dot",
    "split_extremum",
]

_layers = keras.layers


def merge_two_by_two(call: Call, made: Made) -> list[Call]:
    """A sum of n tensors as n - 1 sums of two, as the runtimes' kernels take no more than two."""
    if len(call.inputs) <= 2:
        return []
    merge: Any = type(call.layer)
    first, *others = call.inputs
    calls: list[Call] = []
    for index, other in enumerate(others, start=1):
        layer, output = call.layer, call.output
        if index < len(others):
            name = f"{call.layer.name}_part{index}"
            make = partial(merge, name=name, dtype=call.layer.dtype_policy)
            layer = made.layer(call.layer, name, make)
            shape = tf.broadcast_static_shape(*map(tf.TensorShape, (first.shape, other.shape)))
            output = between(call, layer, shape)
        calls.append(Call(layer, ([first, other],), {}, output, path(call, layer)))
        first = output
    return calls


def split_extremum(call: Call, made: Made) -> list[Call]:
    """The largest or smallest of n tensors two by two, each pair in one range."""
    return merge_two_by_two(call, made) or convert_fixed_ranges(call, made)


def split_dot(call: Call, made: Made) -> list[Call]:
    """Dot(normalize=True) -> UnitNormalization of both, Dot; along the last axes."""
    layer, inputs = call.layer, call.inputs
    axes = [layer.axes] * 2 if isinstance(layer.axes, int) else layer.axes
    pairs = zip(axes, inputs, strict=True)
    if not layer.normalize or any(axis not in (-1, len(x.shape) - 1) for axis, x in pairs):
        return convert_second_factor(call, made)
    calls, normalized = [], []
    for index, value in enumerate(inputs):
        name = f"{layer.name}_norm{index}"
        norm = made.layer(layer, name, partial(_layers.UnitNormalization, name=name))
        normalized.append(between(call, norm, value.shape))
        calls.append(Call(norm, (value,), {}, normalized[-1], path(call, norm)))
    dot = made.layer(layer, "dot", lambda: clone(layer, normalize=False))
    return [*calls, Call(dot, (normalized,), {}, call.output, call.name)]


def convert_fixed_ranges(call: Call, made: Made) -> list[Call]:
    """A Concatenate that joins sigmoid's range, say, with another: a Rescaling(1) converts it.

    The kernel takes one range. A convolution that multiplies by 1 changes the range exactly;
    TFLite's QUANTIZE rounds zero points once more.
    """
    fixed = {value: _fixed_range(value) for value in call.inputs}
    if len(set(fixed.values())) == 1:
        return []
    return _rescaled(call, made, [value for value, limits in fixed.items() if limits])


def convert_second_factor(call: Call, made: Made) -> list[Call]:
    """A product of matrices whose second factor is a softmax, say: a Rescaling(1) converts that.

    Its range begins at 0, where XNNPACK asks for one with zero in the middle.
    """
    limits = _fixed_range(call.inputs[1]) if len(call.inputs) == 2 else None
    return _rescaled(call, made, [call.inputs[1]]) if limits and limits[0] == 0 else []


def _rescaled(call: Call, made: Made, values: list[Value]) -> list[Call]:
    """A call with a Rescaling(1) of some of its inputs in front of it."""
    calls, converted = [], {}
    for value in values:
        if len(value.shape) < 2:
            continue
        name = f"{call.layer.name}_input{call.inputs.index(value)}"
        make = partial(_layers.Rescaling, 1.0, name=name)
        layer = made.layer(call.layer, name, make)
        converted[value] = output = between(call, layer, value.shape)
        calls.append(Call(layer, (value,), {}, output, path(call, layer)))
    args, kwargs = map_values(lambda value: converted.get(value, value), (call.args, call.kwargs))
    return [*calls, Call(call.layer, args, kwargs, call.outputs, call.name)] if calls else []


def _fixed_range(value: Value) -> tuple[float, float] | None:
    """The fixed range that an activation gives a tensor, also behind layers that keep it."""
    call = value.producer
    op = op_of(call) if call else None
    if call is not None and op is not None and isinstance(op.output, SharedRange):
        ranges = {_fixed_range(each) for each in call.inputs}
        return ranges.pop() if len(ranges) == 1 else None
    if op is None or not isinstance(op.output, FixedRange):
        return None
    return op.output.minimum, op.output.maximum


def split_average(call: Call, made: Made) -> list[Call]:
    """Average -> Add, Rescaling."""
    layer, count = call.layer, len(call.inputs)
    return chain(
        call,
        made.layer(layer, "add", lambda: _layers.Add(name=f"{layer.name}_add")),
        made.layer(layer, "scale", lambda: _layers.Rescaling(1.0 / count, name=layer.name)),
    )


def split_custom_scale(call: Call, made: Made) -> list[Call]:
    """InceptionResNetV2's CustomScaleLayer, a + scale * b -> Rescaling, Add."""
    layer, (a, b) = call.layer, call.inputs
    rescaling = made.layer(
        layer, "scale", lambda: _layers.Rescaling(layer.scale, name=f"{layer.name}_scale")
    )
    add = made.layer(layer, "add", lambda: _layers.Add(name=layer.name))
    scaled = between(call, rescaling, b.shape)
    return [
        Call(rescaling, (b,), {}, scaled, path(call, rescaling)),
        Call(add, ([a, scaled],), {}, call.output, call.name),
    ]
