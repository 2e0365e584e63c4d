"""Rewrites `slice(concat(a, b))` to read `a` or `b` directly, so they need not share a range."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, values_in
from keras_qat.graph.operations import kind_of
from keras_qat.graph.tf_operations import argument, operation_class
from keras_qat.keras2.backend import layers
from keras_qat.lowering.builder import LoweringContext, PartsBuilder
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

    def pieces(self, begin: int, end: int) -> list[_Piece]:
        """Return the pieces of the tensors that hold some entries; [] if all tensors do."""
        pieces = []
        for x, size in zip(self.tensors, self.sizes, strict=True):
            low, high = max(begin, 0), min(end, size)
            if low < high:
                pieces.append(_Piece(x, low, high, high - low == size))
            begin, end = begin - size, end - size
        return pieces if len(pieces) < len(self.tensors) or len(pieces) == 1 else []


def skip_concatenations(graph: Graph, context: LoweringContext) -> Graph:
    """Lets slices, splits and unstacks of concatenated tensors read the tensors directly.

    Detectors, for example, concatenate scores, offsets and anchors, and cut them apart to decode
    boxes. In 8 bits all tensors of a concatenation have one range.
    """
    consumers = graph.consumers()

    def expand(call: Call) -> list[Call]:
        parts = _read_tensors(call, context)
        if not parts and any(map(_cuts, consumers.get(call.output, ()))):
            parts = _reshape_tensors(call, context)
        return [new for part in parts for new in expand(part.as_part_of(call))] or [call]

    calls = [part for call in graph.calls for part in expand(call)]
    return dataclasses.replace(graph, calls=calls)


def _find(value: Value) -> _Concatenation | None:
    """Return the tensors that a tensor is concatenated from; None if unknown."""
    call = value.producer
    op, attributes, _ = match(call) if call else (None, {}, "")
    while call is not None and op is not None and op.name == "linear" and not value.masked:
        (value,) = call.inputs
        call = value.producer
        op, attributes, _ = match(call) if call else (None, {}, "")
    if call is None or op is None or op.name not in ("concatenate", "stack"):
        return None
    axis, tensors, is_stacked = attributes["axis"], call.inputs, op.name == "stack"
    if attributes["numbers"] or axis == 0 or axis is None:
        return None
    sizes = [1 if is_stacked else x.shape[axis] for x in tensors]
    known = [size for size in sizes if size is not None]
    return _Concatenation(axis, tensors, known, is_stacked) if len(known) == len(sizes) else None


def _cuts(call: Call) -> bool:
    """Tell whether a call returns parts of a tensor."""
    is_cropping = type(call.layer) is layers.Cropping1D
    return is_cropping or kind_of(call) in ("getitem", "slice", "split", "unstack")


def _reshape_tensors(call: Call, context: LoweringContext) -> list[Call]:
    """Concatenates reshaped tensors in place of a reshape that keeps the axis."""
    op = match(call).op
    joined = _find(call.inputs[0]) if op is not None and op.name == "reshape" else None
    shape = call.output.shape
    if joined is None or joined.is_stacked or joined.axis != len(call.inputs[0].shape) - 1:
        return []
    if None in shape[1:] or shape[-1] != sum(joined.sizes) or len(shape) < 2 or call.output.masked:
        return []
    parts, tensors = PartsBuilder(call, context), []
    for index, (x, size) in enumerate(zip(joined.tensors, joined.sizes, strict=True)):
        sizes = [-1, *shape[1:-1], size]
        reshape = parts.new(f"reshaped_{index}", operation_class(), tf.reshape)
        tensors.append(parts.add(reshape, x, sizes, shape=(*shape[:-1], size)))
    return parts.end(parts.new("", layers.Concatenate), tensors)


def _read_tensors(call: Call, context: LoweringContext) -> list[Call]:
    """Returns the calls that read the concatenated tensors in place of a call that cuts them."""
    if not _cuts(call) or len(call.inputs) != 1:
        return []
    attributes, joined = match(call).attributes, _find(call.inputs[0])
    if joined is None or any(x.masked for x in [*joined.tensors, *values_in(call.outputs)]):
        return []
    if kind_of(call) not in ("split", "unstack"):
        return _slice_tensors(call, context, joined, attributes)
    axis, rank = attributes.get("axis"), len(call.inputs[0].shape)
    is_unstack = kind_of(call) == "unstack"
    if axis is None or axis % rank != joined.axis or is_unstack != joined.is_stacked:
        return []
    parts, begin = PartsBuilder(call, context), 0
    for index, output in enumerate(values_in(call.outputs)):
        size = 1 if is_unstack else int(output.shape[axis] or 0)
        pieces, begin = joined.pieces(begin, begin + size), begin + size
        if not pieces:
            return []
        _concatenate(parts, joined.axis, pieces, f"part_{index}", output)
    return parts.calls


def _slice_tensors(
    call: Call, context: LoweringContext, joined: _Concatenation, attributes: Any
) -> list[Call]:
    """Returns the same slice of the concatenated tensors."""
    if attributes.get("parts") is None:
        return []
    axis, shape, is_indexing = joined.axis, call.inputs[0].shape, kind_of(call) == "getitem"
    start, stop, step = attributes["parts"][axis]
    is_index, entries = axis in attributes["dropped"], range(sum(joined.sizes))
    entries = entries[start:][:1] if is_index else entries[start:stop:step]
    if not entries or entries.step != 1 or joined.is_stacked > is_index:
        return []
    pieces = joined.pieces(entries[0], entries[-1] + 1)
    cut = [a for a, part in enumerate(attributes["parts"]) if _leaves_out(part, shape[a])]
    if not pieces or (not is_indexing and cut != [axis]):
        return []
    items: list[Any] = [FULL_SLICE] * len(shape)
    if is_indexing:
        items = items_for_axes(argument(call, "slice_spec"), len(shape))
    position = [index for index, item in enumerate(items) if item is not None][axis]
    piece, is_joined = pieces[0], len(pieces) > 1
    if joined.is_stacked:
        del items[position]
    elif is_index:
        items[position] = piece.begin
    elif is_joined or piece.is_whole:
        items[position] = FULL_SLICE
    elif is_indexing:
        items[position] = {"start": piece.begin, "stop": piece.end, "step": None}
    parts, x = PartsBuilder(call, context), piece.tensor
    is_needed = any(item != FULL_SLICE for item in items)
    if is_joined or not is_needed:
        name, output = ("joined", None) if is_needed else ("", call.output)
        x = _concatenate(parts, axis, pieces, name, output)
    return parts.end(call.layer, x, tuple(items)) if is_needed else parts.calls


def _concatenate(
    parts: PartsBuilder, axis: int, pieces: list[_Piece], name: str, output: Value | None
) -> Value:
    """Adds the calls that concatenate pieces of tensors; none for one tensor with no `output`."""
    names = [f"{name}_{index}".lstrip("_") for index in range(len(pieces))]
    (names, target) = ([name], output) if len(pieces) == 1 else (names, None)
    tensors = []
    for part, (x, begin, end, is_whole) in zip(names, pieces, strict=True):
        if not is_whole:
            x = parts.slice(part, x, axis, begin, end, target)
        elif target is not None:
            x = parts.add(parts.new(part, layers.Activation, "linear"), x, output=target)
        tensors.append(x)
    if len(pieces) == 1:
        return tensors[0]
    shape = list(tensors[0].shape)
    shape[axis] = sum(piece.end - piece.begin for piece in pieces)
    layer = parts.new(name, layers.Concatenate, axis)
    return parts.add(layer, tensors, shape=tuple(shape), output=output)


def _leaves_out(part: Any, size: int | None) -> bool:
    """Tell whether a slice, as `start`, `stop` and `step`, leaves out entries of an axis."""
    start, stop, step = part
    return (start or 0, step) != (0, 1) or stop not in (None, size)
