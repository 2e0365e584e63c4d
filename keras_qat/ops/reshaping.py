"""Operators that reshape, transpose or pad tensors, or return their shape."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from functools import partial
from typing import Any

from keras_qat.graph.calls import Call
from keras_qat.graph.operations import get_argument, get_kind, get_operands, read_scalar
from keras_qat.helper_layers.operations import FlattenTime, RestoreTime
from keras_qat.keras2.backend import layers
from keras_qat.ops.emission import Emission
from keras_qat.ops.movement import (
    emit_by_converter,
    get_rank,
    get_source,
    make_movement,
    read_integer,
    read_integers,
)
from keras_qat.ops.op import Attributes, OwnRange
from keras_qat.tflite.schema import TYPES


def _emit_reshape(e: Emission) -> None:
    if e.shape(e.outputs[0]).count(None) > 1:
        emit_by_converter(e)
    else:
        e.reshape(e.source, e.outputs[0])


def _accepts_reshape(call: Call, attributes: Attributes) -> str | None:
    if (
        getattr(call.layer, "data_format", "") == "channels_first"
        and len(get_source(call).shape) > 2
    ):
        return "data_format='channels_first'"
    return None


RESHAPE = make_movement(
    "reshape",
    "changes the shape",
    _emit_reshape,
    layers=(layers.Flatten, layers.Reshape, FlattenTime, RestoreTime),
    kinds=("reshape", "expand_dims", "squeeze"),
    accepts=_accepts_reshape,
)


def _is_of_one(call: Call) -> bool:
    """Return True if a mean is along axes of size 1. It then only reshapes its input."""
    before, after = get_source(call).shape, call.output.shape
    if not before or not after or before[0] != after[0]:
        return False
    count, new_count = (math.prod(size or 0 for size in shape[1:]) for shape in (before, after))
    return 0 < count == new_count


MEAN_OF_ONE = make_movement(
    "mean_of_one",
    "means along axes of size 1",
    _emit_reshape,
    layers=tuple(getattr(layers, f"GlobalAveragePooling{n}D") for n in (1, 2, 3)),
    kinds=("reduce_mean",),
    accepts=lambda call, attributes: None if _is_of_one(call) else "",
)


def _transpose_attributes(call: Call) -> Attributes:
    rank = get_rank(call)
    if isinstance(call.layer, layers.Permute):
        return {"permutation": (0, *call.layer.dims)}
    if get_kind(call) == "matrix_transpose":
        return {"permutation": (*range(rank - 2), rank - 1, rank - 2)}
    permutation = get_argument(call, "perm")
    if permutation is None:
        return {"permutation": tuple(range(rank))[::-1]}
    axes = read_integers(permutation)
    return {"permutation": None if axes is None else tuple(axis % rank for axis in axes)}


TRANSPOSE = make_movement(
    "transpose",
    "permuted axes",
    lambda e: e.transpose(e.source, e.attributes["permutation"], e.outputs[0]),
    layers=(layers.Permute,),
    kinds=("transpose", "matrix_transpose"),
    attributes=_transpose_attributes,
    needs=("permutation",),
    max_axes=6,
)


def _block_attributes(call: Call) -> Attributes:
    size, data_format = get_operands(call, "block_size", "data_format")
    return {"size": read_integer(size), "data_format": data_format or "NHWC"}


ORDER = (0, 1, 3, 2, 4, 5)
"""The permutation for DEPTH_TO_SPACE and SPACE_TO_DEPTH after a reshape. It exchanges the axes
`column` and `row in block` of [batch, row, column, row in block, column in block, channel]."""


def _emit_blocks(code: str, e: Emission) -> None:
    # There are no 16-bit kernels, so 16-bit tensors are reshaped and transposed.
    source, (target,), size = e.source, e.outputs, e.attributes["size"]
    if not e.wide:
        e.add(code, [source], blockSize=size)
        return
    batch, height, width, channels = e.shape(source)
    split: tuple[int | None, ...] = (batch, height, width, size, size, channels // size**2)
    if code == "SPACE_TO_DEPTH":
        split = (batch, height // size, size, width // size, size, channels)
    e.reshape(e.transpose(e.make_reshaped(source, split, "split"), ORDER), target)


DEPTH_TO_SPACE = make_movement(
    "depth_to_space",
    "moves channels into blocks of pixels",
    partial(_emit_blocks, "DEPTH_TO_SPACE"),
    kinds=("depth_to_space",),
    attributes=_block_attributes,
    needs=("size",),
    defaults={"data_format": "NHWC"},
    accepts=lambda call, a: None if a["data_format"] == "NHWC" else "data_format='NCHW'",
)

SPACE_TO_DEPTH = dataclasses.replace(
    DEPTH_TO_SPACE,
    name="space_to_depth",
    emit=partial(_emit_blocks, "SPACE_TO_DEPTH"),
    doc="moves blocks of pixels into channels",
    kinds=("space_to_depth",),
)


def _emit_size(e: Emission) -> None:
    (target,) = e.outputs
    sizes = e.temporary("sizes", (len(e.shape(e.source)),), e.dtype(target))
    e.add("SHAPE", [e.source], [sizes], outType=TYPES[e.dtype(target)])
    e.add("REDUCE_PROD", [sizes, e.constant("axes", [0])], [target], keepDims=False)


SHAPE = make_movement(
    "shape",
    "the sizes of a tensor",
    lambda e: e.add("SHAPE", [e.source], outType=TYPES[e.node.output.dtype]),
    compute=lambda a: a.run_layer(a.q),
    output=OwnRange(),
    kinds=("shape",),
)

SIZE = dataclasses.replace(
    SHAPE, name="size", doc="the number of values in a tensor", emit=_emit_size, kinds=("size",)
)


# Padding with zeros or with copies of values. Every range represents zeros exactly.

MODES = {"REFLECT": 0, "SYMMETRIC": 1}
"""Maps a padding mode to its value in TFLite's schema."""

