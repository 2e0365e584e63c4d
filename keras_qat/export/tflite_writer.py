"""Writes the nodes of a resolved graph to a TFLite file."""

from __future__ import annotations

import dataclasses

import numpy as np

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.export.float_subgraphs import list_inputs, write_float_subgraph
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.passes import fuse_padding
from keras_qat.ops.emission import Emission
from keras_qat.ops.node import Constant, Node, Tensor
from keras_qat.ops.op import FixedRange, SharedRange
from keras_qat.tflite.builder import Builder
from keras_qat.tflite.schema import SCOPE, TYPES

ZERO_OF_UINT8 = 128
"""Difference between the uint8 value and the int8 value of the same float value."""


def write_graph(
    graph: ResolvedGraph,
    builder: Builder,
    input_dtype: str | None = None,
    output_dtype: str | None = None,
) -> tuple[dict[str, int], dict[str, int]]:
    """Writes all nodes, inputs and outputs.

    Padding layers are merged into convolutions. TFLite's converter converts float layers, as many
    as possible at once. `input_dtype` and `output_dtype` are "uint8" or "float32". None means the
    type of the quantized values.

    Returns:
        Two dicts from names to tensor indices, for the inputs and for the outputs.
    """
    graph = fuse_padding(graph)
    indices: dict[Tensor, int] = {}
    dequantized: dict[Tensor, int] = {}
    """Maps quantized tensors to the indices of their float values."""
    pending: list[Node] = []
    """Float nodes that are not written yet."""
    graph_outputs = set(graph.outputs.values())
    consumers: dict[Tensor, list[Node]] = {}
    for node in graph.nodes:
        for tensor in list_inputs(graph, node):
            consumers.setdefault(tensor, []).append(node)
    has_float = graph.origin.target is None or graph.origin.target.has_float
    inputs = {}
    for name, tensor in graph.inputs.items():
        are_ids = not (has_float or input_dtype == "float32")
        are_ids = are_ids and _are_token_ids(tensor, consumers.get(tensor, []))
        dtype = "int32" if are_ids else input_dtype
        inputs[name] = _write_input(builder, indices, name, tensor, dtype)

    def flush() -> None:
        ends = [
            tensor
            for node in pending
            for tensor in node.outputs
            if tensor in graph_outputs
            or any(consumer not in pending for consumer in consumers.get(tensor, ()))
        ]
        if pending:
            write_float_subgraph(builder, graph, pending, ends, indices, dequantized)
        pending.clear()

    for node in graph.nodes:
        if node.op is None:
            pending.append(node)
            continue
        if not {tensor for earlier in pending for tensor in earlier.outputs}.isdisjoint(
            node.inputs
        ):
            flush()
        write_node(builder, node, indices)
    flush()
    outputs: dict[str, int] = {}
    for name, tensor in graph.outputs.items():
        ends = [*inputs.values(), *outputs.values()]
        outputs[name] = _write_output(builder, indices, name, tensor, output_dtype, ends)
    return inputs, outputs


def _get_end_params(params: QuantParams, dtype: str | None) -> tuple[str, QuantParams | None]:
    if dtype == "float32":
        return dtype, None
    if dtype == "uint8":
        return dtype, dataclasses.replace(params, zero_point=params.zero_point + ZERO_OF_UINT8)
    return params.dtype.name, params


def _are_token_ids(tensor: Tensor, consumers: list[Node]) -> bool:
    """Return True if all consumers of a float input cast it to integers."""
    casts = [node.op is not None and node.op.is_table and not node.op.weights for node in consumers]
    return tensor.is_float and bool(casts) and all(casts)


