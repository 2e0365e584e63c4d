"""Reads a written ONNX file back and compares it with the resolved graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.export.read_back import report, totals, weights_of
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.ops.op import SharedRange


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
