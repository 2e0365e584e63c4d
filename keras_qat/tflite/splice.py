"""Copies the operators of another TFLite file into a file that is being built."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.tflite.builder import Builder
from keras_qat.tflite.schema import TYPE_NAMES, TYPES, new, operator_code


def splice_model(
    builder: Builder,
    model: schema.ModelT,
    inputs: list[int],
    outputs: list[int],
    params: QuantParams | None = None,
    prefix: str = "",
) -> None:
    """Adds the operators, constants and called subgraphs of another file.

    Args:
        builder: the file that is being built.
        model: the other file, unpacked. Its objects are moved into `builder`.
        inputs, outputs: tensors of `builder` that replace the main graph's inputs and outputs.
        params: quantization parameters for int8 or int16 tensors that have none.
        prefix: prefix for the names of tensors, subgraphs and variables.
    """
    main = model.subgraphs[0]
    starts, ends = (list(map(int, indices)) for indices in (main.inputs, main.outputs))
    _check(builder, main, [*starts, *ends], [*inputs, *outputs])
    source = _Source(builder, model, params, prefix)
    new_indices, copies = dict(zip(starts, inputs, strict=True)), []
    for end, index in zip(ends, outputs, strict=True):
        if end in new_indices or source.data(main.tensors[end]) is not None:
            copies.append((end, index))
        else:
            new_indices[end] = index
    used = {end for end, _ in copies}.union(*map(_find_tensors, main.operators))
    for old in sorted(used - new_indices.keys()):
        new_indices[old] = source.add_tensor(main.tensors[old])
    builder.knows_sizes = False
    builder.graph.operators += [source.operator(op, new_indices) for op in main.operators]
    for end, index in copies:
        builder.copy(new_indices[end], index)


def _find_tensors(operator: schema.OperatorT) -> set[int]:
    lists = (operator.inputs, operator.outputs, operator.intermediates)
    return {int(index) for indices in lists if indices is not None for index in indices} - {-1}


def _check(
    builder: Builder, main: schema.SubGraphT, sources: list[int], targets: list[int]
) -> None:
    if len(sources) != len(targets):
        raise ValueError(f"Expected {len(sources)} tensors to connect, got {len(targets)}.")
    for source, target in zip(sources, targets, strict=True):
        types = main.tensors[source].type, builder.graph.tensors[target].type
        if len(set(types)) > 1:
            names = [TYPE_NAMES.get(code, str(code)) for code in types]
            raise ValueError(f"{main.tensors[source].name.decode()} is {names[0]}, not {names[1]}.")


class _Source:
    """The file that is inserted. Its objects are moved into the new file."""

    def __init__(
        self, builder: Builder, model: schema.ModelT, params: QuantParams | None, prefix: str
    ) -> None:
        self.builder, self.model, self.params, self.prefix = builder, model, params, prefix
        self.buffers: dict[int, int] = {}
        self.subgraphs: dict[int, int] = {}

    def data(self, tensor: schema.TensorT) -> NDArray | None:
        data = self.model.buffers[tensor.buffer].data
        return None if data is None or len(data) == 0 else np.asarray(data, np.uint8)

    def add_tensor(self, tensor: schema.TensorT) -> int:
        """Adds a tensor to the main graph of the new file. Returns the new index."""
        data, dtype = self.data(tensor), TYPE_NAMES.get(tensor.type, "")
        self.prepare(tensor)
        is_plain = tensor.quantization is None and tensor.sparsity is None
        if data is not None and is_plain and dtype not in ("", "int4", "bool"):
            shape = tuple(int(size) for size in tensor.shape)
            return self.builder.constant(tensor.name.decode(), data.view(dtype).reshape(shape))
        if data is not None:
            tensor.buffer = self.buffer(tensor.buffer, data)
        self.builder.graph.tensors.append(tensor)
        return len(self.builder.graph.tensors) - 1

    def prepare(self, tensor: schema.TensorT) -> None:
        """Adds the prefix to a tensor's name, and sets missing quantization parameters."""
        # The converter joins the names of merged operations with ";".
        tensor.name = self.add_prefix((tensor.name or b"").split(b";")[0])
        if self.data(tensor) is None:
            tensor.buffer = 0
        quantization, params = tensor.quantization, self.params
        if quantization is not None and quantization.scale is None:
            tensor.quantization = None
        if tensor.quantization is not None or params is None:
            return
        if tensor.type == TYPES[params.dtype.name]:
            tensor.quantization = new(
                "QuantizationParametersT",
                scale=np.array([params.scale], np.float32),
                zeroPoint=np.array([params.zero_point], np.int64),
            )

    def add_prefix(self, name: bytes | None) -> bytes:
        return self.prefix.encode() + (name or b"")

    def buffer(self, number: int, data: NDArray) -> int:
        """Returns the new index of the data of buffer `number`. The first call copies the data."""
        if number not in self.buffers:
            self.buffers[number] = self.builder.buffer(data)
        return self.buffers[number]

    def subgraph(self, number: int) -> int:
        """Returns the new index of subgraph `number`. The first call moves the subgraph."""
        if number not in self.subgraphs:
            graph = self.model.subgraphs[number]
            self.builder.model.subgraphs.append(graph)
            self.subgraphs[number] = len(self.builder.model.subgraphs) - 1
            graph.name = self.add_prefix(graph.name)
            for tensor in graph.tensors:
                data = self.data(tensor)
                self.prepare(tensor)
                if data is not None:
                    tensor.buffer = self.buffer(tensor.buffer, data)
            same = {index: index for index in range(len(graph.tensors))}
            graph.operators = [self.operator(op, same) for op in graph.operators or []]
        return self.subgraphs[number]

    def operator(self, operator: schema.OperatorT, new_indices: dict[int, int]) -> schema.OperatorT:
        """Prepares an operator for the new file. `new_indices` maps old to new tensor indices."""
        for name in ("inputs", "outputs", "intermediates"):
            indices = getattr(operator, name)
            if indices is not None:
                moved = [new_indices[int(index)] if index >= 0 else -1 for index in indices]
                setattr(operator, name, np.array(moved, np.int32))
        code = self.model.operatorCodes[operator.opcodeIndex]
        custom = (code.customCode or b"").decode()
        operator.opcodeIndex = self.builder.opcode(operator_code(code), code.version, custom)
        for name in ("builtinOptions", "builtinOptions2"):
            options = getattr(operator, name, None)
            for field, value in list(vars(options).items()) if options is not None else []:
                if field.lower().endswith("subgraphindex") or field == "subgraph":
                    setattr(options, field, self.subgraph(value) if value >= 0 else value)
                elif field == "sharedName":  # Operators with the same name share a variable.
                    setattr(options, field, self.add_prefix(value))
        return operator
