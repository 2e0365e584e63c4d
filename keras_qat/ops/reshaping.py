"""The same values in another shape or order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from keras_qat.inner_layers import FoldSteps, UnfoldSteps
from keras_qat.keras2.backend import keras
from keras_qat.keras2.graph import Call
from keras_qat.operations import operands
from keras_qat.ops.by_converter import emit_by_converter
from keras_qat.ops.movement import (
    first,
    integers,
    move,
    open_sizes,
    rank_of,
    source_of,
    symbol_of,
)
from keras_qat.ops.op import Attributes
from keras_qat.tflite.emission import Emission

__all__ = ["DEPTH_TO_SPACE", "MEAN_OF_ONE", "RESHAPE", "SPACE_TO_DEPTH", "TRANSPOSE", "is_of_one"]

_layers = keras.layers


def _emit_reshape(e: Emission) -> None:
    if open_sizes(e.shape(e.outputs[0])) > 1:
        emit_by_converter(e)
    else:
        e.reshape(source_of(e), e.outputs[0])


def _accepts_reshape(call: Call, attributes: Attributes) -> str | None:
    if getattr(call.layer, "data_format", "") == "channels_first" and len(first(call).shape) > 2:
        return "data_format='channels_first'"
    return None


RESHAPE = move(
    "reshape",
    "other shapes for the same values",
    _emit_reshape,
    layers=(_layers.Flatten, _layers.Reshape, FoldSteps, UnfoldSteps),
    symbols=("reshape", "expand_dims", "squeeze", "compat.v1.squeeze"),
    accepts=_accepts_reshape,
)


def is_of_one(call: Call) -> bool:
    """Whether all axes that a call reduces have the size 1, so that it only reshapes."""
    before, after = first(call).shape, call.output.shape
    if not before or not after or before[0] != after[0]:
        return False
    known = [[size for size in shape[1:] if size is not None] for shape in (before, after)]
    if len(known[0]) < len(before) - 1 or len(known[1]) < len(after) - 1:
        return False
    return math.prod(known[0]) == math.prod(known[1])


MEAN_OF_ONE = move(
    "mean_of_one",
    "means along axes of size 1",
    _emit_reshape,
    layers=(
        _layers.GlobalAveragePooling1D,
        _layers.GlobalAveragePooling2D,
        _layers.GlobalAveragePooling3D,
    ),
    symbols=("math.reduce_mean",),
    accepts=lambda call, attributes: None if is_of_one(call) else "",
)


def _transpose_attributes(call: Call) -> Attributes:
    rank = rank_of(call)
    if isinstance(call.layer, _layers.Permute):
        return {"permutation": (0, *call.layer.dims)}
    if symbol_of(call) == "linalg.matrix_transpose":
        return {"permutation": (*range(rank - 2), rank - 1, rank - 2)}
    (_, permutation) = operands(call, "a", "perm")
    if permutation is None:
        return {"permutation": tuple(range(rank))[::-1]}
    axes = integers(permutation)
    return {"permutation": None if axes is None else tuple(axis % rank for axis in axes)}


def _emit_transpose(e: Emission) -> None:
    axes = np.array(e.attributes["permutation"], np.int32)
    e.add("TRANSPOSE", [source_of(e), e.constant("permutation", axes)], options="TransposeOptions")


MAX_TRANSPOSED = 6
"""Axes that kernels transpose."""


def _accepts_transpose(call: Call, attributes: Attributes) -> str | None:
    if len(call.output.shape) > MAX_TRANSPOSED:
        return f"more than {MAX_TRANSPOSED} axes"
    return None


TRANSPOSE = move(
    "transpose",
    "other orders of the axes",
    _emit_transpose,
    layers=(_layers.Permute,),
    symbols=("transpose", "compat.v1.transpose", "linalg.matrix_transpose"),
    attributes=_transpose_attributes,
    needs=("permutation",),
    accepts=_accepts_transpose,
)


def _block_attributes(call: Call) -> Attributes:
    _, size, data_format = operands(call, "input", "block_size", "data_format")
    known = integers(size)
    return {"size": known[0] if known else None, "data_format": data_format or "NHWC"}


def _accepts_block(call: Call, attributes: Attributes) -> str | None:
    return None if attributes["data_format"] == "NHWC" else "data_format='NCHW'"


ORDER = (0, 1, 3, 2, 4, 5)
"""Of batch, rows, rows in a block, columns, columns in a block and channels; or the other way."""


def _emit_depth_to_space(e: Emission) -> None:
    source, size = source_of(e), e.attributes["size"]
    if e.wide:
        _, height, width, channels = e.shape(source)
        _emit_blocks(e, (height, width, size, size, channels // size**2))
    else:
        e.add("DEPTH_TO_SPACE", [source], options="DepthToSpaceOptions", blockSize=size)


def _emit_space_to_depth(e: Emission) -> None:
    source, size = source_of(e), e.attributes["size"]
    if e.wide:
        _, height, width, channels = e.shape(source)
        _emit_blocks(e, (height // size, size, width // size, size, channels))
    else:
        e.add("SPACE_TO_DEPTH", [source], options="SpaceToDepthOptions", blockSize=size)


def _emit_blocks(e: Emission, sizes: Sequence[int | None]) -> None:
    """The same in 16 bits, which the kernels do not have, as a transposition."""
    source, (target,), split = source_of(e), e.outputs, (None, *sizes)
    parts = e.temporary("split", split, target)
    turned = e.temporary("turned", tuple(split[each] for each in ORDER), target)
    order = e.constant("permutation", np.array(ORDER, np.int32))
    e.reshape(source, parts)
    e.add("TRANSPOSE", [parts, order], [turned], "TransposeOptions")
    e.reshape(turned, target)


DEPTH_TO_SPACE = move(
    "depth_to_space",
    "channels as blocks of pixels",
    _emit_depth_to_space,
    symbols=("nn.depth_to_space",),
    attributes=_block_attributes,
    needs=("size",),
    defaults={"data_format": "NHWC"},
    accepts=_accepts_block,
)

SPACE_TO_DEPTH = move(
    "space_to_depth",
    "blocks of pixels as channels",
    _emit_space_to_depth,
    symbols=("nn.space_to_depth",),
    attributes=_block_attributes,
    needs=("size",),
    defaults={"data_format": "NHWC"},
    accepts=_accepts_block,
)
