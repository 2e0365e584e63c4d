"""Another TFLite file's main graph inside a file in the making."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.tflite.builder import Builder
from keras_qat.tflite.schema import TYPE_NAMES, TYPES, code_of, new

__all__ = ["splice_model"]


def splice_model(
    builder: Builder,
    model: Any,
    inputs: list[int],
    outputs: list[int],
    params: QuantParams | None = None,
    prefix: str = "",
) -> None:
    """Adds the operators of another file, with their constants and the subgraphs that they call.

    Signatures, metadata and tensors that no operator names are left behind.

    Args:
        builder: the file in the making.
        model: the other file, unpacked: its parts become those of the file in the making.
        inputs, outputs: tensors of `builder` that stand for those of its main graph, in its order.
        params: of its int8 or int16 tensors that have no quantization parameters of their own.
        prefix: goes in front of the names of its tensors, subgraphs and variables.

    Raises:
        ValueError: if number or types of inputs or outputs differ.
    """
    main = model.subgraphs[0]
    starts, ends = ([int(each) for each in given] for given in (main.inputs, main.outputs))
    _check(builder, main, [*starts, *ends], [*inputs, *outputs])
    source = _Source(builder, model, params, prefix)
    places, copies = dict(zip(starts, inputs, strict=True)), []
    for end, index in zip(ends, outputs, strict=True):
        if end in places or source.data(main.tensors[end]) is not None:
            copies.append((end, index))
        else:
            places[end] = index
    named = {end for end, _ in copies}.union(*map(_named, main.operators))
    for place in sorted(named - places.keys()):
        places[place] = source.add_tensor(main.tensors[place])
    builder.knows_sizes = False
    builder.graph.operators += [source.operator(each, places) for each in main.operators]
    for end, index in copies:
        builder.copy(places[end], index)


def _named(operator: Any) -> set[int]:
    """The tensors that an operator names."""
    ends = (operator.inputs, operator.outputs, operator.intermediates)
    return {int(index) for end in ends if end is not None for index in end} - {-1}


def _check(builder: Builder, main: Any, theirs: list[int], ours: list[int]) -> None:
    if len(theirs) != len(ours):
        raise ValueError(f"{len(ours)} tensors for the {len(theirs)} ends of a graph.")
    for there, here in zip(theirs, ours, strict=True):
        types = main.tensors[there].type, builder.graph.tensors[here].type
        if len(set(types)) > 1:
            known = [TYPE_NAMES.get(each, str(each)) for each in types]
            raise ValueError(f"{main.tensors[there].name.decode()} is {known[0]}, not {known[1]}.")


class _Source:
    """A file that is copied from: its objects become those of the other file."""

    def __init__(
        self, builder: Builder, model: Any, params: QuantParams | None, prefix: str
    ) -> None:
        self.builder, self.model, self.params, self.prefix = builder, model, params, prefix
        self.buffers: dict[int, int] = {}
        self.subgraphs: dict[int, int] = {}

    def data(self, tensor: Any) -> np.ndarray | None:
        data = self.model.buffers[tensor.buffer].data
        return None if data is None or len(data) == 0 else np.asarray(data, np.uint8)

    def add_tensor(self, tensor: Any) -> int:
        """Adds a tensor to the main graph; of equal constants there is one."""
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

    def prepare(self, tensor: Any) -> None:
        """Gives a tensor its name and quantization parameters in the other file."""
        tensor.name = self.named(tensor.name)
        if self.data(tensor) is None:
            tensor.buffer = 0
        found, params = tensor.quantization, self.params
        if found is not None and found.scale is None:
            tensor.quantization = None
        if tensor.quantization is not None or params is None:
            return
        if tensor.type == TYPES[params.dtype.name]:
            tensor.quantization = new(
                "QuantizationParametersT",
                scale=np.array([params.scale], np.float32),
                zeroPoint=np.array([params.zero_point], np.int64),
            )

    def named(self, name: Any) -> bytes:
        return self.prefix.encode() + (name or b"")

    def buffer(self, number: int, data: np.ndarray) -> int:
        """The number of a buffer in the other file, added where it is missing."""
        if number not in self.buffers:
            self.buffers[number] = self.builder.buffer(data)
        return self.buffers[number]

    def subgraph(self, number: int) -> int:
        """The number of a subgraph in the other file, added where it is missing."""
        if number not in self.subgraphs:
            graph = self.model.subgraphs[number]
            self.builder.model.subgraphs.append(graph)
            self.subgraphs[number] = len(self.builder.model.subgraphs) - 1
            graph.name = self.named(graph.name)
            for tensor in graph.tensors:
                data = self.data(tensor)
                self.prepare(tensor)
                if data is not None:
                    tensor.buffer = self.buffer(tensor.buffer, data)
            places = {place: place for place in range(len(graph.tensors))}
            graph.operators = [self.operator(each, places) for each in graph.operators or []]
        return self.subgraphs[number]

    def operator(self, operator: Any, places: dict[int, int]) -> Any:
        """An operator of the other file, its tensors being those at `places`."""
        for name in ("inputs", "outputs", "intermediates"):
            found = getattr(operator, name)
            if found is not None:
                indices = [places[int(each)] if each >= 0 else -1 for each in found]
                setattr(operator, name, np.array(indices, np.int32))
        code = self.model.operatorCodes[operator.opcodeIndex]
        custom = (code.customCode or b"").decode()
        operator.opcodeIndex = self.builder.opcode(code_of(code), code.version, custom)
        for name in ("builtinOptions", "builtinOptions2"):
            options = getattr(operator, name, None)
            for field, value in list(vars(options).items()) if options is not None else []:
                if field.lower().endswith("subgraphindex") or field == "subgraph":
                    setattr(options, field, self.subgraph(value) if value >= 0 else value)
                elif field == "sharedName":  # A variable, which nodes of one name share.
                    setattr(options, field, self.named(value))
        return operator
