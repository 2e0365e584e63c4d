"""Rewrites `slice(concat(a, b))` to read `a` or `b` directly, so they need not share a range."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, flatten_values
from keras_qat.graph.operations import get_argument, get_kind
from keras_qat.keras2.backend import layers
from keras_qat.lowering.builder import LoweringContext
from keras_qat.lowering.expand_call import expand_call, known, require, stand_in
from keras_qat.lowering.expansions.movement import slice_axis
from keras_qat.ops.registry import match
from keras_qat.ops.slicing import FULL_SLICE, items_for_axes


class _Piece(NamedTuple):
    """Entries of a tensor along the axis of a concatenation."""

    tensor: Value
    begin: int
    end: int
    is_whole: bool


class _Concatenation(NamedTuple):
    """Tensors side by side along an axis, which they lack if they are stacked."""

    axis: int
    tensors: list[Value]
    sizes: list[int]
    is_stacked: bool

    def cut(self, begin: int, end: int) -> list[_Piece]:
        """Return the pieces of the tensors that hold some entries.

        Raises:
            CannotExpand: if all tensors hold some of them.
        """
        pieces = []
        for x, size in zip(self.tensors, self.sizes, strict=True):
            low, high = max(begin, 0), min(end, size)
            if low < high:
                pieces.append(_Piece(x, low, high, high - low == size))
            begin, end = begin - size, end - size
        require(len(pieces) < len(self.tensors) or len(pieces) == 1)
        return pieces

    def read(self, pieces: list[_Piece]) -> Any:
        """Trace a concatenation of pieces."""
        tensors = [
            stand_in(x) if is_whole else slice_axis(stand_in(x), self.axis, begin, end, "part")
            for x, begin, end, is_whole in pieces
        ]
        return tensors[0] if len(tensors) == 1 else layers.Concatenate(self.axis)(tensors)


def skip_concatenations(graph: Graph, context: LoweringContext) -> Graph:
    """Lets slices, splits and unstacks of concatenated tensors read the tensors directly.

    Detectors, for example, concatenate scores, offsets and anchors, and cut them apart to decode
    boxes. In 8 bits all tensors of a concatenation have one range.
    """
    consumers = graph.consumers()

    def expand(call: Call) -> list[Call]:
        parts: list[Call] = []
        if _cuts(call):
            parts = expand_call(call, lambda *_, **__: _read_tensors(call), context)
        elif any(map(_cuts, consumers.get(call.output, ()))):
            parts = expand_call(call, lambda *_, **__: _reshape_tensors(call), context)
        return [new for part in parts for new in expand(part.as_part_of(call))] or [call]

    calls = [part for call in graph.calls for part in expand(call)]
    return dataclasses.replace(graph, calls=calls)


def _find(value: Value) -> _Concatenation:
    """Return the tensors that a tensor is concatenated from.

    Raises:
        CannotExpand: if it is no concatenation, or its sizes are unknown.
    """
    call = known(value.producer)
    op, attributes, _ = match(call)
    name = known(op).name
    if name == "linear" and not value.masked:
        return _find(call.inputs[0])
    require(name in ("concatenate", "stack") and not attributes["numbers"] and attributes["axis"])
    is_stacked = name == "stack"
    sizes = [known(1 if is_stacked else x.shape[attributes["axis"]]) for x in call.inputs]
    return _Concatenation(attributes["axis"], call.inputs, sizes, is_stacked)


def _cuts(call: Call) -> bool:
    """Tell whether a call returns parts of a tensor."""
    is_cropping = type(call.layer) is layers.Cropping1D
    return is_cropping or get_kind(call) in ("getitem", "slice", "split", "unstack")


def _reshape_tensors(call: Call) -> Any:
    """Trace a concatenation of reshaped tensors in place of a reshape that keeps the axis."""
    require(known(match(call).op).name == "reshape")
    joined, shape = _find(call.inputs[0]), call.output.shape
    require(not joined.is_stacked and joined.axis == len(call.inputs[0].shape) - 1)
    require(len(shape) > 1 and None not in shape[1:] and shape[-1] == sum(joined.sizes))
    require(not call.output.masked)
    reshaped = [
        tf.reshape(stand_in(x), [-1, *shape[1:-1], size], name="reshaped")
        for x, size in zip(joined.tensors, joined.sizes, strict=True)
    ]
    return layers.Concatenate()(reshaped)


def _read_tensors(call: Call) -> Any:
    """Trace what a call cuts out of a concatenation from the concatenated tensors."""
    require(len(call.inputs) == 1)
    attributes, joined = match(call).attributes, _find(call.inputs[0])
    require(not any(x.masked for x in [*joined.tensors, *flatten_values(call.outputs)]))
    if get_kind(call) not in ("split", "unstack"):
        return _slice_tensors(call, joined, attributes)
    axis, is_unstack = known(attributes.get("axis")), get_kind(call) == "unstack"
    require(axis % len(call.inputs[0].shape) == joined.axis and is_unstack == joined.is_stacked)
    sizes = [1 if is_unstack else int(x.shape[axis] or 0) for x in flatten_values(call.outputs)]
    ends = itertools.accumulate(sizes)
    return [joined.read(joined.cut(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def _slice_tensors(call: Call, joined: _Concatenation, attributes: Any) -> Any:
    """Trace the same slice of the concatenated tensors."""
    axis, shape, parts = joined.axis, call.inputs[0].shape, known(attributes.get("parts"))
    is_index, entries = axis in attributes["dropped"], range(sum(joined.sizes))
    start, stop, step = parts[axis]
    entries = entries[start:][:1] if is_index else entries[start:stop:step]
    require(entries and entries.step == 1 and joined.is_stacked <= is_index)
    pieces = joined.cut(entries[0], entries[-1] + 1)
    if get_kind(call) != "getitem":
        cut = [index for index, part in enumerate(parts) if _leaves_out(part, shape[index])]
        require(cut == [axis])
        return joined.read(pieces)
    items = items_for_axes(get_argument(call, "slice_spec"), len(shape))
    position = [index for index, item in enumerate(items) if item is not None][axis]
    piece, is_joined = pieces[0], len(pieces) > 1
    if joined.is_stacked:
        del items[position]
    elif is_index:
        items[position] = piece.begin
    elif is_joined or piece.is_whole:
        items[position] = FULL_SLICE
    else:
        items[position] = {"start": piece.begin, "stop": piece.end, "step": None}
    if all(item == FULL_SLICE for item in items):
        return joined.read(pieces)
    x = joined.read(pieces) if is_joined else stand_in(piece.tensor)
    return tf.__operators__.getitem(x, tuple(items))


def _leaves_out(part: Any, size: int | None) -> bool:
    """Tell whether a slice, as `start`, `stop` and `step`, leaves out entries of an axis."""
    start, stop, step = part
    return (start or 0, step) != (0, 1) or stop not in (None, size)
