"""Converts matrix products and convolutions with weights or constants to Keras layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike, NDArray

from keras_qat.graph.calls import Call, Graph, Value, flatten_values
from keras_qat.graph.operations import get_argument, get_kind, get_operands, read_array
from keras_qat.graph.sizes import find_sizes
from keras_qat.helper_layers.keras_variants import COMPUTED
from keras_qat.helper_layers.operations import WeightTensor
from keras_qat.keras2.backend import keras, layers
from keras_qat.keras2.layers_and_models import clone
from keras_qat.lowering.activations import get_weights_without_activation, make_activation
from keras_qat.lowering.builder import LoweringContext, PartsBuilder, replace_calls
from keras_qat.lowering.expand_call import make_symbol, require, trace_in_place
from keras_qat.ops.movement import read_window
from keras_qat.ops.slicing import GATHER_ARGUMENTS

SUMS = {"bias_add": ("value", "bias"), "add": ("x", "y")}
"""Maps an addition to the names of its two terms."""

_OF_CONVOLUTIONS = ("input", "filters", "strides", "padding", "data_format", "dilations")
_OF_MATMUL = ("a", "b", "transpose_a", "transpose_b", "adjoint_a", "adjoint_b")

OF_DEPTHWISE = (
    *("strides", "padding", "dilation_rate", "depth_multiplier"),
    *("depthwise_regularizer", "depthwise_constraint"),
)
OF_POINTWISE = ("use_bias", "bias_regularizer", "bias_constraint", "activity_regularizer")
"""Options that `split_separable` copies from a separable convolution to a 1x1 convolution."""


class _Product(NamedTuple):
    """A matrix product or convolution of `x` and `kernel`, and the Keras layer that computes it."""

    x: Value
    kernel: Any
    layer_class: type[layers.Layer]
    options: dict[str, Any]


def make_weighted_layers(graph: Graph, context: LoweringContext) -> Graph:
    """Convert each product with a weight to a Keras layer, together with its bias."""
    consumers, outputs = graph.consumers(), set(flatten_values(graph.outputs))
    shared, replaced = _find_shared_weights(graph), dict[Call, list[Call]]()
    for call in graph.calls:
        product = _read_product(call)
        if product is None or not _is_weight(product.kernel):
            continue
        x, kernel, layer_class, options = product
        source = _get_source(kernel)
        if source in shared or not (layer_class in COMPUTED or _is_plain(source)):
            continue
        end, bias = call, None
        readers = consumers[call.output]
        if len(readers) == 1 and call.output not in outputs:
            bias = _find_bias(readers[0], call.output)
            bias = None if bias is None or _get_source(bias) in shared else bias
            end = readers[0] if bias is not None else call
        weights = [weight for weight in (kernel, bias) if weight is not None]
        variables = [context.get_weights(_get_source(weight)) for weight in weights]
        if _is_plain(source):
            is_depthwise = layer_class is layers.DepthwiseConv2D
            options.update(_get_settings("depthwise" if is_depthwise else "kernel", kernel))
        else:  # Keras lists the bias before the weights of inner layers.
            layer_class, variables = COMPUTED[layer_class], variables[::-1]
            options["source"] = clone(source)
        parts = PartsBuilder(end, context)
        layer = parts.new(
            "",
            layer_class,
            **options,
            **({} if bias is None else _get_settings("bias", bias)),
            use_bias=bias is not None,
            trainable=all(_get_source(weight).trainable for weight in weights),
            weights=[variable for of_weight in variables for variable in of_weight],
        )
        replaced[call] = []
        (part,) = parts.end(layer, x)
        replaced[end] = [dataclasses.replace(part, source=call.source, within=call.within)]
    return replace_calls(graph, replaced)


def split_product(call: Call, context: LoweringContext) -> list[Call]:
    """Replace a product with a constant by a layer with a frozen weight.

    If the kernel of a convolution is a tensor, replace the convolution by a matrix product of image
    patches and the kernel.
    """
    product = _read_product(call)
    if product is None or not call.output.is_float:
        return []
    if isinstance(product.kernel, Value):
        compute = partial(_multiply_patches, product, call.output.shape)
        return trace_in_place(call, compute, context)
    parts = PartsBuilder(call, context)
    frozen = _freeze(product.kernel)
    layer = parts.new("", product.layer_class, **product.options, use_bias=False, **frozen)
    return parts.end(layer, product.x)


def _freeze(values: ArrayLike) -> dict[str, Any]:
    """Return the options `weights` and `trainable` for a Keras layer with a constant weight."""
    weight = tf.Variable(np.asarray(values, np.float32), trainable=False)
    return {"weights": [weight], "trainable": False}


def _multiply_patches(product: _Product, shape: Sequence[int | None]) -> tf.Tensor:
    x, kernel, layer_class, options = product
    require(layer_class is layers.Conv2D and options["groups"] == 1 and None not in shape[1:])
    y, sizes = make_symbol(x), list(kernel.shape)
    windows = [options[name] for name in ("kernel_size", "strides", "dilation_rate")]
    if any(tuple(window) != (1, 1) for window in windows[:2]):
        windows, padding = [[1, *window, 1] for window in windows], options["padding"].upper()
        y = tf.image.extract_patches(y, *windows, padding, name="patches")
    matrix = tf.reshape(make_symbol(kernel), [math.prod(sizes[:3]), sizes[3]], name="matrix")
    return tf.matmul(y, matrix)


def make_constant_weight(call: Call, context: LoweringContext) -> list[Call]:
    """Replace a constant argument with more than two axes by a tensor.

    The tensor is the output of a `WeightTensor` layer, which is not trained.
    """
    arguments = [*call.args, *call.kwargs.values()]
    constants = [leaf for leaf in arguments if getattr(read_array(leaf), "ndim", 0) > 2]
    if len(call.inputs) != 1 or not call.inputs[0].is_float or len(constants) != 1:
        return []
    parts, shape = PartsBuilder(call, context), np.shape(constants[0])
    layer = parts.new("constant", WeightTensor, [shape], frozen=[0], **_freeze(constants[0]))
    tensor = parts.add(layer, call.inputs[0], shape=shape)
    args = [tensor if leaf is constants[0] else leaf for leaf in call.args]
    kwargs = {n: tensor if leaf is constants[0] else leaf for n, leaf in call.kwargs.items()}
    return parts.end(call.layer, *args, kwargs=kwargs)


def make_embedding(call: Call, context: LoweringContext) -> list[Call]:
    """Replace `tf.gather` from a constant table by an Embedding that does not train."""
    table, indices, *options = get_operands(call, *GATHER_ARGUMENTS)
    table, shape = read_array(table), call.output.shape[1:]
    if table is None or not table.ndim or any(options) or not call.output.is_float:
        return []
    if not isinstance(indices, Value) or not indices.shape or None in shape:
        return []
    rows, parts = table.reshape(len(table), -1), PartsBuilder(call, context)
    name, frozen = "" if table.ndim == 2 else "rows", _freeze(rows)
    embedding = parts.new(name, layers.Embedding, *rows.shape, dtype="float32", **frozen)
    if table.ndim == 2:
        return parts.end(embedding, indices)
    entries = parts.add(embedding, indices, shape=(*indices.shape, rows.shape[1]))
    return parts.end(parts.new("", type(call.layer), tf.reshape), entries, [-1, *shape])


def split_separable(call: Call, context: LoweringContext) -> list[Call]:
    """Split a separable convolution into depthwise convolution, 1x1 convolution and activation."""
    layer, parts = call.layer, PartsBuilder(call, context)
    kinds = layers.DepthwiseConv2D, layers.Conv2D
    if isinstance(layer, layers.SeparableConv1D):
        kinds = layers.DepthwiseConv1D, layers.Conv1D
    shared = {name: getattr(layer, name) for name in ("data_format", "trainable")}
    shared["dtype"] = layer.dtype_policy
    options, padding = {name: getattr(layer, name) for name in OF_DEPTHWISE}, []
    if layer.padding == "causal":  # DepthwiseConv1D does not support causal padding.
        before = (layer.kernel_size[0] - 1) * layer.dilation_rate[0]
        padding = [parts.new("pad", layers.ZeroPadding1D, (before, 0))]
        options["padding"] = "valid"
    depthwise_kernel, *pointwise_weights = get_weights_without_activation(layer, context)
    options |= {"use_bias": False, "weights": [depthwise_kernel], **shared}
    depthwise = parts.new("depthwise", kinds[0], layer.kernel_size, **options)
    pointwise = parts.new(
        "",
        kinds[1],
        layer.filters,
        1,
        **{name: getattr(layer, name) for name in OF_POINTWISE},
        kernel_regularizer=layer.pointwise_regularizer,
        kernel_constraint=layer.pointwise_constraint,
        weights=pointwise_weights,
        **shared,
    )
    is_linear = layer.activation in (None, keras.activations.linear)
    last = [pointwise] if is_linear else [pointwise, make_activation(parts)]
    return parts.chain(*padding, depthwise, *last)


def _find_shared_weights(graph: Graph) -> set[WeightTensor]:
    """Return the weights that several operations read. They cannot belong to a single layer."""
    operations: dict[WeightTensor, set[layers.Layer]] = {}
    for call in graph.calls:
        for value in filter(_is_weight, call.inputs):
            operations.setdefault(_get_source(value), set()).add(call.layer)
    return {source for source, reading in operations.items() if len(reading) > 1}


def _get_source(weight: Value) -> WeightTensor:
    assert weight.producer is not None
    return weight.producer.layer


def _get_settings(prefix: str, weight: Value) -> dict[str, Any]:
    layer = _get_source(weight)
    return {
        f"{prefix}_regularizer": layer.regularizers[0],
        f"{prefix}_constraint": layer.constraints[0],
    }


def _is_plain(source: WeightTensor) -> bool:
    """Return True for a trainable weight, but not for a tensor computed from weights."""
    return source.expression is None and not source.frozen


def _is_weight(value: object) -> bool:
    """Return True if a value is a weight, or is computed from weights only."""
    producer = value.producer if isinstance(value, Value) else None
    return producer is not None and isinstance(producer.layer, WeightTensor)


def _find_bias(call: Call, product: Value) -> Value | None:
    """Return the bias, one value per channel, that `call` adds to `product`. Or return None."""
    if get_kind(call) not in SUMS:
        return None
    x, bias = get_operands(call, *SUMS[get_kind(call)])
    if bias is product:
        x, bias = bias, x
    is_last = not str(get_argument(call, "data_format")).startswith("NC")
    if x is not product or not is_last or not _is_weight(bias) or not _is_plain(_get_source(bias)):
        return None
    return bias if bias.shape == product.shape[-1:] else None


def _read_product(call: Call) -> _Product | None:
    read = PRODUCTS.get(get_kind(call))
    return read(call) if read else None


def _read_kernel(kernel: object) -> Any:
    return kernel if isinstance(kernel, Value) else read_array(kernel)


def _read_convolution(call: Call, depthwise: bool = False) -> _Product | None:
    x, kernel, strides, padding, layout, dilation = get_operands(call, *_OF_CONVOLUTIONS)
    kernel = _read_kernel(kernel)
    if kernel is None or None in kernel.shape:
        return None
    axes, padding = len(kernel.shape) - 2, padding or "VALID"  # The default of tf.nn.convolution.
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
        options["depth_multiplier"] = last
        return _Product(x, kernel, layers.DepthwiseConv2D, options)
    options |= {"filters": last, "groups": groups}
    return _Product(x, kernel, layers.Conv1D if axes == 1 else layers.Conv2D, options)


def _read_transposed_convolution(call: Call) -> _Product | None:
    """Read a transposed convolution. Return None if no Keras layer has the same output size."""
    x, kernel, strides, padding, layout, dilations = get_operands(call, *_OF_CONVOLUTIONS)
    kernel = _read_kernel(kernel)
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
    known: Sequence[Any] = call.output.shape[1:-1]
    if None in known:
        known = (find_sizes(get_argument(call, "output_shape")) or [])[1:-1]
    if sizes != list(known):
        return None
    options = {"kernel_size": size, "strides": steps, "padding": padding}
    layer_class = layers.Conv1DTranspose if axes == 1 else layers.Conv2DTranspose
    return _Product(x, kernel, layer_class, {**options, "filters": kernel.shape[-2]})


def _make_dense(x: object, kernel: Value | NDArray[np.generic] | None) -> _Product | None:
    """Read `x @ kernel`. Return None if `kernel` is neither a weight nor a constant."""
    if kernel is None or (isinstance(kernel, Value) and not _is_weight(kernel)):
        return None
    if not isinstance(x, Value) or len(kernel.shape) != 2 or x.shape[-1:] != kernel.shape[:1]:
        return None
    return _Product(x, kernel, layers.Dense, {"units": kernel.shape[1]})


def _read_matmul(call: Call) -> _Product | None:
    x, kernel, *flags = get_operands(call, *_OF_MATMUL)
    is_turned, kernel = flags[1] or flags[3], _read_kernel(kernel)
    if flags[0] or flags[2] or (is_turned and isinstance(kernel, Value)):
        return None
    return _make_dense(x, kernel.T if is_turned and kernel is not None else kernel)


def _read_tensordot(call: Call) -> _Product | None:
    x, kernel, axes = get_operands(call, "a", "b", "axes")
    last = len(x.shape) - 1 if isinstance(x, Value) else 0
    flat = [axis for axis in tf.nest.flatten(axes) if isinstance(axis, int)]
    return _make_dense(x, _read_kernel(kernel)) if flat in ([1], [last, 0], [-1, 0]) else None


CONVOLUTIONS: dict[str, Callable[[Call], _Product | None]] = {
    **dict.fromkeys(("conv1d", "conv2d", "convolution"), _read_convolution),
    "depthwise_conv2d": partial(_read_convolution, depthwise=True),
    **dict.fromkeys(("conv1d_transpose", "conv2d_transpose"), _read_transposed_convolution),
}
PRODUCTS = {**CONVOLUTIONS, "matmul": _read_matmul, "tensordot": _read_tensordot}
"""Maps a kind of operation to a function that returns the `_Product` of a call, or None."""
