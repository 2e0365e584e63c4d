"""Weights of 8 bits in a file whose layers compute with them in float."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.tflite.edit import add_buffer, new

__all__ = ["pack_weights"]


def pack_weights(model: Any, scales: Iterable[float]) -> None:
    """Holds the float weights of a TFLite file as int8 codes, with a DEQUANTIZE before each use.

    The converter folds fake-quantized weights of float layers to float constants, four times as
    large. Runtimes undo a DEQUANTIZE of constants once, when the file is loaded.

    Args:
        model: the file, unpacked; it is changed.
        scales: steps of the quantized weights. A constant is packed if all of its values are
            whole multiples of one of them, of at most 127 steps: what it computes stays the same.
    """
    steps = sorted({np.float32(scale) for scale in scales})
    codes: dict[int, tuple[int, np.float32]] = {}
    """Buffer of a float constant -> that of its codes, and their scale."""
    for index in _float_constants(model) if steps else []:
        values = np.frombuffer(bytes(model.buffers[index].data), np.float32)
        found = _codes(values, steps)
        if found is not None:
            codes[index] = add_buffer(model, found[0]), found[1]
    if codes:
        opcode = _dequantize_opcode(model)
        for graph in model.subgraphs:
            _dequantize_in(graph, codes, opcode)


def _float_constants(model: Any) -> list[int]:
    """Buffers that only float tensors hold, of a size that is worth it."""
    used: dict[int, set[int]] = {}
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            used.setdefault(tensor.buffer, set()).add(tensor.type)
    return [
        index
        for index, types in used.items()
        if types == {schema.TensorType.FLOAT32}
        and model.buffers[index].data is not None
        and len(model.buffers[index].data) >= 256
    ]


def _codes(values: np.ndarray, scales: list[np.float32]) -> tuple[np.ndarray, np.float32] | None:
    highest = np.max(np.abs(values))
    for scale in scales:
        if highest > 127.5 * scale:
            continue
        codes = np.round(values / scale)
        if np.array_equal(codes.astype(np.float32) * scale, values):
            return codes.astype(np.int8), scale
    return None


def _dequantize_opcode(model: Any) -> int:
    number = schema.BuiltinOperator.DEQUANTIZE
    model.operatorCodes.append(
        new("OperatorCodeT", builtinCode=number, deprecatedBuiltinCode=number, version=2)
    )
    return len(model.operatorCodes) - 1


def _dequantize_in(graph: Any, codes: dict[int, tuple[int, np.float32]], opcode: int) -> None:
    """Makes each packed constant of a subgraph the result of a DEQUANTIZE at its start."""
    operators = []
    for index, tensor in enumerate(list(graph.tensors)):
        if tensor.buffer not in codes:
            continue
        buffer, scale = codes[tensor.buffer]
        packed = new(
            "TensorT",
            name=bytes(tensor.name or b"") + b"_codes",
            shape=tensor.shape,
            type=schema.TensorType.INT8,
            buffer=buffer,
            quantization=new("QuantizationParametersT", scale=[float(scale)], zeroPoint=[0]),
        )
        graph.tensors.append(packed)
        tensor.buffer = 0
        ends = {"inputs": [len(graph.tensors) - 1], "outputs": [index]}
        operators.append(new("OperatorT", opcodeIndex=opcode, **ends))
    graph.operators = [*operators, *(graph.operators or [])]
