"""Export to ONNX, with QuantizeLinear and DequantizeLinear around quantized tensors."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Literal, get_args

import numpy as np

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.export.read_back import report, totals, weights_of
from keras_qat.export.saved_model import inference_module
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.resolve import resolve_to_export
from keras_qat.io.atomic_files import write_contents
from keras_qat.keras2.backend import one_at_a_time, swap_attributes
from keras_qat.keras2.layers_and_models import list_layers
from keras_qat.ops.op import SharedRange
from keras_qat.ops.weights import Weights
from keras_qat.training.readiness import check_before_export
from keras_qat.version import __version__

Activations = Literal["uint8", "int8"]

CHANNEL_AXIS = {"Conv": 0, "ConvTranspose": 1, "MatMul": 1, "Gemm": 1}
"""Operation whose weights are stored in int8 -> axis of the output channels."""


@one_at_a_time
def export_onnx(
    model: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    input_range: tuple[float, float] | None = None,
    opset: int = 17,
    activations: Activations | None = None,
) -> bytes:
    """Exports a trained quantization-aware model to ONNX in QDQ form.

    Runtimes that know the form compute it with their integer kernels; others in float, with the
    same levels. Weights are int8 with a scale per output channel. Inputs and outputs are in float,
    in the layout and with the names that the Keras model has.

    Args:
        model: the model.
        path: where to write the file, or None. An existing file is replaced at the end only.
        input_range: minimum and maximum of inputs that have no quantizer, as those of
            `recipes.contrib`. Without it such inputs and the layers that read them are float.
        opset: version of ONNX's operations, 13 or later.
        activations: type of the activations. "uint8" comes with int32 biases. "int8" comes with
            float biases that lie on the int32 grid, as TensorRT takes no others; it also wants zero
            points of 0, which `recipes.symmetric()` gives. None is "int8" for recipes with
            symmetric activations, and otherwise "uint8".

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
        raise ValueError("16-bit activations cannot be exported to ONNX: tf2onnx knows 8 bits.")
    recipe = graph.origin.recipe
    if activations is None:
        is_signed = recipe is not None and recipe.activations.symmetric
        activations = "int8" if is_signed else "uint8"
    module = inference_module(graph, for_onnx=True)
    layers = {inner for node in graph.nodes for inner in list_layers(node.call.layer)}
    with contextlib.ExitStack() as scopes:
        for layer in layers:
            # Keras computes groups in a function of its own, which tf2onnx does not look into.
            # The operation sees from the kernel's shape that there are groups.
            if getattr(layer, "groups", 1) > 1 and hasattr(layer, "kernel_size"):
                scopes.enter_context(swap_attributes(layer, groups=1))
        for node in graph.nodes:
            # onnxruntime 1.31 ends the process where quantization is inside of loops.
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
            f"'{graph.name}' cannot be exported to ONNX, as tf2onnx does not translate all of its "
            f"operations: {reason}. Use override(..., quantize=False) for such layers, or another "
            f"format."
        ) from error
    contents: bytes = proto.SerializeToString()
    check_onnx(contents, proto, graph)
    return write_contents(contents, path)


