"""Reads a TFLite file after writing, and compares it with the `ResolvedGraph` of the model.

Only structure and constants are compared. The check makes exports 10 % slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.messages import warn_caller
from keras_qat.ops.node import Node, Tensor
from keras_qat.ops.weights import Weights
from keras_qat.tflite.checks import has_value
from keras_qat.tflite.reader import FileGraph, Operation
from keras_qat.tflite.schema import SCOPE, TYPE_NAMES, TYPES, unpack

ALIGNMENT = 16
"""Number of bytes to which TFLite aligns the data of constants in a file."""


def check_contents(contents: bytes, written: schema.ModelT, graph: ResolvedGraph) -> None:
    """Compares a TFLite file with the object that it was written from, and with the model's graph.

    If operators seem to differ from the graph, the function only warns, because the comparison with
    the graph may be wrong.

    Raises:
        RuntimeError: if the bytes differ from `written`. Then keras_qat has a fault.
    """
    file = unpack(contents)
    damage = [*_find_differences(written, file, "file"), *_find_misaligned(contents, file)]
    _report(f"The TFLite file of '{graph.name}'", damage, _compare_operators(graph, file))


def _report(file: str, damage: Iterable[str], differences: Iterable[str]) -> None:
    please = "This is a fault of keras_qat: please report it with the model."
    if some := list(damage)[:5]:
        raise RuntimeError(f"{file} is damaged: {'; '.join(some)}. {please}")
    if some := list(differences)[:5]:
        warn_caller(
            f"{file} may compute something other than the model: {'; '.join(some)}. "
            f"Check it with keras_qat.verify. {please}"
        )


def _find_differences(ours: Any, theirs: Any, path: str) -> Iterator[str]:
    """Yield the differences of two objects of TFLite's schema. None equals an empty list."""
    if hasattr(ours, "__dict__"):
        if theirs is None:
            yield f"{path} is missing"
            return
        for name, value in vars(ours).items():
            if not name.startswith("_"):
                yield from _find_differences(value, getattr(theirs, name, None), f"{path}.{name}")
    elif isinstance(ours, list) and ours and hasattr(ours[0], "__dict__"):
        count = 0 if theirs is None else len(theirs)
        if count != len(ours):
            yield f"{path} has {count} entries instead of {len(ours)}"
            return
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from _find_differences(*pair, f"{path}[{index}]")
    elif isinstance(ours, (list, np.ndarray)):
        own, other = np.asarray(ours), np.asarray([] if theirs is None else theirs)
        if own.size != other.size or not np.array_equal(own.reshape(-1), other.reshape(-1)):
            yield f"{path} has other values"
    elif ours != theirs and not (not ours and not theirs):
        yield f"{path} is {theirs!r} instead of {ours!r}"


def _find_misaligned(contents: bytes, file: schema.ModelT) -> Iterator[str]:
    start = np.frombuffer(contents, np.uint8).ctypes.data
    for index, buffer in enumerate(file.buffers):
        if isinstance(buffer.data, np.ndarray) and (buffer.data.ctypes.data - start) % ALIGNMENT:
            yield f"the data of buffer {index} is not aligned to {ALIGNMENT} bytes"


def _compare_operators(graph: ResolvedGraph, written: schema.ModelT) -> Iterator[str]:
    file, main = FileGraph(written), written.subgraphs[0]
    # A RESHAPE's constant and a computed tensor may share a name. The computed tensor wins.
    in_order = sorted(file.tensors, key=lambda tensor: tensor.index in file.producers)
    by_name = {tensor.name: tensor.index for tensor in in_order}
    indices: dict[Tensor, int] = {}
    for node in graph.nodes:
        for tensor in [*node.inputs, *node.outputs]:
            if isinstance(tensor, Tensor) and f"{SCOPE}/{tensor.name}" in by_name:
                indices[tensor] = by_name[f"{SCOPE}/{tensor.name}"]
    inputs_and_outputs = [*file.ends("inputs"), *file.ends("outputs")]
    tensors = [*graph.inputs.values(), *graph.outputs.values()]
    for tensor, index in zip(tensors, inputs_and_outputs, strict=True):
        indices.setdefault(tensor, index)
    known, file_inputs = set(indices.values()), set(file.ends("inputs"))
    ready = set(file_inputs)
    for operation in file.operations:
        for index in operation.inputs:
            is_there = index < 0 or index in ready or has_value(written, main.tensors[index])
            if not is_there:
                name = file.tensors[index].name
                yield f"{operation.kernel} reads '{name}' before it is computed"
        for index in ready.intersection(operation.outputs):
            yield f"'{file.tensors[index].name}' is computed twice"
        ready.update(operation.outputs)
    for tensor, index in indices.items():
        yield from _compare_tensor(tensor, main.tensors[index])
    for node in graph.nodes:
        if node.op is not None and not node.op.is_constant:
            outputs = {indices[tensor] for tensor in node.outputs if tensor in indices}
            operations, reached = _find_operations(outputs, known, file)
            inputs = {tensor for tensor in node.inputs if isinstance(tensor, Tensor)}
            read = {indices[tensor] for tensor in inputs & indices.keys()}
            # Float layers that compute nothing have no tensor. Operators that zero a state read the
            # model's input, to get the number of examples. Sizes for RESHAPE may be constants.
            needed = {indices[tensor] for tensor in inputs & indices.keys() if tensor.params}
            if inputs <= indices.keys() and not needed <= reached <= read | file_inputs:
                names = [
                    ", ".join(sorted(file.tensors[index].name for index in group))
                    for group in (reached, read)
                ]
                yield f"'{node.name}' is computed from {names[0]} instead of {names[1]}"
            weights = node.weights
            # Tables, packed weights and recurrent cells have other constants in the file.
            if weights is not None and not (
                node.op.is_table or weights.packed or weights.recurrent
            ):
                yield from _compare_weights(node, weights, written, operations)


