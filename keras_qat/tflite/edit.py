"""Changing TFLite files in the objects of their schema."""

from __future__ import annotations

from typing import Any

import numpy as np
from tensorflow.lite.tools import flatbuffer_utils

from keras_qat.tflite.builder import new

__all__ = ["add_buffer", "code_of", "pack", "unpack"]


def unpack(contents: bytes) -> Any:
    """A file's contents as an object of TFLite's schema (`ModelT`)."""
    return flatbuffer_utils.convert_bytearray_to_object(contents)


def pack(model: Any) -> bytes:
    """The inverse of `unpack`, without tensors and data that nothing refers to any more."""
    for number, graph in enumerate(model.subgraphs):
        _drop_unused_tensors(graph, model.signatureDefs or [] if number == 0 else [])
    tensors = [tensor for graph in model.subgraphs for tensor in graph.tensors]
    used = {each.buffer for each in [*tensors, *(model.metadata or [])]}
    for index, buffer in enumerate(model.buffers):
        if index not in used:
            buffer.data = None
    return flatbuffer_utils.convert_object_to_bytearray(model)


def _drop_unused_tensors(graph: Any, signatures: list[Any]) -> None:
    """Leaves the tensors of a subgraph that its operations or ends name, with new numbers."""
    operators = graph.operators or []
    named = [graph.inputs, graph.outputs]
    for operator in operators:
        named += [operator.inputs, operator.outputs, operator.intermediates]
    used = sorted({int(index) for each in named if each is not None for index in each} - {-1})
    numbers = {-1: -1, **{index: number for number, index in enumerate(used)}}

    def renumbered(indices: Any) -> Any:
        return None if indices is None else np.array([numbers[int(i)] for i in indices], np.int32)

    graph.tensors = [graph.tensors[index] for index in used]
    graph.inputs, graph.outputs = renumbered(graph.inputs), renumbered(graph.outputs)
    for operator in operators:
        operator.inputs, operator.outputs = map(renumbered, (operator.inputs, operator.outputs))
        operator.intermediates = renumbered(operator.intermediates)
    for signature in signatures:
        for end in (*signature.inputs, *signature.outputs):
            end.tensorIndex = numbers[end.tensorIndex]


def add_buffer(model: Any, data: np.ndarray) -> int:
    """Adds data to a file; returns the index of its buffer."""
    model.buffers.append(new("BufferT", data=np.frombuffer(data.tobytes(), np.uint8)))
    return len(model.buffers) - 1


def code_of(model: Any, operator: Any) -> int:
    """Which operation it is; small codes are noted in a field of their own for old runtimes."""
    entry = model.operatorCodes[operator.opcodeIndex]
    return max(entry.builtinCode, entry.deprecatedBuiltinCode)
