"""Turns TensorFlow's convolutions and matrix products with a weight into Keras layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, flatten_values
from keras_qat.graph.operations import get_argument, get_kind, get_operands, read_array
from keras_qat.graph.sizes import find_sizes
from keras_qat.helper_layers.computed_kernels import COMPUTED
from keras_qat.helper_layers.operations import WeightTensor
from keras_qat.keras2.backend import layers
from keras_qat.keras2.layers_and_models import clone
from keras_qat.lowering.builder import LoweringContext, PartsBuilder
from keras_qat.ops.movement import read_window

Product = tuple[Value, Any, Any, dict[str, Any]]
"""Input, kernel (a value or an array), layer class and its options."""


def with_kernels(graph: Graph, context: LoweringContext) -> Graph:
    """Makes a layer of every product with a weight and of the bias added to it."""
    consumers, outputs = graph.consumers(), set(flatten_values(graph.outputs))
    shared, replaced = _read_twice(graph), dict[Call, list[Call]]()
    for call in graph.calls:
        product = _product(call)
        if product is None or not _is_weight(product[1]) or _source(product[1]) in shared:
            continue
        x, kernel, layer_class, options = product
        end, bias = call, None
        readers = consumers[call.output]
        if len(readers) == 1 and call.output not in outputs:
            bias = _bias(readers[0], call.output)
            bias = None if bias is None or _source(bias) in shared else bias
            end = readers[0] if bias is not None else call
        weights = [weight for weight in (kernel, bias) if weight is not None]
        if layer_class not in COMPUTED and not _is_plain(_source(kernel)):
            continue
        source, variables = _source(kernel), [context.weights_of(_source(w)) for w in weights]
        if _is_plain(source):
            is_depthwise = layer_class is layers.DepthwiseConv2D
            options.update(_settings("depthwise" if is_depthwise else "kernel", kernel))
        else:  # Keras lists a layer's own weights, here the bias, before those of layers inside.
            layer_class, variables = COMPUTED[layer_class], variables[::-1]
            options["source"] = clone(source)
        parts = PartsBuilder(end, context)
        layer = parts.new(
            "",
            layer_class,
            **options,
            **({} if bias is None else _settings("bias", bias)),
            use_bias=bias is not None,
            trainable=all(_source(weight).trainable for weight in weights),
            weights=[variable for of_weight in variables for variable in of_weight],
        )
        replaced[call] = []
        (part,) = parts.end(layer, x)
        replaced[end] = [dataclasses.replace(part, source=call.source, within=call.within)]
    calls = [new for call in graph.calls for new in replaced.get(call, [call])]
    return dataclasses.replace(graph, calls=calls)


def split_convolution(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers a convolution with a constant kernel to a layer that does not train.

    One with a weight that others read too, or with another tensor, becomes a product of patches
    with that tensor.
    """
    product = _product(call)
    if product is None:
        return []
    x, kernel, layer_class, options = product
    parts = PartsBuilder(call, context)
    if isinstance(kernel, Value):
        return _of_patches(parts, *product)
    weights = [tf.Variable(kernel.astype(np.float32), trainable=False)]
    layer = parts.new("", layer_class, **options, use_bias=False, trainable=False, weights=weights)
    return parts.end(layer, x)


def _of_patches(
    parts: PartsBuilder, x: Value, kernel: Value, layer_class: Any, options: Mapping[str, Any]
) -> list[Call]:
    shape, operation = parts.call.output.shape, type(parts.call.layer)
    if layer_class is not layers.Conv2D or options["groups"] != 1 or None in shape[1:]:
        return []
    sizes: Any = kernel.shape
    matrix = math.prod(sizes[:3]), sizes[3]
    windows = [options[name] for name in ("kernel_size", "strides", "dilation_rate")]
    if any(tuple(window) != (1, 1) for window in windows[:2]):
        patches = parts.new("patches", operation, tf.image.extract_patches)
        names = ("sizes", "strides", "rates")
        settings = {n: [1, *window, 1] for n, window in zip(names, windows, strict=True)}
        settings["padding"] = options["padding"].upper()
        x = parts.add(patches, x, kwargs=settings, shape=(*shape[:3], matrix[0]))
    flat = parts.new("matrix", operation, tf.reshape)
    kernel = parts.add(flat, kernel, list(matrix), shape=matrix)
    return parts.end(parts.new("", operation, tf.matmul), x, kernel)


def _read_twice(graph: Graph) -> set[WeightTensor]:
    """Returns the weights that several operations read, each of which would train its own copy."""
    operations: dict[WeightTensor, set[Any]] = {}
    for call in graph.calls:
        for value in filter(_is_weight, call.inputs):
            operations.setdefault(_source(value), set()).add(call.layer)
    return {source for source, reading in operations.items() if len(reading) > 1}


def _source(value: Value) -> WeightTensor:
    assert value.producer is not None
    return value.producer.layer


def _settings(weight: str, value: Value) -> dict[str, Any]:
    layer = _source(value)
    return {
        f"{weight}_regularizer": layer.regularizers[0],
        f"{weight}_constraint": layer.constraints[0],
    }


def _is_plain(source: WeightTensor) -> bool:
    """Returns whether a tensor is a single weight that trains, and not computed from others."""
    return source.expression is None and not source.frozen


