"""16x8: an int8 file with symmetric activations becomes one with int16 activations.

TFLite's converter makes such files only after training, from calibration data, and stumbles over
16-bit fake quantization in many operations. So it converts the model with every step 256 times as
wide, in int8, and the file is then rewritten: activations become int16, with 256 times finer
steps; weights stay; biases are rounded to the finer steps, in 64 bits, as the kernels ask.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.flatbuffer.edit import add_buffer, code_of, new

__all__ = ["FINER", "KERNELS", "round_bias", "widen"]

FINER = 256
"""How many int16 steps are one of the int8 file that the converter makes."""

_Op, _Type = schema.BuiltinOperator, schema.TensorType

KERNELS = {
    _Op.CONV_2D: (0, 1, 2),
    _Op.DEPTHWISE_CONV_2D: (0, 1, 2),
    _Op.FULLY_CONNECTED: (0, 1, 2),
    _Op.TRANSPOSE_CONV: (2, 1, 3),
}
"""Operations with int8 weights -> which of their inputs are activations, weights and bias."""

TYPES = {np.int32: _Type.INT32, np.int64: _Type.INT64}

Bias = tuple[np.ndarray, np.ndarray | None]
"""A layer's bias in float32, and in the steps of its int16 kernel, if it has one."""

FIXED = {np.float32(1 / 256): -128}
"""Step and zero point of outputs that int8 kernels fix (sigmoid, softmax); 1/32768 in int16."""


def widen(model: Any, biases: Iterable[Bias]) -> None:
    """Gives an unpacked file int16 activations, in place.

    Args:
        model: the file, its activations in int8 with zero point 0, or in a range that kernels fix.
        biases: the biases of the layers. In the file they are rounded to the wide steps; each is
            found again by its values.
    """
    (graph, *_) = model.subgraphs
    _add_biases(model)
    kernels = [
        [int(operator.inputs[place]) for place in places]
        for operator, places in _with_weights(model)
    ]
    weights = {kernel for _, kernel, _ in kernels}
    for index, tensor in enumerate(graph.tensors):
        if tensor.type == _Type.INT8 and index not in weights:
            _widen_tensor(model, tensor)
    known = list(biases)
    for indices in kernels:
        round_bias(model, [graph.tensors[each] for each in indices], known, np.int64)
    for operator in graph.operators:
        if code_of(model, operator) in (_Op.ADD, _Op.SUB):
            operator.builtinOptions.potScaleInt16 = False  # Steps are no powers of two.


def _with_weights(model: Any) -> list[tuple[Any, tuple[int, int, int]]]:
    """The operations that multiply int8 activations by int8 weights, with the places of those."""
    (graph, *_) = model.subgraphs
    found = [(each, KERNELS.get(code_of(model, each))) for each in graph.operators]
    return [
        (operator, places)
        for operator, places in found
        if places is not None
        and all(graph.tensors[operator.inputs[place]].type == _Type.INT8 for place in places[:2])
    ]


def _add_biases(model: Any) -> None:
    """Gives kernels without a bias one of zeros: its type is what makes them sum in 64 bits."""
    (graph, *_) = model.subgraphs
    for operator, places in _with_weights(model):
        inputs = [int(each) for each in operator.inputs]
        inputs += [-1] * (places[2] + 1 - len(inputs))
        if inputs[places[2]] >= 0:
            continue
        x, kernel = (graph.tensors[inputs[place]] for place in places[:2])
        (output,) = (graph.tensors[each] for each in operator.outputs)
        scale = x.quantization.scale[0] * np.asarray(kernel.quantization.scale, np.float32)
        zeros = np.zeros(output.shape[-1], np.int32)
        graph.tensors.append(
            new(
                "TensorT",
                name=output.name + b"_bias",
                shape=np.array(zeros.shape, np.int32),
                type=_Type.INT32,
                buffer=add_buffer(model, zeros),
                quantization=new(
                    "QuantizationParametersT", scale=scale, zeroPoint=np.zeros(1, np.int64)
                ),
            )
        )
        inputs[places[2]] = len(graph.tensors) - 1
        operator.inputs = np.array(inputs, np.int32)


def _values(tensor: Any, data: np.ndarray) -> np.ndarray:
    """The values of a constant in int8 with one step."""
    quantization = tensor.quantization
    codes = data.view(np.int8).astype(np.float32) - np.float32(quantization.zeroPoint[0])
    return codes * np.float32(quantization.scale[0])


def _widen_tensor(model: Any, tensor: Any) -> None:
    """int8 codes become int16 codes of the same values."""
    quantization = tensor.quantization
    scale, zero_point = np.float32(quantization.scale[0]), int(quantization.zeroPoint[0])
    data = model.buffers[tensor.buffer].data
    new_scale = np.float32(scale / FINER)
    if zero_point != 0 and data is not None:
        new_scale = np.float32(scale / 128)
    elif zero_point != 0:
        if FIXED.get(scale) != zero_point:
            raise ValueError(
                f"{tensor.name.decode()}: its zero point is {zero_point}; 16-bit activations are "
                f"symmetric."
            )
        new_scale = np.float32(1 / 32768)
    if data is not None:
        codes = np.round(_values(tensor, data) / new_scale).astype(np.int16)
        tensor.buffer = add_buffer(model, codes)
    tensor.type = _Type.INT16
    quantization.scale = np.array([new_scale], np.float32)
    quantization.zeroPoint = np.array([0], np.int64)


def round_bias(model: Any, tensors: list[Any], known: list[Bias], dtype: Any) -> None:
    """Rounds a bias to whole steps of input scale times weight scale, after those have changed.

    Args:
        model: the file.
        tensors: the kernel's input, its weights and its bias.
        known: the biases of the layers; this one is found among them by the codes that it has.
            One that the converter has made stays at what they say.
        dtype: type of the new codes.
    """
    x, kernel, bias = tensors
    old_scale = np.asarray(bias.quantization.scale, np.float64)
    values = model.buffers[bias.buffer].data.view(np.int32) * old_scale
    scale = np.float32(x.quantization.scale[0]) * np.asarray(kernel.quantization.scale, np.float32)
    codes = np.round(values / scale.astype(np.float64))
    for exact, exact_codes in known:
        if exact.size != values.size:
            continue
        exact = exact.reshape(-1)
        rounded = np.round(exact / scale.astype(np.float64))
        here = rounded if exact_codes is None else exact_codes.reshape(-1)
        # Another layer's bias may have the same values, but not in these steps. Scales are
        # float32, so that large codes are a little off.
        is_it = np.abs(exact - values) <= 0.51 * old_scale + 1e-6 * np.abs(exact)
        if np.all(is_it & (np.abs(here - rounded) <= 1 + 1e-6 * np.abs(rounded))):
            codes = here
            break
    codes = codes.astype(dtype)
    bias.buffer, bias.type = add_buffer(model, codes), TYPES[dtype]
    bias.quantization.scale = scale
