"""Packs two 4-bit weights in one byte, and stores fake-quantized float weights as int8."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.tflite.schema import TYPES, new

SMALLEST = 256
"""Float constants with fewer bytes are not packed."""


def pack_nibbles(q: NDArray) -> NDArray:
    """Packs two 4-bit weights into each byte. The first weight is in the lower half."""
    nibbles = (q.reshape(-1) & 15).astype(np.uint8)
    nibbles = np.append(nibbles, np.zeros(nibbles.size % 2, np.uint8))
    return nibbles[0::2] | nibbles[1::2] << 4


def unpack_nibbles(packed: NDArray, shape: tuple[int, ...]) -> NDArray[np.int8]:
    pairs = np.stack([packed << 4, packed & 240], -1).view(np.int8) >> 4
    return pairs.reshape(-1)[: math.prod(shape)].reshape(shape)


def pack_weights(model: schema.ModelT, scales: Iterable[float]) -> None:
    """Stores float weights as int8, with a DEQUANTIZE before each use. Results do not change.

    TFLiteConverter stores fake-quantized weights of float layers as float constants, which are four
    times as large. Runtimes compute a DEQUANTIZE of constants once, when they load the file.

    Args:
        model: the unpacked file, which is changed.
        scales: scales of the fake-quantized weights. A constant is packed if it is a scale times
            integers from -127 to 127.
    """
    sorted_scales = sorted({np.float32(scale) for scale in scales})
    types: dict[int, set[int]] = {}
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            types.setdefault(tensor.buffer, set()).add(tensor.type)
    packed: dict[int, tuple[int, np.float32]] = {}
    """Maps the buffer of each float constant to its int8 buffer and its scale."""
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
                packed[index] = len(model.buffers) - 1, scale
                break
    if packed:
        code = schema.BuiltinOperator.DEQUANTIZE
        model.operatorCodes.append(
            new("OperatorCodeT", builtinCode=code, deprecatedBuiltinCode=code, version=2)
        )
        for graph in model.subgraphs:
            _add_dequantize(graph, packed, len(model.operatorCodes) - 1)


def _add_dequantize(
    graph: schema.SubGraphT, packed: dict[int, tuple[int, np.float32]], opcode: int
) -> None:
    """Add a DEQUANTIZE for each packed constant at the start of a subgraph."""
    operators = []
    for index, tensor in enumerate(list(graph.tensors)):
        if tensor.buffer not in packed:
            continue
        buffer, scale = packed[tensor.buffer]
        graph.tensors.append(
            new(
                "TensorT",
                name=bytes(tensor.name or b"") + b"_quantized",
                shape=tensor.shape,
                type=TYPES["int8"],
                buffer=buffer,
                quantization=new("QuantizationParametersT", scale=[float(scale)], zeroPoint=[0]),
            )
        )
        tensor.buffer = 0
        ends = {"inputs": [len(graph.tensors) - 1], "outputs": [index]}
        operators.append(new("OperatorT", opcodeIndex=opcode, **ends))
    graph.operators = [*operators, *(graph.operators or [])]
