"""Operators that slice, split, gather or concatenate tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value, flatten_values
from keras_qat.graph.operations import get_argument, get_kind, get_operands
from keras_qat.helper_layers.operations import LastStep
from keras_qat.keras2.backend import layers
from keras_qat.ops.emission import Emission
from keras_qat.ops.movement import (
    MAX_SLICED,
    Part,
    call_on_values,
    emit_slice,
    get_source,
    make_movement,
    read_integer,
    read_integers,
)
from keras_qat.ops.op import Attributes, Op, SharedRange
from keras_qat.ops.reshaping import read_paddings

FULL_SLICE = dict.fromkeys(("start", "stop", "step"))
"""The slice of `x[:]` in the arguments of a Keras layer."""


def items_for_axes(indices: Any, rank: int) -> list[Any]:
    """Returns the indices of `x[indices]` as a list without an ellipsis. New axes are None."""
    items = list(indices) if isinstance(indices, (list, tuple)) else [indices]
    missing = rank - sum(item is not None and item is not Ellipsis for item in items)
    position = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    items[position : position + 1] = [FULL_SLICE] * missing
    return items


def _slice_attributes(call: Call) -> Attributes:
    """Return `parts` (a slice for each axis), `dropped` (axes to remove) and `added` (new axes)."""
    x = get_source(call)
    rank = len(getattr(x, "shape", ()))
    if isinstance(call.layer, LastStep):
        return _read_indices([FULL_SLICE, -1], rank)
    if not get_kind(call):
        cropping = read_paddings(call.layer, call.layer.cropping, rank)
        cropped = [(low or None, -high or None, 1) for low, high in cropping]
        return {"parts": tuple(cropped), "dropped": (), "added": ()}
    if get_kind(call) == "slice":
        begins, sizes = map(read_integers, get_operands(call, "begin", "size"))
        if begins is None or sizes is None:
            return {"parts": None}
        ends = zip(begins, sizes, strict=True)
        parts = [(low or None, None if size < 0 else low + size, 1) for low, size in ends]
        return {"parts": tuple(parts), "dropped": (), "added": ()}
    return _read_indices(get_argument(call, "slice_spec"), rank)


def _read_indices(indices: Any, rank: int) -> Attributes:
    """Return the attributes of a slice `x[indices]`. In Keras, `indices` has dicts for slices."""
    items = items_for_axes(indices, rank)
    leaves = [leaf for leaf in tf.nest.flatten(items) if leaf is not None]
    if any(read_integers(leaf) is None for leaf in leaves):
        return {"parts": None}
    parts: list[Part] = []
    dropped, added, axis = [], [], 0
    for item in items:
        if item is None:
            added.append(axis)
            axis += 1
        elif isinstance(item, dict):
            begin, end, step = (read_integer(item[name]) for name in ("start", "stop", "step"))
            parts.append((begin, end, step or 1))
            axis += 1
        else:
            dropped.append(len(parts))
            parts.append((read_integer(item), None, 1))
    return {"parts": tuple(parts), "dropped": tuple(dropped), "added": tuple(added)}


def _emit_slice(e: Emission) -> None:
    """Add a STRIDED_SLICE. Add new axes by a RESHAPE, or by EXPAND_DIMS if sizes are unknown."""
    added, (target,) = e.attributes["added"], e.outputs
    shape = e.shape(target)
    if added:
        without_new = tuple(size for axis, size in enumerate(shape) if axis not in added)
        target = e.temporary("part", without_new, target)
    emit_slice(e, e.source, target, e.attributes["parts"], e.attributes["dropped"])
    if added and shape.count(None) <= 1:
        e.reshape(target, e.outputs[0])
    elif added:
        _add_axes(e, target, shape, added)


def _add_axes(e: Emission, source: int, shape: Any, added: tuple[int, ...]) -> None:
    for axis in added:
        target, remaining = e.outputs[0], [later for later in added if later > axis]
        if remaining:
            partial = tuple(size for i, size in enumerate(shape) if i not in remaining)
            target = e.temporary(f"axis{axis}", partial, target)
        e.add("EXPAND_DIMS", [source, e.constant("axis", axis)], [target])
        source = target


SLICE = make_movement(
    "slice",
    "slices, strided slices, crops",
    _emit_slice,
    layers=(layers.Cropping1D, layers.Cropping2D, layers.Cropping3D, LastStep),
    kinds=("getitem", "slice"),
    attributes=_slice_attributes,
    needs=("parts",),
    defaults={"dropped": (), "added": ()},
    max_axes=MAX_SLICED,
)


def _split_attributes(call: Call) -> Attributes:
    """Return the operator's options. The `sizes` are () if the call has only a count."""
    parts, axis = get_operands(call, "num_or_size_splits", "axis")
    known, axes = read_integers(parts), read_integers(axis or 0)
    if known is None or axes is None or not isinstance(get_source(call), Value):
        return {"axis": None}
    sizes: Any = ()
    if tf.nest.is_nested(parts) or np.ndim(parts) > 0:
        sizes = known
    rank = len(get_source(call).shape)
    return {"axis": axes[0] % rank, "sizes": sizes, "count": len(flatten_values(call.outputs))}


