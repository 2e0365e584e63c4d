"""4-bit weights, two in a byte: an int8 file whose weights lie on few levels becomes smaller."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.export.int16 import KERNELS, Bias, round_bias
from keras_qat.flatbuffer.edit import add_buffer, code_of

__all__ = ["pack_weights"]

_Op, _Type = schema.BuiltinOperator, schema.TensorType


INT4 = _Type.INT4

TAKES_INT4 = {_Op.CONV_2D, _Op.DEPTHWISE_CONV_2D, _Op.FULLY_CONNECTED}
"""Operations whose kernels unpack int4 weights."""


def pack_weights(model: Any, biases: Iterable[Bias]) -> int:
    """Stores the weights of an unpacked file in 4 bits, where they fit without a change.

    Weights trained with few bits are held in int8 codes with a common divisor in each channel.
    Divided by it, the codes are small; the steps grow by as much, and those of the bias with them.

    Args:
        model: the file.
        biases: the biases of the layers, to be rounded to the wider steps.

    Returns:
        How many weights are in 4 bits now.
    """
    (graph, *_) = model.subgraphs
    known = list(biases)
    count = 0
    for operator in graph.operators:
        code = code_of(model, operator)
        if code not in TAKES_INT4:
            continue
        x, kernel, bias = (
            graph.tensors[operator.inputs[place]]
            if place < len(operator.inputs) and operator.inputs[place] >= 0
            else None
            for place in KERNELS[code]
        )
        if _pack(model, kernel):
            count += 1
            if bias is not None:
                round_bias(model, [x, kernel, bias], known, np.int32)
    return count


def _pack(model: Any, tensor: Any) -> bool:
    """Makes a tensor int4 if its codes, divided by what they have in common, fit."""
    data = model.buffers[tensor.buffer].data
    if tensor.type != _Type.INT8 or data is None:
        return False
    codes = data.view(np.int8).reshape(tensor.shape).astype(np.int32)
    scales = np.asarray(tensor.quantization.scale, np.float32)
    axis = tensor.quantization.quantizedDimension if scales.size > 1 else None
    others = tuple(each for each in range(codes.ndim) if each != axis)
    divisors = np.maximum(np.gcd.reduce(codes, axis=others, keepdims=True), 1)
    codes = codes // divisors
    if codes.min() < -7 or codes.max() > 7:
        return False
    nibbles = (codes.reshape(-1) & 15).astype(np.uint8)
    nibbles = np.append(nibbles, np.zeros(nibbles.size % 2, np.uint8))
    tensor.buffer = add_buffer(model, nibbles[0::2] | nibbles[1::2] << 4)
    tensor.type = INT4
    tensor.quantization.scale = scales * divisors.reshape(-1).astype(np.float32)
    return True