def _compare_tensor(tensor: Tensor, written: schema.TensorT) -> Iterator[str]:
    name, dtype = tensor.name, TYPE_NAMES.get(written.type)
    signature = written.shape if written.shapeSignature is None else written.shapeSignature
    for shape, unknown in ((written.shape, 1), (signature, -1)):
        ours = [unknown if size is None else size for size in tensor.shape]
        if list(shape) != ours:
            yield f"'{name}' has the shape {list(shape)} instead of {ours}"
    if tensor.params is None or dtype in ("uint8", "float32"):
        return
    own, theirs = tensor.params, written.quantization
    if dtype != own.dtype.name:
        yield f"'{name}' has the type {dtype} instead of {own.dtype.name}"
    if theirs is None or theirs.scale is None:
        yield f"'{name}' is not quantized"
    elif (theirs.scale[0], theirs.zeroPoint[0]) != (np.float32(own.scale), own.zero_point):
        yield f"'{name}' has other quantization parameters"


def _find_operations(
    outputs: set[int], known: set[int], file: FileGraph
) -> tuple[set[Operation], set[int]]:
    """Search backward from the tensors `outputs` to tensors in `known`.

    Return the operators on the way, and the tensors of `known` that the search reached.
    """
    operations, reached, pending = set[Operation](), set[int](), list(outputs)
    while pending:
        operation = file.producers.get(pending.pop())
        if operation is not None and operation not in operations:
            operations.add(operation)
            ends = known.intersection(operation.inputs) - outputs
            reached |= ends
            pending += set(operation.inputs) - ends
    return operations, reached


def _compare_weights(
    node: Node, weights: Weights, written: schema.ModelT, operations: Iterable[Operation]
) -> Iterator[str]:
    """Compare a node's weights with the constants of its operators.

    The file may have the weights in another order, or in several constants. Their sum does not
    depend on this. Therefore, only the sum of all weights with the same scale is compared.
    """
    ours = _sum_by_scale([_get_scales_and_weights(weights)])
    stored = []
    for index in {index for operation in operations for index in operation.inputs}:
        tensor = written.subgraphs[0].tensors[index]
        data = written.buffers[tensor.buffer].data
        if tensor.type == TYPES["int8"] and data is not None and len(tensor.shape):
            shape = [1] * len(tensor.shape)
            shape[tensor.quantization.quantizedDimension] = -1
            values = data.view(np.int8).reshape(tensor.shape)
            stored.append((tensor.quantization.scale.reshape(shape), values))
    theirs = _sum_by_scale(stored)
    if any(theirs.get(scale) != total for scale, total in ours.items()):
        yield f"the weights of '{node.name}' differ"


def _get_scales_and_weights(weights: Weights) -> tuple[NDArray, NDArray]:
    """Return the scales and the quantized weights, as arrays of the same rank."""
    q, scale = np.asarray(weights.q), np.asarray(weights.scale, np.float32)
    return scale.reshape((1,) * (q.ndim - scale.ndim) + scale.shape), q


def _sum_by_scale(weights: list[tuple[NDArray, NDArray]]) -> dict[float, float]:
    if not weights:
        return {}
    sums = [
        q.sum(tuple(np.flatnonzero(np.array(scale.shape) == 1)), np.int64).reshape(-1)
        for scale, q in weights
    ]
    scales, inverse = np.unique(
        np.concatenate([scale.reshape(-1) for scale, _ in weights]), return_inverse=True
    )
    sums_by_scale = np.bincount(inverse, np.concatenate(sums))
    return dict(zip(scales.tolist(), sums_by_scale.tolist(), strict=True))
