"""Replaces operators that have a fault on a target by equivalent operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.config.targets.cmsis_nn import find_transposed_axes
from keras_qat.config.targets.target import Target
from keras_qat.config.targets.tflm import MOST_INPUTS
from keras_qat.tflite.builder import Builder
from keras_qat.tflite.reader import FileGraph, Site, Tensor
from keras_qat.tflite.weight_packing import unpack_nibbles

Shape = tuple[int, ...]

NO_ACTIVATION = schema.ActivationFunctionType.NONE
RELU6 = schema.ActivationFunctionType.RELU6

MOST_AXES = 4


def rewrite_for(target: Target) -> Callable[[Builder], None]:
    """Returns a function that replaces the operators of a file if they have a fault on `target`."""

    def rewrite(builder: Builder) -> None:
        graph, operators = FileGraph(builder.model), builder.graph.operators
        builder.graph.operators = []
        for operation, operator in zip(graph.operations, operators, strict=True):
            site = Site(graph, operation)
            fault = target.fault(site)
            if fault is None or fault.form is None:
                builder.graph.operators.append(operator)
            else:
                form = REWRITES[fault.form] if isinstance(fault.form, str) else fault.form
                form(builder, site)
        builder.drop_unused()

    return rewrite


def _get_inputs(site: Site) -> list[int]:
    return list(site.operation.inputs)


def _get_options(site: Site, **changed: object) -> dict[str, Any]:
    return {**vars(site.graph.options(site.operation)), **changed}


def _get_constant(site: Site, index: int) -> NDArray:
    values = site.constant(index)
    assert values is not None
    return values


def _add_similar(builder: Builder, index: int, shape: tuple[int | None, ...], suffix: str) -> int:
    """Add a tensor like the tensor `index`, with another shape and a suffix to its name."""
    return builder.similar(index, shape, f"{builder.graph.tensors[index].name.decode()}/{suffix}")


def _add_reshape(builder: Builder, source: int, shape: Shape) -> int:
    target = _add_similar(builder, source, shape, "reshaped")
    builder.copy(source, target)
    return target


def _add_similar_constant(
    builder: Builder, index: int, values: NDArray, scales: NDArray | None = None
) -> int:
    """Add a constant with the name and the scales of the constant `index`, but new values."""
    source = builder.graph.tensors[index]
    params = source.quantization
    return builder.constant(
        source.name.decode(),
        values,
        scales=params.scale if scales is None else scales,
        axis=params.quantizedDimension,
    )


def _add_reshaped(builder: Builder, site: Site, inputs: list[int], shape: Shape) -> None:
    """Add the operator of `site` with reshaped `inputs`. Restore the shape of its result."""
    (end,) = site.outputs
    result = _add_similar(builder, end.index, shape, "reshaped")
    builder.operator(site.operation.kernel, inputs, [result], **_get_options(site))
    builder.copy(result, end.index)


def multiply_matrix(builder: Builder, site: Site) -> None:
    """Merges the first axes of a FULLY_CONNECTED's input: [a, b, c] becomes [a * b, c]."""
    x, *weights = _get_inputs(site)
    (end,) = site.outputs
    rows = math.prod(end.shape[:-1])
    x = _add_reshape(builder, x, (rows, site.shape()[-1]))
    result = _add_similar(builder, end.index, (rows, end.shape[-1]), "rows")
    options = _get_options(site, keepNumDims=False)
    builder.operator("FULLY_CONNECTED", [x, *weights], [result], **options)
    builder.copy(result, end.index)


def flatten(builder: Builder, site: Site) -> None:
    """Flattens the inputs of an elementwise operator, and restores the shape of its result."""
    inputs = [
        _add_reshape(builder, x.index, (math.prod(x.shape),)) if x.shape else x.index
        for x in site.tensors[:-1]
    ]
    _add_reshaped(builder, site, inputs, (math.prod(site.outputs[0].shape),))


def drop_batch_axis(builder: Builder, site: Site) -> None:
    """Removes the first axis (size 1) of an operator's tensors."""
    inputs, (end,) = _get_inputs(site), site.outputs
    for index, tensor in enumerate(site.tensors[:-1]):
        if len(tensor.shape) == len(end.shape):
            inputs[index] = _add_reshape(builder, tensor.index, tensor.shape[1:])
    if site.operation.kernel == "TRANSPOSE":
        inputs[1] = builder.constant(f"{end.name}/order", _get_constant(site, 1)[1:] - 1)
    _add_reshaped(builder, site, inputs, end.shape[1:])


