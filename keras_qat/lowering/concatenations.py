"""Rewrites concatenations. All inputs share one range, so 8 bits may round small values to 0.

Slices of a concatenation are replaced by slices of its inputs. Tensors that are concatenated before
a normalization are scaled to similar ranges.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, flatten_values, map_values
from keras_qat.graph.operations import get_argument, get_kind
from keras_qat.helper_layers.keras_variants import RESCALED, find_statistics
from keras_qat.keras2.backend import layers
from keras_qat.lowering.builder import LoweringContext, replace_calls, rewrite_calls
from keras_qat.lowering.expand_call import make_symbol, require, trace_in_place, unwrap
from keras_qat.lowering.expansions.movement import slice_axis
from keras_qat.ops.registry import match
from keras_qat.ops.slicing import FULL_SLICE, items_for_axes

LEVELS = 255
"""8 bits have 255 steps. Inputs are scaled if one has a standard deviation of less than a step."""
ALIKE = 4
"""An input is not scaled if its range differs by less than this factor from a reference. The
reference is the input with the most channels."""


class _Piece(NamedTuple):
    """The entries `begin` to `end` of an input of a concatenation."""

    tensor: Value
    begin: int
    end: int
    is_entire: bool


class _Concatenation(NamedTuple):
    """A concatenation of tensors along an axis, or a stack of tensors along a new axis."""

    axis: int
    tensors: list[Value]
    sizes: list[int]
    is_stacked: bool

    def cut(self, begin: int, end: int) -> list[_Piece]:
        """Return the pieces of the inputs that form the entries `begin` to `end` of the result."""
        pieces = []
        for x, size in zip(self.tensors, self.sizes, strict=True):
            low, high = max(begin, 0), min(end, size)
            if low < high:
                pieces.append(_Piece(x, low, high, high - low == size))
            begin, end = begin - size, end - size
        require(len(pieces) < len(self.tensors) or len(pieces) == 1)
        return pieces

    def read(self, pieces: list[_Piece]) -> tf.Tensor:
        tensors = [
            make_symbol(x)
            if is_entire
            else slice_axis(make_symbol(x), self.axis, begin, end, "part")
            for x, begin, end, is_entire in pieces
        ]
        return tensors[0] if len(tensors) == 1 else layers.Concatenate(self.axis)(tensors)


def skip_concatenations(graph: Graph, context: LoweringContext) -> Graph:
    """Rewrite `slice(concat(a, b))` to read `a` or `b` directly.

    `a` and `b` then need not share a range. Object detectors, for example, concatenate scores,
    offsets and anchors. They slice the result to decode boxes.
    """
    consumers = graph.consumers()

    def expand(call: Call) -> list[Call]:
        parts: list[Call] = []
        if _cuts(call):
            parts = trace_in_place(call, lambda: _read_tensors(call), context)
        elif any(map(_cuts, consumers.get(call.output, ()))):
            parts = trace_in_place(call, lambda: _reshape_tensors(call), context)
        return [new for part in parts for new in expand(part.as_part_of(call))] or [call]

    return rewrite_calls(graph, expand)


def _find(value: Value) -> _Concatenation:
    """Return the concatenation that computes a value. Raise `CannotExpand` if there is none."""
    call = unwrap(value.producer)
    op, attributes, _ = match(call)
    name = unwrap(op).name
    if name == "linear" and not value.masked:
        return _find(call.inputs[0])
    require(name in ("concatenate", "stack") and not attributes["numbers"] and attributes["axis"])
    is_stacked = name == "stack"
    sizes = [unwrap(1 if is_stacked else x.shape[attributes["axis"]]) for x in call.inputs]
    return _Concatenation(attributes["axis"], call.inputs, sizes, is_stacked)


def _cuts(call: Call) -> bool:
    is_cropping = type(call.layer) is layers.Cropping1D
    return is_cropping or get_kind(call) in ("getitem", "slice", "split", "unstack")


def _reshape_tensors(call: Call) -> tf.Tensor:
    """Rewrite `reshape(concat(a, b))` to `concat(reshape(a), reshape(b))` along the last axis."""
    require(unwrap(match(call).op).name == "reshape")
    found, shape = _find(call.inputs[0]), call.output.shape
    require(not found.is_stacked and found.axis == len(call.inputs[0].shape) - 1)
    require(len(shape) > 1 and None not in shape[1:] and shape[-1] == sum(found.sizes))
    require(not call.output.masked)
    reshaped = [
        tf.reshape(make_symbol(x), [-1, *shape[1:-1], size], name="reshaped")
        for x, size in zip(found.tensors, found.sizes, strict=True)
    ]
    return layers.Concatenate()(reshaped)


def _read_tensors(call: Call) -> Any:
    """Rewrite slices of a concatenation to slices of the concatenated tensors."""
    require(len(call.inputs) == 1)
    attributes, found = match(call).attributes, _find(call.inputs[0])
    require(not any(x.masked for x in [*found.tensors, *flatten_values(call.outputs)]))
    if get_kind(call) not in ("split", "unstack"):
        return _slice_tensors(call, found, attributes)
    axis, is_unstack = unwrap(attributes.get("axis")), get_kind(call) == "unstack"
    require(axis % len(call.inputs[0].shape) == found.axis and is_unstack == found.is_stacked)
    sizes = [1 if is_unstack else int(x.shape[axis] or 0) for x in flatten_values(call.outputs)]
    ends = itertools.accumulate(sizes)
    return [found.read(found.cut(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def _slice_tensors(call: Call, found: _Concatenation, attributes: Mapping[str, Any]) -> tf.Tensor:
    axis, shape, slices = found.axis, call.inputs[0].shape, unwrap(attributes.get("parts"))
    is_index, entries = axis in attributes["dropped"], range(sum(found.sizes))
    start, stop, step = slices[axis]
    entries = entries[start:][:1] if is_index else entries[start:stop:step]
    require(entries and entries.step == 1 and found.is_stacked <= is_index)
    pieces = found.cut(entries[0], entries[-1] + 1)
    if get_kind(call) != "getitem":
        cut = [
            i
            for i, (start, stop, step) in enumerate(slices)
            if (start or 0, step) != (0, 1) or stop not in (None, shape[i])
        ]
        require(cut == [axis])
        return found.read(pieces)
    items = items_for_axes(get_argument(call, "slice_spec"), len(shape))
    position = [index for index, item in enumerate(items) if item is not None][axis]
    piece, are_several = pieces[0], len(pieces) > 1
    if found.is_stacked:
        del items[position]
    elif is_index:
        items[position] = piece.begin
    elif are_several or piece.is_entire:
        items[position] = FULL_SLICE
    else:
        items[position] = {"start": piece.begin, "stop": piece.end, "step": None}
    if all(item == FULL_SLICE for item in items):
        return found.read(pieces)
    x = found.read(pieces) if are_several else make_symbol(piece.tensor)
    return tf.__operators__.getitem(x, tuple(items))


def scale_tensors(graph: Graph, context: LoweringContext) -> Graph:
    """Rewrite `norm(concat(a, b))` to `norm(concat(a, b / k) * [1, k])` if 8 bits would lose `a`.

    `k` is a power of two, so the results stay exactly the same. The new normalization multiplies
    its input by `[1, k]`. The mean and variance of a trained normalization show each tensor's
    range. Untrained models stay unchanged.
    """
    readers, counts = graph.find_single_consumers(), graph.count_calls()
    replaced: dict[Call, list[Call]] = {}
    for call in graph.calls:
        norm = readers.get(call.output) if isinstance(call.output, Value) else None
        if norm is None or type(norm.layer) not in RESCALED or counts[norm.layer] > 1:
            continue
        if factors := _find_factors(call, norm, context):
            scale = partial(_scale_inputs, call, factors)
            replaced[call] = trace_in_place(call, scale, context) or [call]
            sizes = [x.shape[-1] or 0 for x in call.inputs]
            replaced[norm] = [_rescale(norm, np.repeat(factors, sizes).tolist(), context)]
    return replace_calls(graph, replaced)


def _find_factors(call: Call, norm: Call, context: LoweringContext) -> list[float]:
    """Return a divisor for each input of a concatenation. Return [] if no division is needed."""
    op, attributes, _ = match(call)
    rank, layer = len(call.output.shape), norm.layer
    is_plain = op is not None and op.name == "concatenate" and not attributes["numbers"]
    if not is_plain or attributes["axis"] != rank - 1 or len(set(call.inputs)) < len(call.inputs):
        return []
    axes = np.ravel(layer.axis) % rank if layer.axis is not None else ()
    sizes = [x.shape[-1] or 0 for x in call.inputs]
    has_statistics = layer.built and layer not in context.weights
    if 0 in sizes or list(axes) != [rank - 1] or any(x.masked for x in call.inputs):
        return []
    mean, deviation = (find_statistics(layer) if has_statistics else None) or (np.zeros(0),) * 2
    if mean.size != sum(sizes):
        return []
    ends = np.cumsum(sizes)[:-1]
    low = [min(0.0, part.min()) for part in np.split(mean - 2 * deviation, ends)]
    high = [max(0.0, part.max()) for part in np.split(mean + 2 * deviation, ends)]
    most = (max(high) - min(low)) / LEVELS
    if all(part.max() >= most for part in np.split(deviation, ends)):
        return []
    widths = np.subtract(high, low)
    ratios = widths / widths[int(np.argmax(sizes))]
    exponents = np.where(np.abs(np.log2(ratios)) < np.log2(ALIKE), 0, np.round(np.log2(ratios)))
    return [float(2**exponent) for exponent in exponents]


def _scale_inputs(call: Call, factors: list[float]) -> tf.Tensor:
    scaled = {value: make_symbol(value) for value in call.inputs}
    for index, (value, factor) in enumerate(zip(call.inputs, factors, strict=True)):
        if factor != 1:
            scaled[value] = layers.Rescaling(1 / factor, name=f"scaled{index}")(scaled[value])
    args, kwargs = map_values(scaled.__getitem__, (call.args, call.kwargs))
    return call.layer(*args, **kwargs)


def _rescale(norm: Call, input_scale: list[float], context: LoweringContext) -> Call:
    """Return a normalization that first multiplies its input by constants."""
    layer, weights = norm.layer, context.get_weights(norm.layer)
    config = {**layer.get_config(), "input_scale": input_scale}
    make = RESCALED[type(layer)].from_config
    rescaled = context.layer(layer, "rescaled", lambda: make(config), weights)
    return Call(rescaled, norm.args, norm.kwargs, norm.outputs, norm.name).as_part_of(norm)
