"""Packs float weights that fit int8 into int8 constants, for layers that compute in float."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.tflite.schema import TYPES, new

SMALLEST = 256
"""The fewest bytes of float weights that are packed."""


def pack_weights(model: Any, scales: Iterable[float]) -> None:
    """Stores the float weights of a TFLite file as int8, with a DEQUANTIZE before each use.

    The converter turns fake-quantized weights of float layers into float constants, which are four
    times as large. Runtimes compute a DEQUANTIZE of constants once, when they load the file.

    Args:
        model: the unpacked file, which is changed.
        scales: scales of the quantized weights. A constant is packed if all of its values are
            multiples of one scale, at most 127 times that scale. The file computes the same.
    """
    sorted_scales = sorted({np.float32(scale) for scale in scales})
    types: dict[int, set[int]] = {}
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            types.setdefault(tensor.buffer, set()).add(tensor.type)
    codes: dict[int, tuple[int, np.float32]] = {}
    """Buffer of a float constant -> the buffer of its int8 values, and their scale."""
    for index in (index for index, used in types.items() if used == {TYPES["float32"]}):
        data = model.buffers[index].data
        if data is None or len(data) < SMALLEST:
            continue
        values = np.frombuffer(bytes(data), np.float32)
        for scale in sorted_scales:
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
        tensors = {"inputs": [len(graph.tensors) - 1], "outputs": [index]}
        operators.append(new("OperatorT", opcodeIndex=opcode, **tensors))
    graph.operators = [*operators, *(graph.operators or [])]
