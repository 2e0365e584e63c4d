"""Other forms of operators, for targets whose kernels are faulty: the same numbers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.tflite.builder import Builder
from keras_qat.tflite.reader import Site, Tensor
from keras_qat.tflite.weight_packing import unpack_nibbles

Shape = tuple[int, ...]

NO_ACTIVATION = schema.ActivationFunctionType.NONE
RELU6 = schema.ActivationFunctionType.RELU6

MOST_AXES = 4
"""Most axes of TFLite Micro's PRELU."""

MOST_PARTS = 10
"""Most inputs of TFLite Micro's CONCATENATION."""


def _inputs(site: Site) -> list[int]:
    return list(site.operation.inputs)


def _options(site: Site, **changed: Any) -> dict[str, Any]:
    return {**vars(site.graph.options(site.operation)), **changed}


def _similar(builder: Builder, index: int, shape: tuple[int | None, ...], part: str) -> int:
    """Adds a tensor like another, with a name of its own."""
    return builder.similar(index, shape, f"{builder.graph.tensors[index].name.decode()}/{part}")


def _tensor(site: Site, index: int) -> Tensor:
    tensor = site.inputs[index]
    assert tensor is not None
    return tensor


def _reshaped(builder: Builder, source: int, shape: Shape) -> int:
    target = _similar(builder, source, shape, "reshaped")
    builder.copy(source, target)
    return target


def as_matrix(builder: Builder, site: Site) -> None:
    """Multiplies the rows of a matrix, where there were more axes."""
    x, *weights = _inputs(site)
    (end,) = site.outputs
    rows = math.prod(end.shape[:-1])
    x = _reshaped(builder, x, (rows, _tensor(site, 0).shape[-1]))
    result = _similar(builder, end.index, (rows, end.shape[-1]), "rows")
    options = _options(site, keepNumDims=False)
    builder.operator("FULLY_CONNECTED", [x, *weights], [result], **options)
    builder.copy(result, end.index)


def flat(builder: Builder, site: Site) -> None:
    """Computes single numbers of one axis, where there were more."""
    (end,) = site.outputs
    inputs = [
        _reshaped(builder, tensor.index, (math.prod(tensor.shape),))
        if tensor.shape
        else tensor.index
        for tensor in site.tensors[:-1]
    ]
    _reshaped_back(builder, site, inputs, (math.prod(end.shape),))


def without_batch(builder: Builder, site: Site) -> None:
    """Leaves out the first axis, which is of size 1."""
    inputs, (end,) = _inputs(site), site.outputs
    for index, tensor in enumerate(site.tensors[:-1]):
        if len(tensor.shape) == len(end.shape):
            inputs[index] = _reshaped(builder, tensor.index, tensor.shape[1:])
    if site.operation.kernel == "TRANSPOSE":
        inputs[1] = builder.constant(f"{end.name}/order", _constant(site, 1)[1:] - 1)
    _reshaped_back(builder, site, inputs, end.shape[1:])


def _reshaped_back(builder: Builder, site: Site, inputs: list[int], shape: Shape) -> None:
    """Adds the operator with other inputs, and gives its result the shape that it had."""
    (end,) = site.outputs
    result = _similar(builder, end.index, shape, "reshaped")
    builder.operator(site.operation.kernel, inputs, [result], **_options(site))
    builder.copy(result, end.index)


def _constant(site: Site, index: int) -> np.ndarray:
    values = site.constant(index)
    assert values is not None
    return values


def as_column(builder: Builder, site: Site) -> None:
    """Convolves a column of pixels, where there was a row."""
    x, weights, *bias = _inputs(site)
    (end,) = site.outputs

    def turned(shape: Shape) -> Shape:
        return shape[0], shape[2], shape[1], shape[3]

    x = _reshaped(builder, x, turned(_tensor(site, 0).shape))
    column = _similar(builder, weights, turned(_tensor(site, 1).shape), "column")
    builder.graph.tensors[column].buffer = builder.graph.tensors[weights].buffer
    result = _similar(builder, end.index, turned(end.shape), "column")
    options = _options(site)
    for option in ("stride{}", "dilation{}Factor"):
        high, wide = option.format("H"), option.format("W")
        options[high], options[wide] = options[wide], options[high]
    builder.operator("CONV_2D", [x, column, *bias], [result], **options)
    builder.copy(result, end.index)


