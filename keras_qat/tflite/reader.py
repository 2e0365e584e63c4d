"""Reads TFLite files as graphs of tensors and operations."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
from tensorflow.lite.tools import flatbuffer_utils

from keras_qat.io.excess import ends_of
from keras_qat.tflite.checks import read_file
from keras_qat.tflite.schema import OPERATORS, TYPE_NAMES, code_of, reading


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a file.

    Args:
        index: index of the tensor in the file.
        name: name of the tensor; the converter joins names of merged operations by `;`.
        shape: shape of the tensor, -1 for sizes that are known only at run time.
        dtype: type of the entries; `object` for strings and 4-bit integers.
        scale: real value of one step; 0 for a tensor with no scale or with several.
        zero_point: the quantized value that stands for 0.
        type: TFLite's name of the type, also "int4".
    """

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    scale: float
    zero_point: int
    type: str = ""

    @property
    def is_quantized(self) -> bool:
        """True if the tensor holds quantized values with one scale."""
        return self.dtype.kind in "iu" and self.scale > 0

    def codes(self, values: np.ndarray) -> np.ndarray:
        """Returns the nearest quantized values, clipped; the values themselves if not quantized."""
        if not self.is_quantized:
            return values.astype(self.dtype)
        limits = np.iinfo(self.dtype)
        codes = np.rint(values.astype(np.float64) / self.scale) + self.zero_point
        return np.clip(codes, limits.min, limits.max).astype(self.dtype)

    def values(self, codes: np.ndarray) -> np.ndarray:
        """Returns the real values of quantized values."""
        return (codes.astype(np.float64) - self.zero_point) * self.scale


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of a file: the operator's name, and the indices of its tensors."""

    kernel: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class FileGraph:
    """The main graph of a TFLite file.

    Args:
        contents: the file's contents, or the result of `unpack`.
        subgraph: index of the graph; 0 for the main one.
    """

    def __init__(self, contents: Any, subgraph: int = 0) -> None:
        with reading():
            self._model = read_file(contents) if isinstance(contents, bytes) else contents
            graph = self._graph = self._model.subgraphs[subgraph]
            self.tensors = [_tensor(index, tensor) for index, tensor in enumerate(graph.tensors)]
            self.operations = [self._operation(operator) for operator in graph.operators]
            self._options = {
                operation: operator.builtinOptions
                for operation, operator in zip(self.operations, graph.operators, strict=True)
            }
            self.packs_int4 = any(tensor.type == "int4" for tensor in self.tensors)
            """True if any weights have 4 bits."""
            self.signatures = len(self._model.signatureDefs or ())
            """Number of signatures of the file; `inputs` and `outputs` are from the first."""
            self.producers = {index: op for op in self.operations for index in op.outputs}
            self.inputs = self._ends("inputs")
            self.outputs = self._ends("outputs")
            """Name in the file's signature -> tensor."""

    def _operation(self, operator: Any) -> Operation:
        code = self._model.operatorCodes[operator.opcodeIndex]
        kernel = code.customCode.decode() if code.customCode else OPERATORS[code_of(code)]
        inputs = () if operator.inputs is None else operator.inputs
        return Operation(kernel, tuple(map(int, inputs)), tuple(map(int, operator.outputs)))

    def _ends(self, end: str) -> dict[str, Tensor]:
        if self._graph is not self._model.subgraphs[0] or not self._model.signatureDefs:
            return {self.tensors[i].name: self.tensors[i] for i in getattr(self._graph, end)}
        entries = getattr(self._model.signatureDefs[0], end)
        return {entry.name.decode(): self.tensors[entry.tensorIndex] for entry in entries}

    def ends(self, end: Literal["inputs", "outputs"]) -> list[int]:
        """Returns the indices of the input or output tensors in the interpreter's order."""
        return [int(index) for index in getattr(self._graph, end)]

    def options(self, operation: Operation) -> Any:
        """Returns an operation's options, with the schema's names; None if it has none."""
        return self._options[operation]

    def inner(self, operation: Operation) -> list[FileGraph]:
        """Returns the graphs that a loop or a branch runs; none for other operations."""
        options = getattr(self.options(operation), "__dict__", {})
        indices = [index for name, index in options.items() if name.endswith("SubgraphIndex")]
        return [FileGraph(self._model, index) for index in indices]

    def input_ranges(self) -> dict[str, tuple[float, float]]:
        """Returns the ends of the range of each input that is quantized, maybe by an operation."""
        behind = {op.inputs[0]: op.outputs[0] for op in self.operations if op.kernel == "QUANTIZE"}
        tensors = {
            name: tensor if tensor.is_quantized else self.tensors[behind[tensor.index]]
            for name, tensor in self.inputs.items()
            if tensor.is_quantized or tensor.index in behind
        }
        return {
            name: ends_of(tensor.dtype, tensor.scale, tensor.zero_point)
            for name, tensor in tensors.items()
            if tensor.is_quantized
        }

    def read_in_float(self) -> set[str]:
        """Returns the names of the float inputs that no operation quantizes."""
        quantized = {op.inputs[0] for op in self.operations if op.kernel == "QUANTIZE"}
        return {
            name
            for name, tensor in self.inputs.items()
            if tensor.dtype.kind == "f" and tensor.index not in quantized
        }

    @property
    def kernels(self) -> list[str]:
        """The operators that the file uses, each once, also inside loops and branches."""
        names: dict[str, None] = {}
        for operation in self.operations:
            inside = [name for graph in self.inner(operation) for name in graph.kernels]
            names.update(dict.fromkeys([operation.kernel, *inside]))
        return list(names)

    def constant(self, index: int) -> np.ndarray | None:
        """Returns the values of a constant; None if the tensor is computed or an input."""
        tensor, data = (
            self.tensors[index],
            self._model.buffers[self._graph.tensors[index].buffer].data,
        )
        if data is None or not len(data) or tensor.dtype == object:
            return None
        return np.frombuffer(bytes(data), tensor.dtype).reshape(tensor.shape)

    def piece(self, index: int, known: Iterable[int]) -> list[Operation]:
        """Returns the operations that compute a tensor from known ones and constants."""
        known = set(known) - {index}
        pending, needed = [index], set()
        while pending:
            operation = self.producers.get(pending.pop())
            if operation is not None and operation not in needed:
                needed.add(operation)
                pending += [source for source in operation.inputs if source not in known]
        return [operation for operation in self.operations if operation in needed]

    def with_outputs(self, indices: Iterable[int]) -> bytes:
        """Returns the file with these tensors as its outputs, each named by its index.

        The operators stay the same, and so do the values.
        """
        return self._renamed({}, list(indices))

    def in_pieces(self, shapes: dict[int, tuple[int, ...]]) -> bytes:
        """Returns the file cut at some tensors: each becomes an output and a new input.

        Every piece between cuts can so be fed by itself, and all pieces run at once. Inputs and
        outputs are named by the tensors' indices. Unused inputs and operations are left out.

        Args:
            shapes: index of each tensor to cut at, and of each input of the file -> its shape in
                a run of the file, for the pieces' inputs. The file itself does not tell these
                shapes where the batch is part of another axis.
        """
        outputs = [index for index in shapes if index in self.producers]
        cuts = {index: len(self.tensors) + number for number, index in enumerate(outputs)}
        return self._renamed(cuts, outputs, {cuts.get(i, i): shape for i, shape in shapes.items()})

    def _renamed(self, cuts: dict[int, int], outputs: list[int], shapes: Any = ()) -> bytes:
        """Copies the file; operations read tensor `cuts[i]`, an input, in place of tensor i."""
        model = copy.copy(self._model)
        graph = copy.copy(self._graph)
        model.subgraphs = [graph, *self._model.subgraphs[1:]]
        model.signatureDefs = None
        graph.tensors = [copy.copy(tensor) for tensor in graph.tensors]
        graph.tensors += [copy.copy(graph.tensors[index]) for index in cuts]
        needed = {operation for index in outputs for operation in self.piece(index, cuts)}
        graph.operators = []
        for operation, operator in zip(self.operations, self._graph.operators, strict=True):
            if operation in needed:
                operator = copy.copy(operator)
                operator.inputs = [cuts.get(index, index) for index in operation.inputs]
                graph.operators.append(operator)
        read = {index for operator in graph.operators for index in operator.inputs}
        sources = {tensor.index: tensor.index for tensor in self.inputs.values()} | cuts
        graph.inputs = [source for source in sources.values() if source in read or not cuts]
        graph.outputs = outputs
        for index, copied in [*sources.items(), *((index, index) for index in outputs)]:
            graph.tensors[copied].name = str(index).encode()
        for index, shape in dict(shapes).items():
            graph.tensors[index].shape = list(shape)
        return bytes(flatbuffer_utils.convert_object_to_bytearray(model))


def _tensor(index: int, tensor: Any) -> Tensor:
    shape = tensor.shapeSignature if tensor.shapeSignature is not None else tensor.shape
    quantization, dtype = tensor.quantization, TYPE_NAMES.get(tensor.type)
    one_range = quantization is not None and quantization.scale is not None
    one_range = one_range and len(quantization.scale) == 1
    return Tensor(
        index,
        (tensor.name or b"").decode(),
        () if shape is None else tuple(int(size) for size in shape),
        np.dtype(object if dtype in (None, "int4") else dtype),
        float(quantization.scale[0]) if one_range else 0.0,
        int(quantization.zeroPoint[0]) if one_range else 0,
        dtype or "object",
    )
