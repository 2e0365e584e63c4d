"""TFLite files as graphs of tensors and operations."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
from tensorflow.lite.tools import flatbuffer_utils

from keras_qat.tflite.schema import OPERATORS, TYPE_NAMES, code_of, unpack

__all__ = ["FileGraph", "Operation", "Tensor"]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a file.

    Args:
        index: its number in the file.
        name: its name; names of operations that the converter merged are joined by `;`.
        shape: its shape, -1 for sizes that are known at run time only.
        dtype: type of its entries; of strings and 4-bit integers `object`.
        scale: real value of one step, 0 for a tensor with no range or with several.
        zero_point: the code of 0.
        type: TFLite's name of the type, "int4" too.
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
        """Whether it holds codes of one range."""
        return self.dtype.kind in "iu" and self.scale > 0

    def codes(self, values: np.ndarray) -> np.ndarray:
        """The codes next to real values, clipped; of a tensor without a range the values."""
        if not self.is_quantized:
            return values.astype(self.dtype)
        limits = np.iinfo(self.dtype)
        codes = np.rint(values.astype(np.float64) / self.scale) + self.zero_point
        return np.clip(codes, limits.min, limits.max).astype(self.dtype)

    def values(self, codes: np.ndarray) -> np.ndarray:
        """The real values of codes."""
        return (codes.astype(np.float64) - self.zero_point) * self.scale


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of a file: its kernel's name, and the indices of its tensors."""

    kernel: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class FileGraph:
    """The main graph of a TFLite file.

    Args:
        contents: the file's contents, or what `unpack` made of them.
        place: which of its graphs, if not the main one.
    """

    def __init__(self, contents: Any, place: int = 0) -> None:
        self._model = unpack(contents) if isinstance(contents, bytes) else contents
        graph = self._graph = self._model.subgraphs[place]
        self.tensors = [_tensor(index, each) for index, each in enumerate(graph.tensors)]
        self.operations = [self._operation(each) for each in graph.operators]
        self._options = {
            each: operator.builtinOptions
            for each, operator in zip(self.operations, graph.operators, strict=True)
        }
        self.packs_int4 = any(each.type == "int4" for each in self.tensors)
        """Whether any weights lie in 4 bits."""
        self.signatures = len(self._model.signatureDefs or ())
        """How many signatures the file has; `inputs` and `outputs` are those of the first."""
        self.producers = {index: each for each in self.operations for index in each.outputs}
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
        found = getattr(self._model.signatureDefs[0], end)
        return {each.name.decode(): self.tensors[each.tensorIndex] for each in found}

    def ends(self, end: Literal["inputs", "outputs"]) -> list[int]:
        """The tensors at one end, in the order in which interpreters count them."""
        return [int(index) for index in getattr(self._graph, end)]

    def options(self, operation: Operation) -> Any:
        """The options of an operation, with the names that TFLite's schema has; None if none."""
        return self._options[operation]

    def inner(self, operation: Operation) -> list[FileGraph]:
        """The graphs that a loop or a branch runs; none of most operations."""
        options = getattr(self.options(operation), "__dict__", {})
        places = [each for name, each in options.items() if name.endswith("SubgraphIndex")]
        return [FileGraph(self._model, place) for place in places]

    @property
    def kernels(self) -> list[str]:
        """The names of the kernels that compute it, each once, those of loops and branches too."""
        found: dict[str, None] = {}
        for each in self.operations:
            inside = [name for graph in self.inner(each) for name in graph.kernels]
            found.update(dict.fromkeys([each.kernel, *inside]))
        return list(found)

    def constant(self, index: int) -> np.ndarray | None:
        """The values of a tensor that are in the file; None if it is computed, or an input."""
        data, tensor = (
            self._model.buffers[self._graph.tensors[index].buffer].data,
            self.tensors[index],
        )
        if data is None or not len(data) or tensor.dtype == object:
            return None
        return np.frombuffer(bytes(data), tensor.dtype).reshape(tensor.shape)

    def piece(self, index: int, known: Iterable[int]) -> list[Operation]:
        """The operations that compute a tensor from known tensors and constants, in order."""
        known = set(known) - {index}
        wanted, found = [index], set()
        while wanted:
            operation = self.producers.get(wanted.pop())
            if operation is not None and operation not in found:
                found.add(operation)
                wanted += [each for each in operation.inputs if each not in known]
        return [each for each in self.operations if each in found]

    def with_outputs(self, indices: Iterable[int]) -> bytes:
        """The file with these tensors as its outputs, each named by its index.

        Kernels cannot tell: it computes what the file computes.
        """
        return self._renamed({}, list(indices))

    def in_pieces(self, shapes: dict[int, tuple[int, ...]]) -> bytes:
        """The file cut at some tensors: each is an output, and what read it reads an input.

        So each piece between them can be fed by itself, and all of them run at once. Inputs and
        outputs are named by the tensors' indices; inputs that nothing reads are left out, as is
        what no output needs.

        Args:
            shapes: index of each tensor to cut at, and of each input of the file, -> its shape in
                a run of the file, which the pieces' inputs get. Where the batch is folded into
                other axes the file does not tell it, and interpreters refuse shapes that do not
                fit each other.
        """
        outputs = [index for index in shapes if index in self.producers]
        cuts = {index: len(self.tensors) + number for number, index in enumerate(outputs)}
        return self._renamed(cuts, outputs, {cuts.get(i, i): each for i, each in shapes.items()})

    def _renamed(self, cuts: dict[int, int], outputs: list[int], shapes: Any = ()) -> bytes:
        """A copy whose operations read tensor `cuts[i]`, an input, in place of tensor i."""
        model = copy.copy(self._model)
        graph = copy.copy(self._graph)
        model.subgraphs = [graph, *self._model.subgraphs[1:]]
        model.signatureDefs = None
        graph.tensors = [copy.copy(each) for each in graph.tensors]
        graph.tensors += [copy.copy(graph.tensors[index]) for index in cuts]
        needed = {operation for index in outputs for operation in self.piece(index, cuts)}
        graph.operators = []
        for operation, operator in zip(self.operations, self._graph.operators, strict=True):
            if operation in needed:
                operator = copy.copy(operator)
                operator.inputs = [cuts.get(each, each) for each in operation.inputs]
                graph.operators.append(operator)
        read = {index for operator in graph.operators for index in operator.inputs}
        ends = {each.index: each.index for each in self.inputs.values()} | cuts
        graph.inputs = [there for there in ends.values() if there in read or not cuts]
        graph.outputs = outputs
        for index, there in [*ends.items(), *((index, index) for index in outputs)]:
            graph.tensors[there].name = str(index).encode()
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