def mean_of_column(builder: Builder, site: Site) -> None:
    """Adds a last axis of size 1, so that the values that are averaged lie in a column."""
    x, axes = _inputs(site)
    (end,) = site.outputs
    last = builder.constant(f"{end.name}/last", np.array(-1, np.int32))
    column = _similar(builder, x, (*_open(_tensor(site, 0).shape), 1), "column")
    builder.operator("EXPAND_DIMS", [x, last], [column])
    result = _similar(builder, end.index, (*_open(end.shape), 1), "column")
    builder.operator("MEAN", [column, axes], [result], **_options(site))
    builder.operator("SQUEEZE", [result], [end.index], squeezeDims=[len(end.shape)])


def _open(shape: Shape) -> tuple[int | None, ...]:
    """Returns a file's shape as `Builder` takes it, with None for open sizes."""
    return tuple(None if size < 0 else size for size in shape)


def groups_apart(builder: Builder, site: Site) -> None:
    """Convolves each group of channels by itself."""
    x, *weighted = _inputs(site)
    (end,) = site.outputs
    shape, depth = _tensor(site, 0).shape, _tensor(site, 1).shape[-1]
    count = shape[-1] // depth
    channels = end.shape[-1] // count
    parts = [_similar(builder, x, (*shape[:-1], depth), f"group_{i}") for i in range(count)]
    axis = builder.constant(f"{end.name}/axis", np.array(len(shape) - 1, np.int32))
    builder.operator("SPLIT", [axis, x], parts, numSplits=count)
    ends = []
    for number, part in enumerate(parts):
        own = slice(number * channels, (number + 1) * channels)
        constants = [
            _part(builder, index, _constant(site, position), own)
            for position, index in enumerate(weighted, 1)
        ]
        result = _similar(builder, end.index, (*end.shape[:-1], channels), f"group_{number}")
        builder.operator("CONV_2D", [part, *constants], [result], **_options(site))
        ends.append(result)
    _joined(builder, ends, end)


def _part(builder: Builder, index: int, values: np.ndarray, channels: slice) -> int:
    """Adds a constant with some of the output channels of another."""
    scales = builder.graph.tensors[index].quantization.scale
    return _stored(
        builder, index, values[channels], scales[channels] if len(scales) > 1 else scales
    )


def _stored(
    builder: Builder, index: int, values: np.ndarray, scales: np.ndarray | None = None
) -> int:
    """Adds a constant like another with other values, and other scales if they are given."""
    source = builder.graph.tensors[index]
    params = source.quantization
    return builder.constant(
        source.name.decode(),
        values,
        scales=params.scale if scales is None else scales,
        axis=params.quantizedDimension,
    )


def _joined(builder: Builder, parts: list[int], end: Tensor) -> None:
    """Concatenates channels, in several steps if they are many."""
    axis = len(end.shape) - 1
    while len(parts) > MOST_PARTS:
        some, parts = parts[:MOST_PARTS], parts[MOST_PARTS:]
        depth = sum(builder.sizes(part)[-1] for part in some)
        joined = _similar(builder, end.index, (*end.shape[:-1], depth), "joined")
        builder.operator("CONCATENATION", some, [joined], axis=axis)
        parts = [joined, *parts]
    builder.operator("CONCATENATION", parts, [end.index], axis=axis)


def unpacked(builder: Builder, site: Site) -> None:
    """Stores weights of 4 bits in a byte each."""
    inputs = _inputs(site)
    weights = builder.graph.tensors[inputs[1]]
    shape = _tensor(site, 1).shape
    q = unpack_nibbles(builder.model.buffers[weights.buffer].data, shape)
    inputs[1] = _stored(builder, inputs[1], q)
    builder.operator(site.operation.kernel, inputs, [site.outputs[0].index], **_options(site))


def as_prelu(builder: Builder, site: Site) -> None:
    """Computes a ReLU or leaky ReLU as a PReLU with one slope."""
    (x,), (end,) = _inputs(site), site.outputs
    slope = site.option("alpha", 0.0)
    unit = builder.constant(
        f"{end.name}/slope",
        np.array([slope != 0], np.int8),
        scales=np.array([slope or 1.0]),
    )
    if len(end.shape) <= MOST_AXES:
        builder.operator("PRELU", [x, unit], [end.index])
        return
    count = (math.prod(end.shape),)
    result = _similar(builder, end.index, count, "flat")
    builder.operator("PRELU", [_reshaped(builder, x, count), unit], [result])
    builder.copy(result, end.index)


def clipped_afterwards(builder: Builder, site: Site) -> None:
    """Clips by operators of their own what a fused ReLU or ReLU6 was to clip."""
    (end,) = site.outputs
    limits = {"MAXIMUM": 0.0, "MINIMUM": 6.0}
    if site.option("fusedActivationFunction") != RELU6:
        del limits["MINIMUM"]
    result = _similar(builder, end.index, end.shape, "unclipped")
    options = _options(site, fusedActivationFunction=NO_ACTIVATION)
    builder.operator(site.operation.kernel, _inputs(site), [result], **options)
    for code, limit in limits.items():
        clipped = _similar(builder, end.index, end.shape, code.lower())
        bound = end.quantize(np.array(limit))
        limit_index = builder.constant(f"{end.name}/{limit:g}", bound, scales=np.array([end.scale]))
        builder.operator(code, [result, limit_index], [clipped])
        result = clipped
    builder.graph.operators[-1].outputs[:] = end.index


