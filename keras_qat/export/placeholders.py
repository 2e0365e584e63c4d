"""Kernels that TFLite's converter is not given: it holds each in some sixteen float copies.

In the place of a kernel it gets a single number for all of its entries, with the kernel's range for
each channel. All codes of its file are 127 then, and those of the kernel are written over them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.export.folded import Folded
from keras_qat.export.int16 import KERNELS
from keras_qat.flatbuffer.edit import add_buffer, code_of
from keras_qat.keras2.backend import keras
from keras_qat.layers.int8 import INT8_MAX

__all__ = ["PLACEHOLDER", "with_placeholders", "write_kernels"]

PLACEHOLDER = 1e30
"""More than any weight: it is clipped to the end of its channel's range."""

_layers = keras.layers
_Op = schema.BuiltinOperator

LAYERS = {
    _layers.Conv1D,
    _layers.Conv2D,
    _layers.Conv1DTranspose,
    _layers.Conv2DTranspose,
    _layers.Dense,
}
"""Layers with large kernels, whose place in the file is known."""

AXES = {_Op.CONV_2D: (3, 0, 1, 2), _Op.TRANSPOSE_CONV: (2, 0, 1, 3)}
"""Operation -> which axis of the converter's 4-D kernel is which of the file's."""


def with_placeholders(folded: dict[Any, Folded]) -> dict[Any, Folded]:
    """Chooses placeholders for the kernels of wrappers that can be found again in the file.

    They are found by their steps, so that no two may be alike in them.
    """
    quantized = [each for each in folded.values() if each.limits is not None]
    count = Counter(map(_identity, quantized))

    def is_chosen(wrapper: Any, each: Folded) -> bool:
        befores = [before for before, _ in wrapper.ends.values()]
        found = type(wrapper.layer) in LAYERS and befores and None not in befores
        return bool(found) and each.limits is not None and count[_identity(each)] == 1

    return {
        wrapper: dataclasses.replace(each, placeholder=is_chosen(wrapper, each))
        for wrapper, each in folded.items()
    }


def write_kernels(model: Any, folded: Iterable[Folded]) -> bool:
    """Writes the codes of kernels in the place of their placeholders.

    Args:
        model: the converter's file, unpacked; it is changed.
        folded: the layers' kernels.

    Returns:
        Whether each was found. The converter may merge what follows on a layer into its kernel.
    """
    (graph, *_) = model.subgraphs
    missing = {_identity(each): each for each in folded if each.placeholder}
    for operator in graph.operators:
        axes = AXES.get(code_of(model, operator))
        if axes is None:
            continue
        _, place, _ = KERNELS[code_of(model, operator)]
        tensor = graph.tensors[operator.inputs[place]]
        data = model.buffers[tensor.buffer].data
        if tensor.type != schema.TensorType.INT8 or data is None or np.any(data != INT8_MAX):
            continue
        scales = np.asarray(tensor.quantization.scale, np.float32)
        each = missing.pop((data.size, scales.tobytes()), None)
        if each is not None:
            shape = np.asarray(tensor.shape)[np.argsort(axes)]
            codes = _codes(each).reshape(shape).transpose(axes)
            tensor.buffer = add_buffer(model, codes)
    return not missing


def _codes(each: Folded) -> np.ndarray:
    assert each.limits is not None
    return np.round(each.kernel / each.limits * np.float32(INT8_MAX)).astype(np.int8)


def _identity(each: Folded) -> tuple[int, bytes]:
    """The size of a kernel and its steps, as the file has them."""
    limits = np.asarray(each.limits, np.float64).reshape(-1)
    return each.kernel.size, (limits / INT8_MAX).astype(np.float32).tobytes()