def _store_weights(graph: Any, layers: list[Weights], integer_biases: bool) -> None:
    """Replaces float weights and biases by integers with DequantizeLinear behind them.

    tf2onnx reorders the axes of weights and renames them, so that layers are recognised by the
    values of their weights.

    Args:
        graph: the graph, which is changed.
        layers: the weights of all layers.
        integer_biases: whether biases become integers too.
    """
    from onnx import numpy_helper

    floats = {array.name: array for array in graph.initializer}
    makers = {node.output[0]: node for node in graph.node}
    nodes = []
    for node in list(graph.node):
        axis, steps = CHANNEL_AXIS.get(node.op_type, 0), None
        if any(option.name == "transB" and option.i for option in node.attribute):
            axis = 0
        if node.op_type in CHANNEL_AXIS and node.input[1] in floats:
            kernel = numpy_helper.to_array(floats[node.input[1]])
            steps = _steps(kernel, axis, layers)
        if steps is not None:
            shape = [-1 if dim == axis else 1 for dim in range(kernel.ndim)]
            codes = np.round(kernel / steps.reshape(shape)).astype(np.int8)
            nodes += _dequantize(graph, node, 1, codes, steps, axis)
            source = makers.get(node.input[0])
            bias = floats.get(node.input[2]) if len(node.input) > 2 else None
            while source is not None and source.op_type in ("Reshape", "Transpose"):
                source = makers.get(source.input[0])
            if (
                integer_biases
                and bias is not None
                and source is not None
                and source.op_type == "DequantizeLinear"
            ):
                scale = steps * numpy_helper.to_array(floats[source.input[1]])
                codes = np.round(numpy_helper.to_array(bias) / scale).astype(np.int32)
                nodes += _dequantize(graph, node, 2, codes, scale, 0)
        nodes.append(node)
    _replace(graph.node, nodes)
    used = {name for node in graph.node for name in node.input}
    _replace(graph.initializer, [array for array in graph.initializer if array.name in used])


def _store_captured(graph: Any, function: Any, inputs: Collection[str]) -> None:
    """Makes initializers of constants that tf2onnx takes for inputs of the graph."""
    from onnx import numpy_helper

    values = {inner.name: outer for outer, inner in function.graph.captures}
    for extra in [entry for entry in graph.input if entry.name not in inputs]:
        graph.initializer.append(numpy_helper.from_array(values[extra.name].numpy(), extra.name))
        graph.input.remove(extra)


def _make_signed(graph: Any) -> None:
    """Replaces uint8 activations by int8, for which zero points are 128 less."""
    from onnx import TensorProto, numpy_helper

    zero_points = {node.input[2] for node in graph.node if node.op_type == "QuantizeLinear"}
    for array in graph.initializer:
        if array.name in zero_points and array.data_type == TensorProto.UINT8:
            signed = numpy_helper.to_array(array).astype(np.int16) - 128
            array.CopyFrom(numpy_helper.from_array(signed.astype(np.int8), array.name))


def _replace(field: Any, entries: list[Any]) -> None:
    """Replaces the entries of a protocol buffer's field."""
    del field[:]
    field.extend(entries)


def _steps(kernel: np.ndarray, axis: int, layers: list[Weights]) -> Any:
    """Returns the scale of each output channel of a kernel, None if no quantized layer has it."""
    columns = _columns(kernel, [axis])
    for weights in layers:
        if not weights.name:
            continue
        real = (weights.q * weights.scale).astype(np.float32)
        if not weights.per_channel:
            if np.array_equal(np.sort(real, None), np.sort(kernel, None)):
                return np.full(columns.shape[1], weights.scale.item(), np.float32)
            continue
        sizes = weights.scale.shape
        axes = [axis for axis, size in enumerate(sizes) if size > 1] or [real.ndim - 1]
        candidates = _columns(real, axes)
        if candidates.shape == columns.shape and np.array_equal(candidates, columns):
            return np.broadcast_to(weights.scale.reshape(-1), columns.shape[1]).astype(np.float32)
    return None


def _columns(kernel: np.ndarray, axes: list[int]) -> np.ndarray:
    """Returns the weights of each output channel, sorted, in a column."""
    other_axes = [axis for axis in range(kernel.ndim) if axis not in axes]
    count = int(np.prod([kernel.shape[axis] for axis in axes]))
    return np.sort(kernel.transpose(*other_axes, *axes).reshape(-1, count), axis=0)


def _dequantize(
    graph: Any, node: Any, index: int, codes: np.ndarray, steps: np.ndarray, axis: int
) -> list[Any]:
    """Replaces an input of a node by integers; returns the node that dequantizes them."""
    from onnx import helper, numpy_helper

    name = f"{node.output[0]}/input_{index}"
    parts = {"codes": codes, "step": steps, "zero": np.zeros(steps.shape, codes.dtype)}
    inputs = [f"{name}/{part}" for part in parts]
    for part, values in zip(inputs, parts.values(), strict=True):
        graph.initializer.append(numpy_helper.from_array(values, part))
    node.input[index] = name
    return [helper.make_node("DequantizeLinear", inputs, [name], name=name, axis=axis)]


