"""Exports to ONNX, with QuantizeLinear and DequantizeLinear around quantized tensors."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from keras_qat.export.saved_model import make_inference_module
from keras_qat.integer_graph.resolve import resolve_to_export
from keras_qat.io.atomic_files import write_contents
from keras_qat.keras2.backend import keras, one_at_a_time, swap_attributes
from keras_qat.keras2.layers_and_models import list_layers
from keras_qat.ops.weights import Weights
from keras_qat.training.readiness import check_before_export
from keras_qat.version import __version__

Activations = Literal["uint8", "int8"]

CHANNEL_AXIS = {"Conv": 0, "ConvTranspose": 1, "MatMul": 1, "Gemm": 1}
"""Operation with int8 weights -> axis of the output channels."""


@one_at_a_time
def export_onnx(
    model: keras.Model,
    path: str | os.PathLike[str] | None = None,
    *,
    input_range: tuple[float, float] | None = None,
    opset: int = 17,
    activations: Activations | None = None,
) -> bytes:
    """Exports a trained quantization-aware model to ONNX in QDQ form.

    Runtimes that support this form use integer kernels. Other runtimes compute in float with the
    same levels. Weights are int8 with one scale per output channel. Inputs and outputs are float,
    and have the layout and names of the Keras model.

    Args:
        model: the model.
        path: the path of the file, or None. An existing file is only replaced at the end.
        input_range: minimum and maximum of inputs without a quantizer, as in `recipes.contrib`.
            Without it, such inputs and the layers that read them are float.
        opset: version of ONNX's operations, 13 or later.
        activations: type of the activations. "uint8" has int32 biases. "int8", for TensorRT, has
            float biases with the values of int32 biases. TensorRT also requires zero points of 0:
            use `recipes.symmetric()`. The default is "int8" for recipes with symmetric activations,
            and otherwise "uint8".

    Returns:
        The file's contents.

    Raises:
        ImportError: without the extra: `pip install 'keras-qat[onnx]'`.
        ValueError: if the model is not quantized, a quantizer has no usable range, activations
            have 16 bits, or `activations` is another type.
        OSError: if `path` cannot be written.

    Example:
        >>> keras_qat.export_onnx(qat, "model.onnx")
    """
    try:
        import onnx
        import tf2onnx
    except ImportError as error:
        raise ImportError(
            "Exporting to ONNX needs the packages onnx and tf2onnx: pip install 'keras-qat[onnx]'"
        ) from error
    if activations is not None and activations not in get_args(Activations):
        raise ValueError(f"activations={activations!r}: use 'uint8' or 'int8'.")
    check_before_export(model, path, but_not=(".tflite", ".cc", ".pb"))
    graph = resolve_to_export(model, input_range=input_range)
    graph.origin.warn()
    if graph.origin.is_16_bit:
        raise ValueError("16-bit activations cannot be exported to ONNX: tf2onnx supports 8 bits.")
    recipe = graph.origin.recipe
    if activations is None:
        is_signed = recipe is not None and recipe.activations.symmetric
        activations = "int8" if is_signed else "uint8"
    module = make_inference_module(graph, for_onnx=True)
    layers = {inner for node in graph.nodes for inner in list_layers(node.call.layer)}
    with contextlib.ExitStack() as scopes:
        for layer in layers:
            # Keras convolves groups in a nested function, which tf2onnx does not support. This
            # operation infers the groups from the kernel's shape.
            if getattr(layer, "groups", 1) > 1 and hasattr(layer, "kernel_size"):
                scopes.enter_context(swap_attributes(layer, groups=1))
        for node in graph.nodes:
            # onnxruntime 1.31 aborts if there is quantization in a loop.
            is_recurrent = node.weights is not None and node.weights.recurrent is not None
            if is_recurrent and node.call.inputs[0].shape[1] is not None:
                scopes.enter_context(swap_attributes(node.call.layer, unroll=True))
        proto, _ = tf2onnx.convert.from_function(
            module.serve, input_signature=module.serve.input_signature, opset=opset
        )
    _store_captured(proto.graph, module.serve.get_concrete_function(), graph.inputs.keys())
    weights = [node.weights for node in graph.nodes if node.weights is not None]
    _store_weights(proto.graph, weights, integer_biases=activations == "uint8")
    if activations == "int8":
        _make_signed(proto.graph)
    by_name = {output.name: output for output in proto.graph.output}
    _replace(proto.graph.output, [by_name[name] for name in graph.outputs])
    config = json.dumps(None if recipe is None else recipe.to_config(), sort_keys=True)
    onnx.helper.set_model_props(proto, {"keras_qat": __version__, "recipe": config})
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        reason = str(error).split("\n")[0]
        raise ValueError(
            f"'{graph.name}' cannot be exported to ONNX, because tf2onnx does not support all "
            f"of its operations: {reason}. Use override(..., quantize=False) for such layers, or "
            f"another format."
        ) from error
    contents: bytes = proto.SerializeToString()
    return write_contents(contents, path)


def _store_weights(graph: Any, layers: list[Weights], integer_biases: bool) -> None:
    """Replace float weights and biases of a graph by integers and DequantizeLinear.

    tf2onnx reorders the axes of weights and renames them, so layers are recognized by the values of
    their weights.
    """
    from onnx import numpy_helper

    floats = {array.name: array for array in graph.initializer}
    producers = {node.output[0]: node for node in graph.node}
    nodes = []
    for node in list(graph.node):
        axis, scales = CHANNEL_AXIS.get(node.op_type, 0), None
        if any(option.name == "transB" and option.i for option in node.attribute):
            axis = 0
        if node.op_type in CHANNEL_AXIS and node.input[1] in floats:
            kernel = numpy_helper.to_array(floats[node.input[1]])
            scales = _find_scales(kernel, axis, layers)
        if scales is not None:
            shape = [-1 if dim == axis else 1 for dim in range(kernel.ndim)]
            q = np.round(kernel / scales.reshape(shape)).astype(np.int8)
            nodes.append(_dequantize(graph, node, 1, q, scales, axis))
            source = producers.get(node.input[0])
            while source is not None and source.op_type in ("Reshape", "Transpose"):
                source = producers.get(source.input[0])
            bias = floats.get(node.input[2]) if integer_biases and len(node.input) > 2 else None
            is_quantized = source is not None and source.op_type == "DequantizeLinear"
            if source is not None and is_quantized and bias is not None:
                scales = scales * numpy_helper.to_array(floats[source.input[1]])
                q = np.round(numpy_helper.to_array(bias) / scales).astype(np.int32)
                nodes.append(_dequantize(graph, node, 2, q, scales, 0))
        nodes.append(node)
    _replace(graph.node, nodes)
    used = {name for node in graph.node for name in node.input}
    _replace(graph.initializer, [array for array in graph.initializer if array.name in used])


def _store_captured(graph: Any, function: Any, inputs: Collection[str]) -> None:
    """Convert constants that tf2onnx treats as inputs of the graph to initializers."""
    from onnx import numpy_helper

    values = {inner.name: outer for outer, inner in function.graph.captures}
    for extra in [entry for entry in graph.input if entry.name not in inputs]:
        graph.initializer.append(numpy_helper.from_array(values[extra.name].numpy(), extra.name))
        graph.input.remove(extra)


def _make_signed(graph: Any) -> None:
    """Change the type of activations from uint8 to int8. Zero points decrease by 128."""
    from onnx import TensorProto, numpy_helper

    zero_points = {node.input[2] for node in graph.node if node.op_type == "QuantizeLinear"}
    for array in graph.initializer:
        if array.name in zero_points and array.data_type == TensorProto.UINT8:
            signed = numpy_helper.to_array(array).astype(np.int16) - 128
            array.CopyFrom(numpy_helper.from_array(signed.astype(np.int8), array.name))


def _replace(field: Any, entries: list[Any]) -> None:
    """Replace the entries of a protocol buffer's field."""
    del field[:]
    field.extend(entries)


