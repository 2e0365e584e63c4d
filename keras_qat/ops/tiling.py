"""Operators that repeat, reverse or shift values along axes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from keras_qat.graph.calls import Call
from keras_qat.graph.operations import get_argument, get_operands
from keras_qat.helper_layers.operations import ReverseSteps, Roll
from keras_qat.keras2.backend import layers
from keras_qat.ops.emission import Emission
from keras_qat.ops.movement import (
    MAX_SLICED,
    emit_by_converter,
    emit_slice,
    get_rank,
    make_movement,
    read_axes,
    read_integers,
)
from keras_qat.ops.op import Attributes

Entries = list[tuple[int, Any]]
"""Pairs (axis, indices), with the indices that GATHER reads. For an axis of unknown size, the pair
is (axis, n), and CONCATENATION joins n copies."""


def _emit_gathers(e: Emission, source: int, entries: Entries) -> None:
    """Reorder or repeat a tensor along axes. TILE is not used, because some runtimes lack it."""
    shape = list(e.shape(source))
    for position, (axis, indices) in enumerate(entries):
        is_unknown, target = isinstance(indices, int), e.outputs[0]
        shape[axis] = None if is_unknown else len(indices)
        if position < len(entries) - 1:
            target = e.temporary(f"axis{axis}", tuple(shape), target)
        if is_unknown:
            e.add("CONCATENATION", [source] * indices, [target], axis=axis)
        else:
            constant = e.constant("indices", indices.astype(np.int32))
            e.add("GATHER", [source, constant], [target], axis=axis)
        source = target
    if not entries:
        e.builder.copy(source, e.outputs[0])


def _repeat_indices(size: int | None, count: int) -> Any:
    return count if size is None else np.tile(np.arange(size), count)


def _emit_tile(e: Emission) -> None:
    source = e.source
    sizes = enumerate(zip(e.shape(source), e.attributes["multiples"], strict=True))
    _emit_gathers(
        e, source, [(axis, _repeat_indices(size, n)) for axis, (size, n) in sizes if n != 1]
    )


TILE = make_movement(
    "tile",
    "copies of a tensor along its axes",
    _emit_tile,
    kinds=("tile",),
    attributes=lambda call: {"multiples": read_integers(get_argument(call, "multiples"))},
    needs=("multiples",),
)


def _broadcast_attributes(call: Call) -> Attributes:
    if isinstance(call.layer, layers.RepeatVector):
        return {"added": (1,)}
    return {"added": tuple(range(len(call.output.shape) - get_rank(call)))}


def _emit_broadcast(e: Emission) -> None:
    """Add the new axes, and repeat axes of size 1. If sizes are unknown, add a BROADCAST_TO."""
    source, (target,) = e.source, e.outputs
    before, after = e.shape(source), e.shape(target)
    for axis in e.attributes["added"]:
        before = (*before[:axis], 1, *before[axis:])
    repeated = [axis for axis, size in enumerate(before) if size != after[axis]]
    known = all(before[axis] == 1 and after[axis] is not None for axis in repeated)
    if not known and None not in after:
        shape = e.constant("shape", after)
        e.add("BROADCAST_TO", [source, shape])
        return
    if not known or (e.attributes["added"] and before.count(None) > 1):
        emit_by_converter(e)
        return
    source = e.make_reshaped(source, before, "raised")
    _emit_gathers(e, source, [(axis, _repeat_indices(1, after[axis] or 1)) for axis in repeated])


BROADCAST = make_movement(
    "broadcast",
    "repeats a tensor along axes of size 1",
    _emit_broadcast,
    layers=(layers.RepeatVector,),
    kinds=("broadcast_to",),
    attributes=_broadcast_attributes,
    defaults={"added": ()},
)


def _repeat_attributes(call: Call) -> Attributes:
    """Return `times`, which has pairs of the arguments `axis` and `repeats` of `tf.repeat`."""
    layer, rank = call.layer, get_rank(call)
    if isinstance(layer, layers.UpSampling1D):
        return {"times": ((1, int(layer.size)),)}
    if isinstance(layer, layers.UpSampling3D):
        start = 2 if layer.data_format == "channels_first" else 1
        return {"times": tuple((start + i, int(n)) for i, n in enumerate(layer.size))}
    repeats, axis = get_operands(call, "repeats", "axis")
    known, axes = read_integers(repeats), read_integers(axis)
    if known is None or axes is None:
        return {"times": None}
    times = known[0] if len(known) == 1 else known
    return {"times": ((axes[0] % rank, times),)}


def _emit_entries(attribute: str, entries: Callable[[Any, Any], Any], e: Emission) -> None:
    """Reorder or repeat entries of axes, for example by `np.repeat` or `np.roll`.

    For each pair (axis, n) in `attribute`, gather the indices `entries(np.arange(size), n)`.
    """
    source, changes = e.source, e.attributes[attribute]
    shape = e.shape(source)
    if any(shape[axis] is None for axis, _ in changes):
        emit_by_converter(e)
    else:
        _emit_gathers(
            e, source, [(axis, entries(np.arange(shape[axis]), n)) for axis, n in changes]
        )


REPEAT = make_movement(
    "repeat",
    "repeats each entry of an axis",
    partial(_emit_entries, "times", np.repeat),
    layers=(layers.UpSampling1D, layers.UpSampling3D),
    kinds=("repeat",),
    attributes=_repeat_attributes,
    needs=("times",),
)


def _reverse_attributes(call: Call) -> Attributes:
    axis = 1 if isinstance(call.layer, ReverseSteps) else get_argument(call, "axis")
    return {"axes": None if axis is None else read_axes(axis, get_rank(call))}


def _emit_reverse(e: Emission) -> None:
    """Add a STRIDED_SLICE with steps of -1, because REVERSE_V2 supports only adjacent axes.

    If the tensor has too many axes for TFLite Micro, merge the last ones.
    """
    axes, source, (output,) = e.attributes["axes"], e.source, e.outputs
    shape, target = e.shape(source), output
    before, after = shape[: max(axes) + 1], shape[max(axes) + 1 :]
    if len(shape) > SLICED_ANYWHERE and len(after) > 1 and None not in after:
        shape = (*before, math.prod(size or 0 for size in after))
        source, target = (
            e.make_reshaped(source, shape, "flat"),
            e.temporary("turned", shape, source),
        )
    parts = [(None, None, -1 if axis in axes else 1) for axis in range(len(shape))]
    emit_slice(e, source, target, parts)
    if target != output:
        e.reshape(target, output)


SLICED_ANYWHERE = 4
"""The maximum number of axes of STRIDED_SLICE in all runtimes."""


REVERSE = make_movement(
    "reverse",
    "reverses axes",
    _emit_reverse,
    layers=(ReverseSteps,),
    kinds=("reverse",),
    attributes=_reverse_attributes,
    needs=("axes",),
    accepts=lambda call, attributes: None if attributes["axes"] else "its list of axes is empty",
    max_axes=MAX_SLICED,
)


def _roll_attributes(call: Call) -> Attributes:
    options = get_operands(call, "shift", "axis")
    if isinstance(call.layer, Roll):
        options = [call.layer.shifts, call.layer.axes]
    shifts, axes = map(read_integers, options)
    if shifts is None or axes is None or len(shifts) != len(axes):
        return {"shifts": None}
    rank = get_rank(call)
    return {"shifts": tuple(zip((axis % rank for axis in axes), shifts, strict=True))}


ROLL = make_movement(
    "roll",
    "shifts values along an axis; values that leave the end return at the start",
    partial(_emit_entries, "shifts", np.roll),
    layers=(Roll,),
    attributes=_roll_attributes,
    needs=("shifts",),
    accepts=lambda call, attributes: None if attributes["shifts"] else "its list of axes is empty",
)
