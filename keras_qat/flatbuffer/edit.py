"""Changing TFLite files: their data, the names at their ends, and what the library notes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from tensorflow.lite.python import schema_py_generated as schema
from tensorflow.lite.tools import flatbuffer_utils

__all__ = [
    "add_buffer",
    "add_metadata",
    "code_of",
    "drop_unread",
    "name_ends",
    "new",
    "pack",
    "read_metadata",
    "unpack",
]

METADATA = b"keras_qat"
"""Name of the library's entry in a file's metadata. Interpreters pass over it."""

SIGNATURE = b"serving_default"


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


def new(kind: str, **fields: Any) -> Any:
    """An object of the schema, e.g. a `BufferT`; older TensorFlows set no fields at once."""
    made = getattr(schema, kind)()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def add_buffer(model: Any, data: np.ndarray) -> int:
    """Adds data to a file; returns the index of its buffer."""
    model.buffers.append(new("BufferT", data=np.frombuffer(data.tobytes(), np.uint8)))
    return len(model.buffers) - 1


def code_of(model: Any, operator: Any) -> int:
    """Which operation it is; small codes are noted in a field of their own for old runtimes."""
    entry = model.operatorCodes[operator.opcodeIndex]
    return max(entry.builtinCode, entry.deprecatedBuiltinCode)


def drop_unread(model: Any, graph: Any, codes: set[int]) -> None:
    """Takes operations of these codes out of a subgraph, if nothing reads what they compute."""
    read, kept = {int(each) for each in graph.outputs}, []
    for operator in reversed(graph.operators):
        if code_of(model, operator) not in codes or read.intersection(map(int, operator.outputs)):
            read.update(map(int, operator.inputs))
            kept.append(operator)
    graph.operators = kept[::-1]


def name_ends(model: Any, input_names: list[str], output_names: list[str]) -> None:
    """Gives a file's inputs and outputs their names and order, also as a signature.

    Args:
        model: the file, unpacked; its inputs in the order of `input_names`, its outputs in
            alphabetical order, as the converter leaves those of a dict.
        input_names: names of the inputs.
        output_names: names of the outputs, in the order that they shall have.
    """
    (graph, *_) = model.subgraphs
    by_name = dict(zip(sorted(output_names), graph.outputs, strict=True))
    graph.outputs = np.array([by_name[name] for name in output_names], np.int32)
    ends = [
        list(zip(names, map(int, indices), strict=True))
        for names, indices in ((input_names, graph.inputs), (output_names, graph.outputs))
    ]
    for name, index in reversed([*ends[0], *ends[1]]):
        graph.tensors[index].name = name.encode()
    inputs, outputs = (
        [new("TensorMapT", name=name.encode(), tensorIndex=index) for name, index in end]
        for end in ends
    )
    signature = new("SignatureDefT", inputs=inputs, outputs=outputs, signatureKey=SIGNATURE)
    model.signatureDefs = [signature]


def add_metadata(model: Any, metadata: dict[str, Any]) -> None:
    """Notes data in a file as JSON, for `read_metadata`."""
    data = np.frombuffer(json.dumps(metadata, sort_keys=True).encode(), np.uint8)
    entry = new("MetadataT", name=METADATA, buffer=add_buffer(model, data))
    model.metadata = [*(model.metadata or []), entry]


def read_metadata(tflite: str | os.PathLike[str] | bytes) -> dict[str, Any]:
    """Reads what `export_tflite` noted in a file.

    Args:
        tflite: path or contents of the file.

    Returns:
        A dict with `version`, that of keras_qat, and `recipe`, the recipe as JSON data:
        `Recipe.from_config` makes a recipe of it.

    Raises:
        ValueError: if it is no TFLite file, or not one that `export_tflite` wrote.

    Example:
        >>> keras_qat.read_metadata("model.tflite")["recipe"]["name"]
        'int8'
    """
    contents = tflite if isinstance(tflite, bytes) else Path(tflite).read_bytes()
    if contents[4:8] != b"TFL3":
        name = "The given bytes are" if isinstance(tflite, bytes) else f"{tflite} is"
        raise ValueError(f"{name} no TFLite file. Pass what keras_qat.export_tflite wrote.")
    model = schema.Model.GetRootAsModel(contents, 0)
    for index in range(model.MetadataLength()):
        entry = model.Metadata(index)
        if entry.Name() == METADATA:
            return json.loads(model.Buffers(entry.Buffer()).DataAsNumpy().tobytes())
    raise ValueError(
        "The file holds no metadata of keras_qat: another program has written or changed it."
    )
