"""Weights of 8 bits in a file whose layers compute with them in float."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.tflite.schema import TYPES, new

__all__ = ["pack_weights"]

SMALLEST = 256
"""How many bytes of floats are worth it."""


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
    types: dict[int, set[int]] = {}
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            types.setdefault(tensor.buffer, set()).add(tensor.type)
    codes: dict[int, tuple[int, np.float32]] = {}
    """Buffer of a float constant -> that of its codes, and their scale."""
    for index in (index for index, found in types.items() if found == {TYPES["float32"]}):
        data = model.buffers[index].data
        if data is None or len(data) < SMALLEST:
            continue
        values = np.frombuffer(bytes(data), np.float32)
        for scale in steps:
            rounded = np.round(values / scale)
            fits = np.max(np.abs(values)) <= 127.5 * scale
            if fits and np.array_equal(rounded.astype(np.float32) * scale, values):
                model.buffers.append(new("BufferT", data=rounded.astype(np.int8).view(np.uint8)))
                codes[index] = len(model.buffers) - 1, scale
                break
    if codes:
        number = schema.BuiltinOperator.DEQUANTIZE
        model.operatorCodes.append(
            new("OperatorCodeT", builtinCode=number, deprecatedBuiltinCode=number, version=2)
        )
        for graph in model.subgraphs:
            _dequantize_in(graph, codes, len(model.operatorCodes) - 1)


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
            type=TYPES["int8"],
            buffer=buffer,
            quantization=new("QuantizationParametersT", scale=[float(scale)], zeroPoint=[0]),
        )
        graph.tensors.append(packed)
        tensor.buffer = 0
        ends = {"inputs": [len(graph.tensors) - 1], "outputs": [index]}
        operators.append(new("OperatorT", opcodeIndex=opcode, **ends))
    graph.operators = [*operators, *(graph.operators or [])]