def convolve_column(builder: Builder, site: Site) -> None:
    """Swaps height and width of a convolution's tensors, and restores the shape of the result."""
    x, weights, *bias = _get_inputs(site)
    (end,) = site.outputs

    def swap(shape: Shape) -> Shape:
        return shape[0], shape[2], shape[1], shape[3]

    x = _add_reshape(builder, x, swap(site.shape()))
    column = _add_similar(builder, weights, swap(site.shape(1)), "column")
    builder.graph.tensors[column].buffer = builder.graph.tensors[weights].buffer
    result = _add_similar(builder, end.index, swap(end.shape), "column")
    options = _get_options(site)
    for option in ("stride{}", "dilation{}Factor"):
        high, wide = option.format("H"), option.format("W")
        options[high], options[wide] = options[wide], options[high]
    builder.operator("CONV_2D", [x, column, *bias], [result], **options)
    builder.copy(result, end.index)


def average_column(builder: Builder, site: Site) -> None:
    """Appends an axis of size 1 to a MEAN's input.

    XNNPACK's sums overflow only if the last axis is averaged. The new last axis is not averaged.
    """
    x, axes = _get_inputs(site)
    (end,) = site.outputs

    def append_axis(shape: Shape) -> tuple[int | None, ...]:
        return (*(None if size < 0 else size for size in shape), 1)

    last = builder.constant(f"{end.name}/last", np.array(-1, np.int32))
    column = _add_similar(builder, x, append_axis(site.shape()), "column")
    builder.operator("EXPAND_DIMS", [x, last], [column])
    result = _add_similar(builder, end.index, append_axis(end.shape), "column")
    builder.operator("MEAN", [column, axes], [result], **_get_options(site))
    builder.operator("SQUEEZE", [result], [end.index], squeezeDims=[len(end.shape)])


def split_groups(builder: Builder, site: Site) -> None:
    """Convolves each group of channels separately."""
    x, *constants = _get_inputs(site)
    (end,) = site.outputs
    shape, depth = site.shape(), site.shape(1)[-1]
    count = shape[-1] // depth
    channels = end.shape[-1] // count
    groups = [_add_similar(builder, x, (*shape[:-1], depth), f"group_{i}") for i in range(count)]
    axis = builder.constant(f"{end.name}/axis", np.array(len(shape) - 1, np.int32))
    builder.operator("SPLIT", [axis, x], groups, numSplits=count)
    results = []
    for number, group in enumerate(groups):
        inputs = [group]
        chosen = slice(number * channels, (number + 1) * channels)
        for position, index in enumerate(constants, 1):
            scales = builder.graph.tensors[index].quantization.scale
            scales = scales[chosen] if len(scales) > 1 else scales
            values = _get_constant(site, position)[chosen]
            inputs.append(_add_similar_constant(builder, index, values, scales))
        results.append(
            _add_similar(builder, end.index, (*end.shape[:-1], channels), f"group_{number}")
        )
        builder.operator("CONV_2D", inputs, results[-1:], **_get_options(site))
    _concatenate(builder, results, end, len(end.shape) - 1)


def split_concatenation(builder: Builder, site: Site) -> None:
    """Concatenates many tensors in several steps of at most `MOST_INPUTS` tensors."""
    (end,) = site.outputs
    _concatenate(builder, _get_inputs(site), end, site.option("axis") % len(end.shape))


def _concatenate(builder: Builder, tensors: list[int], end: Tensor, axis: int) -> None:
    while len(tensors) > MOST_INPUTS:
        first, tensors = tensors[:MOST_INPUTS], tensors[MOST_INPUTS:]
        size = sum(builder.sizes(tensor)[axis] for tensor in first)
        shape = (*end.shape[:axis], size, *end.shape[axis + 1 :])
        result = _add_similar(builder, end.index, shape, "concatenated")
        builder.operator("CONCATENATION", first, [result], axis=axis)
        tensors = [result, *tensors]
    builder.operator("CONCATENATION", tensors, [end.index], axis=axis)


def unpack_int4(builder: Builder, site: Site) -> None:
    """Stores 4-bit weights in one byte each."""
    inputs = _get_inputs(site)
    packed = builder.model.buffers[builder.graph.tensors[inputs[1]].buffer].data
    inputs[1] = _add_similar_constant(builder, inputs[1], unpack_nibbles(packed, site.shape(1)))
    builder.operator(site.operation.kernel, inputs, [site.outputs[0].index], **_get_options(site))


def replace_by_prelu(builder: Builder, site: Site) -> None:
    """Computes a ReLU or leaky ReLU as a PReLU with one slope."""
    (x,), (end,) = _get_inputs(site), site.outputs
    slope = site.option("alpha", 0.0)
    values, scales = np.array([np.sign(slope)], np.int8), np.array([abs(slope) or 1.0])
    unit = builder.constant(f"{end.name}/slope", values, scales=scales)
    if len(end.shape) <= MOST_AXES:
        builder.operator("PRELU", [x, unit], [end.index])
        return
    count = (math.prod(end.shape),)
    result = _add_similar(builder, end.index, count, "flat")
    builder.operator("PRELU", [_add_reshape(builder, x, count), unit], [result])
    builder.copy(result, end.index)