Pairs = tuple[tuple[int, int], ...]


def read_paddings(layer: Any, options: Any, rank: int) -> Pairs:
    """Returns a layer's padding or cropping as pairs (before, after), for each of `rank` axes.

    `options` is the attribute `padding` or `cropping` of the layer. For a sequence (`rank` 3), it
    is only one pair. The result has (0, 0) for the axes of batch and channels.
    """
    if rank == 3:
        options = (options,)
    known: Pairs = tuple((int(low), int(high)) for low, high in options)
    channels = ((0, 0),)
    if getattr(layer, "data_format", "") == "channels_first":
        return (*channels, *channels, *known)
    return (*channels, *known, *channels)


def _padding_attributes(call: Call) -> Attributes:
    rank = get_rank(call)
    if not get_kind(call):
        return {"paddings": read_paddings(call.layer, call.layer.padding, rank), "mode": "CONSTANT"}
    paddings, mode, value = get_operands(call, "paddings", "mode", "constant_values")
    known = read_integers(paddings)
    both = None if known is None else tuple(zip(known[::2], known[1::2], strict=True))
    attributes: dict[str, Any] = {"paddings": both, "mode": (mode or "CONSTANT").upper()}
    if attributes["mode"] == "CONSTANT":
        attributes["value"] = 0.0 if value is None else read_scalar(value)
    return attributes


def _accepts_padding(modes: Collection[str], call: Call, attributes: Attributes) -> str | None:
    mode = attributes["mode"]
    if mode not in modes:
        return "" if mode in MODES else f"mode={mode!r}"
    is_zero = attributes.get("value", 0.0) == 0.0
    return None if is_zero else "pads with values other than 0"


def _emit_padding(e: Emission) -> None:
    paddings, mode = e.constant("paddings", e.attributes["paddings"]), e.attributes["mode"]
    if mode in MODES:
        e.add("MIRROR_PAD", [e.source, paddings], mode=MODES[mode])
    else:
        e.add("PAD", [e.source, paddings])


PAD = make_movement(
    "pad",
    "padding with zeros",
    _emit_padding,
    layers=(layers.ZeroPadding1D, layers.ZeroPadding2D, layers.ZeroPadding3D),
    kinds=("pad",),
    attributes=_padding_attributes,
    needs=("paddings",),
    defaults={"mode": "CONSTANT"},
    accepts=partial(_accepts_padding, ("CONSTANT",)),
    max_axes=5,
)

MIRROR_PAD = make_movement(
    "mirror_pad",
    "padding with copies of values next to the edge",
    _emit_padding,
    kinds=("pad",),
    attributes=_padding_attributes,
    needs=("paddings", "mode"),
    accepts=partial(_accepts_padding, MODES),
    max_axes=5,
)
