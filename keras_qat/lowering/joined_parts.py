"""Takes parts of joined tensors from what was joined, so that their numbers share no range."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, values_in
from keras_qat.graph.operations import is_operation, kind_of
from keras_qat.graph.tf_operations import argument, operation_class
from keras_qat.keras2.backend import layers
from keras_qat.lowering.builder import LoweringContext, PartsBuilder
from keras_qat.ops.registry import match
from keras_qat.ops.slicing import FULL_SLICE, items_for_axes

_SLICES = "getitem", "slice"


class _Piece(NamedTuple):
    """Entries of a tensor along the axis of a join."""

    tensor: Value
    begin: int
    end: int
    is_whole: bool


class _Join(NamedTuple):
    """Tensors side by side along an axis."""

    axis: int
    tensors: list[Value]
    sizes: list[int]
    stacked: bool

    def pieces(self, begin: int, end: int) -> list[_Piece]:
        """Returns what some entries are made of, where that is a part of the tensors alone."""
        pieces = []
        for x, size in zip(self.tensors, self.sizes, strict=True):
            low, high = max(begin, 0), min(end, size)
            if low < high:
                pieces.append(_Piece(x, low, high, high - low == size))
            begin, end = begin - size, end - size
        return pieces if len(pieces) < len(self.tensors) or len(pieces) == 1 else []


def with_joined_parts(graph: Graph, context: LoweringContext) -> Graph:
    """Lets slices, splits and unstacks of joined tensors read those that hold their numbers.

    Detectors, for example, concatenate scores, offsets and anchors, and cut them apart to decode
    boxes. In 8 bits all parts of a concatenation have one range.
    """
    readers = graph.consumers()

    def expand(call: Call) -> list[Call]:
        parts = _taken(call, context)
        if not parts and any(map(_takes, readers.get(call.output, ()))):
            parts = _reshaped(call, context)
        return [new for part in parts for new in expand(part.as_part_of(call))] or [call]

    calls = [part for call in graph.calls for part in expand(call)]
    return dataclasses.replace(graph, calls=calls)


def _takes(call: Call) -> bool:
    """Returns whether a call takes parts of a tensor."""
    if type(call.layer) is layers.Cropping1D:
        return True
    return is_operation(call.layer) and kind_of(call) in (*_SLICES, "split", "unstack")


def _reshaped(call: Call, context: LoweringContext) -> list[Call]:
    """Joins reshaped tensors, in the place of a reshape of what is joined along the last axis."""
    op = match(call).op
    join = _joined(call.inputs[0]) if op is not None and op.name == "reshape" else None
    shape = call.output.shape
    if join is None or join.stacked or join.axis != len(call.inputs[0].shape) - 1:
        return []
    if None in shape[1:] or shape[-1] != sum(join.sizes) or len(shape) < 2 or call.output.masked:
        return []
    parts, tensors = PartsBuilder(call, context), []
    for index, (x, size) in enumerate(zip(join.tensors, join.sizes, strict=True)):
        sizes = [-1, *shape[1:-1], size]
        reshape = parts.new(f"reshaped_{index}", operation_class(), tf.reshape)
        tensors.append(parts.add(reshape, x, sizes, shape=(*shape[:-1], size)))
    return parts.end(parts.new("", layers.Concatenate), tensors)


def _taken(call: Call, context: LoweringContext) -> list[Call]:
    """Returns the calls that take parts from the tensors that were joined."""
    kind = kind_of(call)
    if not _takes(call) or len(call.inputs) != 1:
        return []
    attributes, join = match(call).attributes, _joined(call.inputs[0])
    if join is None or any(value.masked for value in [*join.tensors, *values_in(call.outputs)]):
        return []
    if kind not in ("split", "unstack"):
        return _sliced(call, context, join, attributes)
    axis, rank = attributes.get("axis"), len(call.inputs[0].shape)
    if axis is None or axis % rank != join.axis or (kind == "unstack") != join.stacked:
        return []
    parts, begin = PartsBuilder(call, context), 0
    for index, output in enumerate(values_in(call.outputs)):
        size = 1 if join.stacked else int(output.shape[axis] or 0)
        pieces, begin = join.pieces(begin, begin + size), begin + size
        if not pieces:
            return []
        _add_joined(parts, join.axis, pieces, f"part_{index}", output)
    return parts.calls


def _add_joined(
    parts: PartsBuilder, axis: int, pieces: list[_Piece], name: str, output: Value | None
) -> Value:
    """Adds the calls that join pieces of tensors."""
    last = output if len(pieces) == 1 else None
    tensors = [
        _add_piece(parts, axis, piece, name if last else f"{name}_{index}".lstrip("_"), last)
        for index, piece in enumerate(pieces)
    ]
    if len(pieces) == 1:
        return tensors[0]
    shape = list(tensors[0].shape)
    shape[axis] = sum(piece.end - piece.begin for piece in pieces)
    layer = parts.new(name, layers.Concatenate, axis)
    return parts.add(layer, tensors, shape=tuple(shape), output=output)


def _add_piece(
    parts: PartsBuilder, axis: int, piece: _Piece, name: str, output: Value | None
) -> Value:
    """Adds the call that takes a piece of a tensor; none if it is the tensor, with no `output`."""
    x, rank = piece.tensor, len(piece.tensor.shape)
    if piece.is_whole:
        linear = layers.Activation, "linear"
        return parts.add(parts.new(name, *linear), x, output=output) if output else x
    begins = [piece.begin if a == axis else 0 for a in range(rank)]
    sizes = [piece.end - piece.begin if a == axis else -1 for a in range(rank)]
    shape = (*x.shape[:axis], sizes[axis], *x.shape[axis + 1 :])
    part = parts.new(name, operation_class(), tf.slice)
    return parts.add(part, x, begins, sizes, shape=shape, output=output)


def _joined(value: Value) -> _Join | None:
    """Returns what a tensor is joined of; None if it is not, or its sizes are not known."""
    call = value.producer
    op, attributes, _ = match(call) if call else (None, {}, "")
    if call is None or op is None or op.name not in ("concatenate", "stack", "linear"):
        return None
    if op.name == "linear":
        return None if value.masked else _joined(call.inputs[0])
    axis, tensors, stacked = attributes["axis"], call.inputs, op.name == "stack"
    if attributes["numbers"] or axis == 0 or axis is None:
        return None
    sizes = [1 if stacked else x.shape[axis] for x in tensors]
    known = [size for size in sizes if size is not None]
    return _Join(axis, tensors, known, stacked) if len(known) == len(sizes) else None


def _sliced(call: Call, context: LoweringContext, join: _Join, attributes: Any) -> list[Call]:
    """Returns the same slice of the tensors that it reads."""
    if attributes.get("parts") is None:
        return []
    start, stop, step = attributes["parts"][join.axis]
    is_index = join.axis in attributes["dropped"]
    total = range(sum(join.sizes))
    taken = total[start:][:1] if is_index else total[start:stop:step]
    if not taken or taken.step != 1 or join.stacked > is_index:
        return []
    pieces = join.pieces(taken[0], taken[-1] + 1)
    if not pieces:
        return []
    x, low, _, is_whole = pieces[0]
    parts = PartsBuilder(call, context)
    if kind_of(call) != _SLICES[0]:
        shape = call.inputs[0].shape
        sliced = [axis for axis, part in enumerate(attributes["parts"]) if _cuts(part, shape[axis])]
        if sliced != [join.axis]:
            return []
        _add_joined(parts, join.axis, pieces, "", call.output)
        return parts.calls
    items = items_for_axes(argument(call, "slice_spec"), len(call.inputs[0].shape))
    position = [index for index, item in enumerate(items) if item is not None][join.axis]
    is_joined = len(pieces) > 1
    if join.stacked:
        del items[position]
    elif is_index:
        items[position] = low
    elif is_joined or is_whole:
        items[position] = FULL_SLICE
    else:
        items[position] = {"start": low, "stop": pieces[0].end, "step": None}
    rest = [item for item in items if item != FULL_SLICE]
    if is_joined or not rest:
        name, output = ("joined", None) if rest else ("", call.output)
        x = _add_joined(parts, join.axis, pieces, name, output)
    return parts.end(call.layer, x, tuple(items)) if rest else parts.calls


def _cuts(part: Any, size: int | None) -> bool:
    """Returns whether a slice, as `start`, `stop` and `step`, leaves something of an axis out."""
    start, stop, step = part
    is_all = (start or 0, step) == (0, 1) and stop in (None, size)
    return not is_all