def clip_afterwards(builder: Builder, site: Site) -> None:
    """Replaces a fused ReLU or ReLU6 by MAXIMUM and MINIMUM."""
    (end,) = site.outputs
    limits = {"MAXIMUM": 0.0, "MINIMUM": 6.0}
    if site.option("fusedActivationFunction") != RELU6:
        del limits["MINIMUM"]
    result = _add_similar(builder, end.index, end.shape, "unclipped")
    options = _get_options(site, fusedActivationFunction=NO_ACTIVATION)
    builder.operator(site.operation.kernel, _get_inputs(site), [result], **options)
    for code, limit in limits.items():
        clipped = _add_similar(builder, end.index, end.shape, code.lower())
        bound = end.quantize(np.array(limit))
        limit_index = builder.constant(f"{end.name}/{limit:g}", bound, scales=np.array([end.scale]))
        builder.operator(code, [result, limit_index], [clipped])
        result = clipped
    builder.graph.operators[-1].outputs[:] = end.index


def crop_transpose_conv(builder: Builder, site: Site) -> None:
    """Computes a transposed convolution without padding, and slices its result.

    If the result is too small, zeros are appended to the input. If the kernel is smaller than the
    stride, zeros are appended to the kernel.
    """
    _, weights, x, *bias = _get_inputs(site)
    (end,) = site.outputs
    axes = find_transposed_axes(site)
    batch, *sizes, channels = site.shape(2)
    missing = [axis.missing for axis in axes]
    if any(missing):
        padded_sizes = [size + axis.missing for size, axis in zip(sizes, axes, strict=True)]
        padded = _add_similar(builder, x, (batch, *padded_sizes, channels), "padded")
        pads = np.array([(0, zeros) for zeros in (0, *missing, 0)], np.int32)
        builder.operator("PAD", [x, builder.constant(f"{end.name}/pads", pads)], [padded])
        x = padded
    short = [max(axis.stride - axis.window, 0) for axis in axes]
    if any(short):
        around = [(0, zeros) for zeros in (0, *short, 0)]
        weights = _add_similar_constant(builder, weights, np.pad(_get_constant(site, 1), around))
    high, wide = (axis.full + axis.missing * axis.stride for axis in axes)
    full_shape = (batch, high, wide, end.shape[3])
    result = _add_similar(builder, end.index, full_shape, "full")
    shape, begin, size = (
        builder.constant(f"{end.name}/{name}", np.array(values, np.int32))
        for name, values in (
            ("full_shape", full_shape),
            ("begin", [0, *(axis.before for axis in axes), 0]),
            ("size", end.shape),
        )
    )
    options = _get_options(site, padding=schema.Padding.VALID)
    builder.operator("TRANSPOSE_CONV", [shape, weights, x, *bias], [result], **options)
    builder.operator("SLICE", [result, begin, size], [end.index])


def split_bytes(builder: Builder, site: Site) -> None:
    """Replaces a lookup in a 16-bit table by lookups of high and low bytes, and an ADD."""
    (end,) = site.outputs
    indices = _get_inputs(site)[1]
    table = _get_constant(site, 0).astype(np.int32)
    terms = []
    for name, values, weight, zero_point in (
        ("high", table >> 8, 256, 0),
        ("low", table & 255, 1, -128),
    ):
        params = QuantParams(np.float32(weight * end.scale), zero_point)
        entries = (values + zero_point).astype(np.int8)
        stored = builder.constant(f"{end.name}/{name}", entries, params)
        looked_up = builder.tensor(f"{end.name}/{name}_bytes", end.shape, "int8", params)
        builder.operator("GATHER", [stored, indices], [looked_up], **_get_options(site))
        terms.append(_add_similar(builder, end.index, end.shape, name))
        builder.operator("QUANTIZE", [looked_up], [terms[-1]])
    builder.operator("ADD", terms, [end.index], potScaleInt16=False)


REWRITES: dict[str, Callable[[Builder, Site], None]] = {
    function.__name__: function
    for function in (
        *(multiply_matrix, flatten, drop_batch_axis, convolve_column, average_column),
        *(split_groups, unpack_int4, replace_by_prelu, clip_afterwards, crop_transpose_conv),
        *(split_bytes, split_concatenation),
    )
}
"""Maps the name of a rewrite, as in `Fault(form=...)`, to its function."""