def _emit_split(e: Emission) -> None:
    axis = e.constant("axis", e.attributes["axis"])
    count, sizes = e.attributes["count"], e.attributes["sizes"]
    if len(set(sizes)) > 1:
        lengths = e.constant("sizes", sizes)
        e.add("SPLIT_V", [e.source, lengths, axis], numSplits=count)
    else:
        e.add("SPLIT", [axis, e.source], numSplits=count)


SPLIT = make_movement(
    "split",
    "splits a tensor along an axis",
    _emit_split,
    kinds=("split",),
    attributes=_split_attributes,
    needs=("axis", "sizes", "count"),
)


def _unstack_attributes(call: Call) -> Attributes:
    axis = read_integer(get_argument(call, "axis") or 0)
    return {"axis": axis, "count": len(flatten_values(call.outputs))}


UNSTACK = make_movement(
    "unstack",
    "splits a tensor into the entries of an axis",
    lambda e: e.add("UNPACK", [e.source], axis=e.attributes["axis"], num=e.attributes["count"]),
    kinds=("unstack",),
    attributes=_unstack_attributes,
    needs=("axis", "count"),
)


GATHER_ARGUMENTS = ("params", "indices", "axis", "batch_dims", "max_norm")


def _gather_attributes(call: Call) -> Attributes:
    """Return the operator's options. For indices in a tensor, `indices` and `shape` are ()."""
    x, indices, axis, batch, limit = get_operands(call, *GATHER_ARGUMENTS)
    batch = read_integers(batch or 0)
    axes = read_integers(batch if axis is None else axis)
    if axes is None or batch is None or limit is not None or not isinstance(x, Value):
        return {"axis": None}
    indexed = isinstance(indices, Value)
    ranks = len(x.shape), len(indices.shape) if indexed else np.ndim(indices)
    options = {"axis": axes[0] % ranks[0], "batch": batch[0] + ranks[1] * (batch[0] < 0)}
    if indexed:
        return {**options, "indices": (), "shape": (), "constant": False}
    known = read_integers(indices)
    return {**options, "indices": known, "shape": np.shape(indices), "constant": True}


def _emit_gather(e: Emission) -> None:
    source = e.source
    if e.attributes["constant"]:
        indices = np.array(e.attributes["indices"], np.int32)
        positions = e.constant("indices", indices.reshape(e.attributes["shape"]))
    else:
        (positions,) = (tensor for tensor in e.inputs if tensor != source)
    e.add("GATHER", [source, positions], axis=e.attributes["axis"], batchDims=e.attributes["batch"])


GATHER = make_movement(
    "gather",
    "entries of an axis by index",
    _emit_gather,
    kinds=("gather", "embedding_lookup"),
    attributes=_gather_attributes,
    needs=("axis",),
    defaults={"batch": 0, "indices": (), "shape": (), "constant": False},
)


def _concatenate_attributes(call: Call) -> Attributes:
    """Return `axis` and `numbers`: (position, values, shape) of each input that is a constant."""
    axis = get_argument(call, "axis") or 0 if get_kind(call) else call.layer.axis
    axes, rank = read_integers(axis), len(call.output.shape)
    parts = get_source(call)
    parts = list(parts) if isinstance(parts, (list, tuple)) else [parts]
    prepared = tuple(
        (position, read_integers(part), tuple(np.shape(part)))
        for position, part in enumerate(parts)
        if not isinstance(part, Value)
    )
    return {"axis": axes[0] % rank if axes and rank else None, "numbers": prepared}


def _accepts_concatenate(call: Call, attributes: Attributes) -> str | None:
    if attributes["axis"] is None:
        return "its options are known only at run time"
    if attributes["numbers"] and call.output.is_float:
        return "with constants"
    return None


def _insert_constants(e: Emission) -> list[int]:
    inputs, dtype = list(e.inputs), e.node.output.dtype
    for position, values, shape in e.attributes["numbers"]:
        inputs.insert(position, e.constant("numbers", np.array(values, dtype).reshape(shape)))
    return inputs


CONCATENATE = Op(
    "concatenate",
    call_on_values,
    lambda e: e.add("CONCATENATION", _insert_constants(e), axis=e.attributes["axis"]),
    doc="concatenated tensors",
    layers=(layers.Concatenate,),
    kinds=("concat",),
    attributes=_concatenate_attributes,
    needs=("axis",),
    defaults={"numbers": ()},
    accepts=_accepts_concatenate,
    output=SharedRange(),
)


STACK = dataclasses.replace(
    CONCATENATE,
    name="stack",
    emit=lambda e: e.add(
        "PACK", inputs := _insert_constants(e), valuesCount=len(inputs), axis=e.attributes["axis"]
    ),
    doc="tensors stacked along a new axis",
    layers=(),
    kinds=("stack",),
)