def _find_scales(kernel: NDArray, axis: int, layers: list[Weights]) -> NDArray | None:
    """Return the scale of each output channel of a float kernel; None if no layer has it."""
    columns = _sort_columns(kernel, [axis])
    for weights in layers:
        if not weights.name:
            continue
        values = (weights.q * weights.scale).astype(np.float32)
        if not weights.per_channel:
            if np.array_equal(np.sort(values, None), np.sort(kernel, None)):
                return np.full(columns.shape[1], weights.scale.item(), np.float32)
            continue
        sizes = weights.scale.shape
        axes = [axis for axis, size in enumerate(sizes) if size > 1] or [values.ndim - 1]
        candidates = _sort_columns(values, axes)
        if candidates.shape == columns.shape and np.array_equal(candidates, columns):
            return np.broadcast_to(weights.scale.reshape(-1), columns.shape[1]).astype(np.float32)
    return None


def _sort_columns(kernel: NDArray, axes: list[int]) -> NDArray:
    """Return a matrix with a column for each output channel, which holds its weights in order."""
    other_axes = [axis for axis in range(kernel.ndim) if axis not in axes]
    count = int(np.prod([kernel.shape[axis] for axis in axes]))
    return np.sort(kernel.transpose(*other_axes, *axes).reshape(-1, count), axis=0)


def _dequantize(graph: Any, node: Any, index: int, q: NDArray, scales: NDArray, axis: int) -> Any:
    """Replace an input of a node by integers, and return the node that dequantizes them."""
    from onnx import helper, numpy_helper

    name = f"{node.output[0]}/input_{index}"
    arrays = {"quantized": q, "scale": scales, "zero": np.zeros(scales.shape, q.dtype)}
    inputs = [f"{name}/{suffix}" for suffix in arrays]
    for input_name, values in zip(inputs, arrays.values(), strict=True):
        graph.initializer.append(numpy_helper.from_array(values, input_name))
    node.input[index] = name
    return helper.make_node("DequantizeLinear", inputs, [name], name=name, axis=axis)