def _is_weight(value: Any, rank: int | None = None) -> bool:
    """Returns whether a value is a weight, or computed from weights alone, of a rank or any."""
    producer = value.producer if isinstance(value, Value) else None
    is_weight = producer is not None and isinstance(producer.layer, WeightTensor)
    return is_weight and rank in (None, len(value.shape))


def _product(call: Call) -> Product | None:
    read = PRODUCTS.get(get_kind(call))
    return read(call) if read else None


def _bias(call: Call, product: Value) -> Value | None:
    """Returns the weight that a call adds to a product, with one number for each channel."""
    if get_kind(call) not in SUMS:
        return None
    x, bias = get_operands(call, *SUMS[get_kind(call)])
    if bias is product:
        x, bias = bias, x
    is_last = not str(get_argument(call, "data_format")).startswith("NC")
    fits = _is_weight(bias, 1) and _is_plain(_source(bias)) and bias.shape[0] == product.shape[-1]
    return bias if x is product and fits and is_last else None


SUMS = {"bias_add": ("value", "bias"), "add": ("x", "y")}
"""Operation that adds -> its two terms."""


_OF_CONVOLUTIONS = ("input", "filters", "strides", "padding", "data_format", "dilations")


def _convolution(call: Call, depthwise: bool = False) -> Product | None:
    x, kernel, strides, padding, layout, dilation = get_operands(call, *_OF_CONVOLUTIONS)
    kernel = kernel if isinstance(kernel, Value) else read_array(kernel)
    if kernel is None or None in kernel.shape:
        return None
    axes, padding = len(kernel.shape) - 2, padding or "VALID"  # As tf.nn.convolution has it.
    if axes not in (1, 2) or not isinstance(x, Value) or len(x.shape) != axes + 2:
        return None
    sizes = [read_window(1 if option is None else option, axes) for option in (strides, dilation)]
    plain = isinstance(padding, str) and layout in (None, "NHWC", "NWC") and None not in sizes
    *size, channels, last = kernel.shape
    groups, rest = divmod(x.shape[-1] or 0, channels or 1)
    if not plain or (not depthwise and (rest or not groups)):
        return None
    options = {
        "kernel_size": size,
        "strides": sizes[0],
        "dilation_rate": sizes[1],
        "padding": padding.lower(),
    }
    if depthwise:
        return x, kernel, layers.DepthwiseConv2D, {**options, "depth_multiplier": last}
    convolution = layers.Conv1D if axes == 1 else layers.Conv2D
    return x, kernel, convolution, {**options, "filters": last, "groups": groups}


def _transposed(call: Call) -> Product | None:
    """Reads a transposed convolution to the size that the layer has."""
    x, kernel, strides, padding, layout, dilations = get_operands(call, *_OF_CONVOLUTIONS)
    kernel = kernel if isinstance(kernel, Value) else read_array(kernel)
    if kernel is None or (isinstance(kernel, Value) and not _is_weight(kernel)):
        return None
    axes = len(kernel.shape) - 2
    if axes not in (1, 2) or not isinstance(x, Value) or None in x.shape[1:-1]:
        return None
    steps, gaps = (
        read_window(strides, axes),
        read_window(1 if dilations is None else dilations, axes),
    )
    if steps is None or layout not in (None, "NHWC", "NWC") or gaps != (1,) * axes:
        return None
    padding, size = (padding or "SAME").lower(), kernel.shape[:axes]
    more = [0 if padding == "same" else max(k - s, 0) for k, s in zip(size, steps, strict=True)]
    sizes = [(n or 0) * s + m for n, s, m in zip(x.shape[1:-1], steps, more, strict=True)]
    known = list(call.output.shape[1:-1])
    if None in known:
        known = (find_sizes(get_argument(call, "output_shape")) or [])[1:-1]
    if sizes != known:
        return None
    options = {"kernel_size": size, "strides": steps, "padding": padding}
    layer_class = layers.Conv1DTranspose if axes == 1 else layers.Conv2DTranspose
    return x, kernel, layer_class, {**options, "filters": kernel.shape[-2]}


def _dense(x: Any, kernel: Any) -> Product | None:
    if not _is_weight(kernel, 2) or not isinstance(x, Value) or x.shape[-1] != kernel.shape[0]:
        return None
    return x, kernel, layers.Dense, {"units": kernel.shape[1]}


def _matmul(call: Call) -> Product | None:
    x, kernel, *flags = get_operands(call, "a", "b", *_FLAGS)
    return None if any(flags) else _dense(x, kernel)


_FLAGS = ("transpose_a", "transpose_b", "adjoint_a", "adjoint_b", "a_is_sparse", "b_is_sparse")


def _tensordot(call: Call) -> Product | None:
    x, kernel, axes = get_operands(call, "a", "b", "axes")
    last = len(x.shape) - 1 if isinstance(x, Value) else 0
    flat = [axis for axis in tf.nest.flatten(axes) if isinstance(axis, int)]
    return _dense(x, kernel) if flat in ([1], [last, 0], [-1, 0]) else None


CONVOLUTIONS: dict[str, Callable[[Call], Product | None]] = {
    **dict.fromkeys(("conv1d", "conv2d", "convolution"), _convolution),
    "depthwise_conv2d": partial(_convolution, depthwise=True),
    **dict.fromkeys(("conv1d_transpose", "conv2d_transpose"), _transposed),
}
PRODUCTS = {
    **CONVOLUTIONS,
    "matmul": _matmul,
    "tensordot": _tensordot,
}
"""Kind of an operation -> a function that reads the product it computes."""