def _write_input(
    builder: Builder, indices: dict[Tensor, int], name: str, tensor: Tensor, dtype: str | None
) -> int:
    if tensor.params is None:
        if tensor.dtype == "string":
            raise ValueError(
                f"Input '{name}' contains strings, which a file cannot read. Move the layers that "
                f"read this input into the input pipeline, and quantize the rest of the model."
            )
        kind = dtype if dtype == "int32" else tensor.dtype
        if tensor.dtype == "uint8" and dtype == "float32":  # Pixels that the user passes as floats.
            end = builder.tensor(name, tensor.shape, dtype)
            inner = get_tensor_index(builder, indices, tensor)
            before, after = TYPES[dtype], TYPES[tensor.dtype]
            builder.operator("CAST", [end], [inner], inDataType=before, outDataType=after)
            return end
        indices[tensor] = builder.tensor(name, tensor.shape, kind)
        return indices[tensor]
    kind, params = _get_end_params(tensor.params, dtype)
    end = builder.tensor(name, tensor.shape, kind, params)
    converts, clips = params != tensor.params, tensor.params.bits < 8
    if not (converts or clips):
        indices[tensor] = end
    else:  # Users clip inputs to int8, not to fewer bits.
        inner = get_tensor_index(builder, indices, tensor)
        _convert(builder, f"{SCOPE}/{name}", [end, inner], tensor, converts, clips)
    return end


def _convert(
    builder: Builder, name: str, ends: list[int], tensor: Tensor, converts: bool, clips: bool
) -> None:
    params = tensor.params
    assert params is not None
    source, target = ends
    if converts:
        end = builder.tensor(f"{name}/unclipped", tensor.shape, "int8", params) if clips else target
        builder.quantize(source, end)
        source = end
    if clips:
        highest = builder.constant(f"{SCOPE}/highest", np.array(params.highest, np.int8), params)
        builder.operator("MINIMUM", [source, highest], [target])


def _write_output(
    builder: Builder,
    indices: dict[Tensor, int],
    name: str,
    tensor: Tensor,
    dtype: str | None,
    file_ends: list[int],
) -> int:
    """Return the index of an output. A tensor that is also an input or another output is copied."""
    inner = indices[tensor]
    if tensor.params is None:
        kind, params, code = tensor.dtype, None, ""
    else:
        kind, params = _get_end_params(tensor.params, dtype)
        code = "" if params == tensor.params else "QUANTIZE" if params else "DEQUANTIZE"
    if not code and inner not in file_ends:
        builder.graph.tensors[inner].name = name.encode()
        return inner
    end = builder.tensor(name, tensor.shape, kind, params)
    if code:
        builder.operator(code, [inner], [end])
    else:
        builder.copy(inner, end)
    return end


def get_tensor_index(builder: Builder, indices: dict[Tensor, int], tensor: Tensor) -> int:
    """Returns the index of a tensor in the file. Adds the tensor if it is missing."""
    if tensor not in indices:
        dtype = tensor.dtype if tensor.params is None else tensor.params.dtype.name
        name = f"{SCOPE}/{tensor.name}"
        indices[tensor] = builder.tensor(name, tensor.shape, dtype, tensor.params)
    return indices[tensor]


def write_node(builder: Builder, node: Node, indices: dict[Tensor, int]) -> None:
    """Writes the TFLite operators of a node.

    A QUANTIZE is added if the kernel requires another scale or zero point than the output has. A
    MINIMUM is added for fewer than 8 bits, because TFLite kernels clip to int8.
    """
    assert node.op is not None
    inputs = [
        builder.constant(f"{SCOPE}/{node.name}/constant", x.q, x.params)
        if isinstance(x, Constant)
        else get_tensor_index(builder, indices, x)
        for x in node.inputs
    ]
    outputs = [get_tensor_index(builder, indices, tensor) for tensor in node.outputs]
    params = node.output.params
    if params is None:  # Indices.
        node.op.emit(Emission(builder, node, inputs, outputs))
        return
    native, name = params, f"{SCOPE}/{node.name}"
    if isinstance(node.op.output, FixedRange):
        native = node.op.output.params(params.bits)
    converts, clips = native != params, params.bits < 8 and node.op.output != SharedRange()
    result = target = outputs[0]
    if converts or clips:
        result = builder.tensor(f"{name}/unclipped", node.output.shape, params.dtype.name, native)
    node.op.emit(Emission(builder, node, inputs, [result, *outputs[1:]]))
    _convert(builder, name, [result, target], node.output, converts, clips)