@dataclasses.dataclass(frozen=True)
class TransposedAxis:
    """Height or width of a transposed convolution.

    Args:
        stride: the stride.
        window: size of the kernel.
        before: how many of the first outputs padding removes.
        size: size of the output.
        usual: size of the output that stride and padding give by themselves.
        full: size of the output without padding.
    """

    stride: int
    window: int
    before: int
    size: int
    usual: int
    full: int

    @property
    def missing(self) -> int:
        """How many zeros behind the input give outputs that it does not reach."""
        return max(-(-(self.before + self.size - self.full) // self.stride), 0)


def transposed_axes(site: Site) -> tuple[TransposedAxis, TransposedAxis]:
    """Returns height and width of a TRANSPOSE_CONV."""
    strides = site.option("strideH"), site.option("strideW")
    is_valid = site.option("padding") == schema.Padding.VALID

    def sizes(axis: int) -> TransposedAxis:
        size, stride = site.outputs[0].shape[axis], strides[axis - 1]
        count, window = _tensor(site, 2).shape[axis], _tensor(site, 1).shape[axis]
        full = count * stride + max(window - stride, 0)
        if is_valid:
            return TransposedAxis(stride, window, 0, size, full, full)
        removed = max((-(-size // stride) - 1) * stride + window - size, 0)
        return TransposedAxis(stride, window, removed // 2, size, count * stride, full)

    return sizes(1), sizes(2)


def cropped_transpose_conv(builder: Builder, site: Site) -> None:
    """Computes a transposed convolution without padding, and takes from it what is wanted.

    Zeros behind the input make it larger where more is wanted, and zeros around a kernel as large
    as the stride.
    """
    _, weights, x, *bias = _inputs(site)
    (end,) = site.outputs
    axes = transposed_axes(site)
    batch, *sizes, channels = _tensor(site, 2).shape
    missing = [axis.missing for axis in axes]
    if any(missing):
        more = [size + axis.missing for size, axis in zip(sizes, axes, strict=True)]
        padded = _similar(builder, x, (batch, *more, channels), "padded")
        pads = np.array([(0, zeros) for zeros in (0, *missing, 0)], np.int32)
        builder.operator("PAD", [x, builder.constant(f"{end.name}/pads", pads)], [padded])
        x = padded
    short = [max(axis.stride - axis.window, 0) for axis in axes]
    if any(short):
        around = [(0, zeros) for zeros in (0, *short, 0)]
        weights = _stored(builder, weights, np.pad(_constant(site, 1), around))
    high, wide = (axis.full + axis.missing * axis.stride for axis in axes)
    full_shape = (batch, high, wide, end.shape[3])
    result = _similar(builder, end.index, full_shape, "whole")
    shape, begin, size = (
        builder.constant(f"{end.name}/{name}", np.array(values, np.int32))
        for name, values in (
            ("whole_shape", full_shape),
            ("begin", [0, *(axis.before for axis in axes), 0]),
            ("size", end.shape),
        )
    )
    options = _options(site, padding=schema.Padding.VALID)
    builder.operator("TRANSPOSE_CONV", [shape, weights, x, *bias], [result], **options)
    builder.operator("SLICE", [result, begin, size], [end.index])


def bytewise(builder: Builder, site: Site) -> None:
    """Looks up the high and the low bytes of 16-bit entries in two tables, and adds them."""
    (end,) = site.outputs
    positions = _inputs(site)[1]
    table = _constant(site, 0).astype(np.int32)
    high, low = table >> 8, table & 255
    parts = []
    for name, values, weight, zero_point in (("high", high, 256, 0), ("low", low, 1, -128)):
        params = QuantParams(np.float32(weight * end.scale), zero_point)
        codes_of_table = (values + zero_point).astype(np.int8)
        stored = builder.constant(f"{end.name}/{name}", codes_of_table, params)
        codes = builder.tensor(f"{end.name}/{name}_codes", end.shape, "int8", params)
        builder.operator("GATHER", [stored, positions], [codes], **_options(site))
        parts.append(_similar(builder, end.index, end.shape, name))
        builder.operator("QUANTIZE", [codes], [parts[-1]])
    builder.operator("ADD", parts, [end.index], potScaleInt16=False)
