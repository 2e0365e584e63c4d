"""Parts of a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.keras2.backend import keras
from keras_qat.keras2.graph import Call, Value, values_in
from keras_qat.operations import operands
from keras_qat.ops.movement import (
    MAX_SLICED,
    Part,
    first,
    integers,
    move,
    open_sizes,
    source_of,
    symbol_of,
    take_parts,
)
from keras_qat.ops.op import Attributes
from keras_qat.ops.padding import pairs
from keras_qat.tflite.emission import Emission

__all__ = ["GATHER", "SLICE", "SPLIT", "UNSTACK"]

_layers = keras.layers


def _slice_attributes(call: Call) -> Attributes:
    """`parts`: one for each axis; `dropped` axes of the input and `added` ones of the output."""
    x = first(call)
    rank = len(getattr(x, "shape", ()))
    if not symbol_of(call):
        cropping = pairs(call.layer, call.layer.cropping, rank)
        cropped = [(low or None, -high or None, 1) for low, high in cropping]
        return {"parts": tuple(cropped), "dropped": (), "added": ()}
    if symbol_of(call) == "slice":
        begins, sizes = (integers(each) for each in operands(call, "input_", "begin", "size")[1:])
        if begins is None or sizes is None:
            return {"parts": None}
        ends = zip(begins, sizes, strict=True)
        parts = [(low or None, None if size < 0 else low + size, 1) for low, size in ends]
        return {"parts": tuple(parts), "dropped": (), "added": ()}
    return _indexed(operands(call, "tensor", "slice_spec")[1], rank)


def _indexed(given: Any, rank: int) -> Attributes:
    """The attributes of `x[given]`, slices being dictionaries, as Keras keeps them."""
    items = list(given) if isinstance(given, (list, tuple)) else [given]
    taken = sum(each is not None and each is not Ellipsis for each in items)
    if not any(each is Ellipsis for each in items):
        items.append(Ellipsis)
    parts: list[Part] = []
    dropped, added, place = [], [], 0
    for item in items:
        if item is None:
            added.append(place)
            place += 1
        elif item is Ellipsis:
            parts += [(None, None, 1)] * (rank - taken)
            place += rank - taken
        elif isinstance(item, dict):
            known = [_bound(item[name]) for name in ("start", "stop", "step")]
            if UNKNOWN in known:
                return {"parts": None}
            parts.append((known[0], known[1], known[2] or 1))
            place += 1
        else:
            index = _bound(item)
            if index == UNKNOWN:
                return {"parts": None}
            dropped.append(len(parts))
            parts.append((index, None, 1))
    return {"parts": tuple(parts), "dropped": tuple(dropped), "added": tuple(added)}


UNKNOWN = "unknown"


def _bound(given: Any) -> Any:
    if given is None:
        return None
    known = integers(given)
    return UNKNOWN if known is None or len(known) != 1 else known[0]


def _accepts_slice(call: Call, attributes: Attributes) -> str | None:
    if len(attributes["parts"]) > MAX_SLICED:
        return f"more than {MAX_SLICED} axes"
    return None


def _emit_slice(e: Emission) -> None:
    """STRIDED_SLICE, and RESHAPE for new axes, or EXPAND_DIMS for each."""
    added, (target,) = e.attributes["added"], e.outputs
    shape = e.shape(target)
    if added:
        kept = tuple(size for place, size in enumerate(shape) if place not in added)
        target = e.temporary("part", kept, target)
    take_parts(e, source_of(e), target, e.attributes["parts"], e.attributes["dropped"])
    if added and open_sizes(shape) <= 1:
        e.reshape(target, e.outputs[0])
    elif added:
        _add_axes(e, target, shape, added)


def _add_axes(e: Emission, source: int, shape: Any, added: tuple[int, ...]) -> None:
    for place in added:
        target, others = e.outputs[0], [each for each in added if each > place]
        if others:
            now = tuple(size for axis, size in enumerate(shape) if axis not in others)
            target = e.temporary(f"axis{place}", now, target)
        axis = e.constant("axis", np.int32(place))
        e.add("EXPAND_DIMS", [source, axis], [target], "ExpandDimsOptions")
        source = target


SLICE = move(
    "slice",
    "parts of a tensor, every n-th value, crops",
    _emit_slice,
    layers=(_layers.Cropping1D, _layers.Cropping2D, _layers.Cropping3D),
    symbols=("__operators__.getitem", "slice"),
    attributes=_slice_attributes,
    needs=("parts",),
    defaults={"dropped": (), "added": ()},
    accepts=_accepts_slice,
)


def _split_attributes(call: Call) -> Attributes:
    """`sizes` along an `axis`, None for equal ones; `count`."""
    _, parts, axis = operands(call, "value", "num_or_size_splits", "axis")
    known, axes = integers(parts), integers(axis or 0)
    if known is None or axes is None or not isinstance(first(call), Value):
        return {"axis": None}
    sizes: Any = ()
    if tf.nest.is_nested(parts) or np.ndim(parts) > 0:
        sizes = known
    rank = len(first(call).shape)
    return {"axis": axes[0] % rank, "sizes": sizes, "count": len(values_in(call.outputs))}


def _emit_split(e: Emission) -> None:
    axis = e.constant("axis", np.int32(e.attributes["axis"]))
    count, sizes = e.attributes["count"], e.attributes["sizes"]
    if len(set(sizes)) > 1 or -1 in sizes:
        lengths = e.constant("sizes", np.array(sizes, np.int32))
        e.add("SPLIT_V", [source_of(e), lengths, axis], options="SplitVOptions", numSplits=count)
    else:
        e.add("SPLIT", [axis, source_of(e)], options="SplitOptions", numSplits=count)


SPLIT = move(
    "split",
    "a tensor in parts",
    _emit_split,
    symbols=("split",),
    attributes=_split_attributes,
    needs=("axis", "sizes", "count"),
)


def _unstack_attributes(call: Call) -> Attributes:
    _, _, axis = operands(call, "value", "num", "axis")
    axes = integers(axis or 0)
    return {"axis": axes[0] if axes else None, "count": len(values_in(call.outputs))}


def _emit_unstack(e: Emission) -> None:
    axis, count = (e.attributes[name] for name in ("axis", "count"))
    e.add("UNPACK", [source_of(e)], options="UnpackOptions", axis=axis, num=count)


UNSTACK = move(
    "unstack",
    "the entries of an axis",
    _emit_unstack,
    symbols=("unstack",),
    attributes=_unstack_attributes,
    needs=("axis", "count"),
)


def _gather_attributes(call: Call) -> Attributes:
    """`indices`: constant ones and their `shape`, () if they are a tensor."""
    names = ("params", "indices", "validate_indices", "name", "axis", "batch_dims")
    if symbol_of(call) == "gather":
        names = ("params", "indices", "validate_indices", "axis", "batch_dims", "name")
    found = dict(zip(names, operands(call, *names), strict=True))
    batch = integers(found["batch_dims"] or 0)
    axes = integers(batch if found["axis"] is None else found["axis"])
    indices, x = found["indices"], found["params"]
    if axes is None or batch is None or not isinstance(x, Value):
        return {"axis": None}
    rank = len(x.shape)
    places = {"axis": axes[0] % rank, "batch": batch[0] % rank}
    if isinstance(indices, Value):
        return {**places, "indices": (), "shape": (), "constant": False}
    known = integers(indices)
    return {**places, "indices": known, "shape": np.shape(indices), "constant": True}


def _emit_gather(e: Emission) -> None:
    source = source_of(e)
    if e.attributes["constant"]:
        indices = np.array(e.attributes["indices"], np.int32).reshape(e.attributes["shape"])
        place = e.constant("indices", indices)
    else:
        (place,) = (each for each in e.inputs if each != source)
    e.add(
        "GATHER",
        [source, place],
        options="GatherOptions",
        axis=e.attributes["axis"],
        batchDims=e.attributes["batch"],
    )


GATHER = move(
    "gather",
    "entries of an axis by their number",
    _emit_gather,
    symbols=("compat.v1.gather", "gather"),
    attributes=_gather_attributes,
    needs=("axis",),
    defaults={"batch": 0, "indices": (), "shape": (), "constant": False},
)