def check_onnx(contents: bytes, written: Any, graph: ResolvedGraph) -> None:
    """Compares an ONNX file's bytes with what was to be written.

    Args:
        contents: the file.
        written: the `ModelProto` that was serialized into it.
        graph: the resolved graph that was written.

    Inputs, outputs, quantization parameters and weights are compared. What tf2onnx makes of
    operators is not. Differences are faults of this library, and warned of.

    Raises:
        RuntimeError: if the bytes are not what was serialized.
    """
    import onnx

    file = onnx.load_from_string(contents)
    damage = [] if file == written else ["it has other fields than were written"]
    report(f"The ONNX file of '{graph.name}'", damage, _differences(graph, file.graph))


def _differences(graph: ResolvedGraph, file: Any) -> Iterator[str]:
    from onnx import numpy_helper

    parts = [file, *_loops(file)]
    nodes = [node for part in parts for node in part.node]
    arrays = {
        array.name: numpy_helper.to_array(array) for part in parts for array in part.initializer
    }
    for end, ours, theirs in (
        ("inputs", graph.inputs, file.input),
        ("outputs", graph.outputs, file.output),
    ):
        ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in theirs}
        if list(ranks.items()) != [(name, len(tensor.shape)) for name, tensor in ours.items()]:
            yield f"its {end} have other names or numbers of axes"
    quantized = {
        (arrays[node.input[1]].item(), _above_lowest(arrays[node.input[2]]))
        for node in nodes
        if node.op_type == "QuantizeLinear"
    }
    expected = set(map(_as_stored, _params(graph)))
    # Inside of recurrent layers there are more.
    has_others = not quantized <= expected and not any(
        node.weights is not None and node.weights.recurrent for node in graph.nodes
    )
    if has_others or not expected <= quantized:
        other, missing = sorted(quantized - expected)[:3], sorted(expected - quantized)[:3]
        yield f"scales and zero points {other} are not the model's {missing}"
    in_integers = [
        totals([_scaled(arrays, node)])
        for node in nodes
        if node.op_type == "DequantizeLinear"
        and arrays.get(node.input[0], _NO_CODES).dtype == np.int8
    ]
    in_float = [np.sort(array, None) for array in arrays.values() if array.dtype == np.float32]
    for node in graph.nodes:
        weights = node.weights
        if node.op is None or not node.op.is_weighted or weights is None or weights.recurrent:
            continue
        real = np.sort((weights.q * weights.scale).astype(np.float32), None)
        if totals([weights_of(weights)]) not in in_integers and not any(
            np.array_equal(real, array) for array in in_float
        ):
            yield f"the weights of '{node.name}' are others"


def _loops(graph: Any) -> Iterator[Any]:
    """Yields the graphs inside of a graph's operators."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield attribute.g
                yield from _loops(attribute.g)


_NO_CODES = np.zeros(0)


def _scaled(arrays: dict[str, np.ndarray], node: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scales, one for each channel, and the integers that a node dequantizes."""
    codes, scale = arrays[node.input[0]], arrays[node.input[1]]
    shape = [1] * codes.ndim
    shape[node.attribute[0].i] = -1
    return scale.reshape(shape), codes


def _params(graph: ResolvedGraph) -> Iterable[QuantParams]:
    """Yields the parameters of all tensors that a file quantizes."""
    for tensor in graph.inputs.values():
        if tensor.params is not None:
            yield tensor.params
    for node in graph.nodes:
        if node.weights is not None:
            yield from (node.weights.inner or {}).values()
        if node.op is not None and node.op.output != SharedRange():
            yield from (tensor.params for tensor in node.outputs if tensor.params is not None)


def _above_lowest(zero_point: np.ndarray) -> int:
    return int(zero_point.item()) - np.iinfo(zero_point.dtype).min


def _as_stored(params: QuantParams) -> tuple[float, int]:
    """Returns the scale, and the zero point as a distance from the lowest quantized value."""
    return float(params.scale), params.zero_point - params.lowest
