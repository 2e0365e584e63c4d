"""Reads TFLite files as graphs of tensors and operations."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tensorflow.lite.python import schema_py_generated as schema
from tensorflow.lite.tools import flatbuffer_utils

from keras_qat.io.inputs import get_range
from keras_qat.tflite.checks import read_file
from keras_qat.tflite.schema import OPERATORS, TYPE_NAMES, operator_code, report_damage


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a file.

    Args:
        index: index of the tensor in the file.
        name: name of the tensor. The names of merged operations are separated by `;`.
        shape: shape of the tensor. Sizes that are known only at run time are -1.
        dtype: type of the entries. `object` for strings and 4-bit integers.
        scale: size of a quantization step. 0 for a tensor without a scale or with several scales.
        zero_point: the quantized value of 0.
        type: TFLite's name of the type, such as "int4".
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

    def quantize(self, values: NDArray) -> NDArray:
        """Returns the nearest quantized values, clipped. Values without a scale are only cast."""
        if not self.is_quantized:
            return values.astype(self.dtype)
        limits = np.iinfo(self.dtype)
        q = np.rint(values.astype(np.float64) / self.scale) + self.zero_point
        return np.clip(q, limits.min, limits.max).astype(self.dtype)

    def dequantize(self, q: NDArray) -> NDArray[np.float64]:
        return (q.astype(np.float64) - self.zero_point) * self.scale

    def advise_on_sizes(self) -> str:
        """Returns advice for an input with unknown sizes: how to export a file with fixed sizes."""
        if -1 in self.shape[1:]:
            return "quantize keras.Model(x, model(x)), where x is a keras.Input with fixed sizes"
        return "export with batch_size=1"


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of a file: the operator's name, and the indices of inputs and outputs."""

    kernel: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class FileGraph:
    """A graph of a TFLite file, by default the main graph."""

    def __init__(self, contents: bytes | schema.ModelT, subgraph: int = 0) -> None:
        with report_damage():
            self._model = read_file(contents) if isinstance(contents, bytes) else contents
            graph = self._graph = self._model.subgraphs[subgraph]
            self.tensors = [_read_tensor(*indexed) for indexed in enumerate(graph.tensors)]
            self.operations = [self._read_operation(operator) for operator in graph.operators]
            self._options = {
                operation: operator.builtinOptions
                for operation, operator in zip(self.operations, graph.operators, strict=True)
            }
            self.packs_int4 = any(tensor.type == "int4" for tensor in self.tensors)
            """True if any weights have 4 bits."""
            self.signatures = len(self._model.signatureDefs or ())
            """Number of signatures of the file; `inputs` and `outputs` are from the first."""
            self.producers = {index: op for op in self.operations for index in op.outputs}
            self.inputs = self._read_ends("inputs")
            self.outputs = self._read_ends("outputs")
            """Name in the file's signature -> tensor."""

    def _read_operation(self, operator: schema.OperatorT) -> Operation:
        code = self._model.operatorCodes[operator.opcodeIndex]
        kernel = code.customCode.decode() if code.customCode else OPERATORS[operator_code(code)]
        inputs = () if operator.inputs is None else operator.inputs
        return Operation(kernel, tuple(map(int, inputs)), tuple(map(int, operator.outputs)))

    def _read_ends(self, end: str) -> dict[str, Tensor]:
        if self._graph is not self._model.subgraphs[0] or not self._model.signatureDefs:
            return {self.tensors[i].name: self.tensors[i] for i in getattr(self._graph, end)}
        entries = getattr(self._model.signatureDefs[0], end)
        return {entry.name.decode(): self.tensors[entry.tensorIndex] for entry in entries}

    def ends(self, end: Literal["inputs", "outputs"]) -> list[int]:
        """Returns the tensor indices of inputs or outputs, in the order that TFLite Micro uses."""
        return [int(index) for index in getattr(self._graph, end)]

    def options(self, operation: Operation) -> Any:
        """Returns an operation's options from the schema, such as `Conv2DOptionsT`, or None."""
        return self._options[operation]

    def get_subgraphs(self, operation: Operation) -> list[FileGraph]:
        """Returns the graphs that a loop or a branch runs."""
        options = getattr(self.options(operation), "__dict__", {})
        indices = [index for name, index in options.items() if name.endswith("SubgraphIndex")]
        return [FileGraph(self._model, index) for index in indices]

    def get_input_ranges(self) -> dict[str, tuple[float, float]]:
        """Returns the float range of each quantized input, by name.

        A float input counts as quantized if a QUANTIZE reads it.
        """
        quantized = {x.inputs[0]: x.outputs[0] for x in self.operations if x.kernel == "QUANTIZE"}
        tensors = {
            name: tensor if tensor.is_quantized else self.tensors[quantized[tensor.index]]
            for name, tensor in self.inputs.items()
            if tensor.is_quantized or tensor.index in quantized
        }
        return {
            name: get_range(tensor.dtype, tensor.scale, tensor.zero_point)
            for name, tensor in tensors.items()
            if tensor.is_quantized
        }

    def find_float_inputs(self) -> set[str]:
        """Returns the names of float inputs that are used in float, without a QUANTIZE."""
        quantized = {op.inputs[0] for op in self.operations if op.kernel == "QUANTIZE"}
        return {
            name
            for name, tensor in self.inputs.items()
            if tensor.dtype.kind == "f" and tensor.index not in quantized
        }

    @property
    def kernels(self) -> list[str]:
        """The names of all operators in the file, such as "CONV_2D", also inside loops."""
        names: dict[str, None] = {}
        for operation in self.operations:
            graphs = self.get_subgraphs(operation)
            inner = [name for graph in graphs for name in graph.kernels]
            names.update(dict.fromkeys([operation.kernel, *inner]))
        return list(names)

    def constant(self, index: int) -> NDArray | None:
        """Returns the values of a constant, or None for other tensors."""
        tensor = self.tensors[index]
        data = self._model.buffers[self._graph.tensors[index].buffer].data
        if data is None or not len(data) or tensor.dtype == object:
            return None
        return np.frombuffer(bytes(data), tensor.dtype).reshape(tensor.shape)

    def find_operations(self, index: int, known: Iterable[int]) -> list[Operation]:
        """Returns the operations needed to compute tensor `index` if `known` tensors are given."""
        known = set(known) - {index}
        pending, needed = [index], set()
        while pending:
            operation = self.producers.get(pending.pop())
            if operation is not None and operation not in needed:
                needed.add(operation)
                pending += [source for source in operation.inputs if source not in known]
        return [operation for operation in self.operations if operation in needed]

    def replace_outputs(self, indices: Iterable[int]) -> bytes:
        """Returns the file with the tensors `indices` as outputs, named by their indices."""
        return self._copy_file({}, list(indices), {})

    def cut_at(self, shapes: dict[int, tuple[int, ...]]) -> bytes:
        """Returns a copy of the file that is cut into parts at some tensors.

        A cut tensor is an output of one part, and a new input of other parts. `verify` passes the
        model's values to the new inputs, to find the error of each part alone. Inputs and outputs
        are named by tensor indices.

        Args:
            shapes: maps the index of each cut tensor and each input to its shape in a run.
        """
        outputs = [index for index in shapes if index in self.producers]
        cuts = {index: len(self.tensors) + number for number, index in enumerate(outputs)}
        new_shapes = {cuts.get(index, index): shape for index, shape in shapes.items()}
        return self._copy_file(cuts, outputs, new_shapes)

    def _copy_file(
        self, cuts: dict[int, int], outputs: list[int], shapes: Mapping[int, tuple[int, ...]]
    ) -> bytes:
        """Copy the file with new outputs. Operations read tensor `cuts[i]` instead of tensor i."""
        model = copy.copy(self._model)
        graph = copy.copy(self._graph)
        model.subgraphs = [graph, *self._model.subgraphs[1:]]
        model.signatureDefs = None
        graph.tensors = [copy.copy(tensor) for tensor in graph.tensors]
        graph.tensors += [copy.copy(graph.tensors[index]) for index in cuts]
        needed = {operation for index in outputs for operation in self.find_operations(index, cuts)}
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
        for index, shape in shapes.items():
            graph.tensors[index].shape = list(shape)
        return bytes(flatbuffer_utils.convert_object_to_bytearray(model))


def _read_tensor(index: int, tensor: schema.TensorT) -> Tensor:
    shape = tensor.shapeSignature if tensor.shapeSignature is not None else tensor.shape
    quantization, dtype = tensor.quantization, TYPE_NAMES.get(tensor.type)
    has_one_range = quantization is not None and quantization.scale is not None
    has_one_range = has_one_range and len(quantization.scale) == 1
    return Tensor(
        index,
        (tensor.name or b"").decode(),
        () if shape is None else tuple(int(size) for size in shape),
        np.dtype(object if dtype in (None, "int4") else dtype),
        float(quantization.scale[0]) if has_one_range else 0.0,
        int(quantization.zeroPoint[0]) if has_one_range else 0,
        dtype or "object",
    )


@dataclasses.dataclass(frozen=True)
class Site:
    """An operator of a file with its tensors and options. Targets check whether they support it.

    Args:
        graph: the file.
        operation: the operator.
    """

    graph: FileGraph
    operation: Operation

    @property
    def inputs(self) -> list[Tensor | None]:
        """The input tensors. A missing optional input is None."""
        tensors = self.graph.tensors
        return [tensors[index] if index >= 0 else None for index in self.operation.inputs]

    @property
    def outputs(self) -> list[Tensor]:
        return [self.graph.tensors[index] for index in self.operation.outputs]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (*self.inputs, *self.outputs) if tensor is not None]

    def option(self, name: str, default: Any = None) -> Any:
        """Returns an option. `name` is its name in TFLite's schema, such as `strideH`."""
        return getattr(self.graph.options(self.operation), name, default)

    def constant(self, index: int) -> NDArray | None:
        """Returns the values of a constant input, or None for other inputs."""
        tensor = self.inputs[index]
        return None if tensor is None else self.graph.constant(tensor.index)

    def shape(self, index: int = 0) -> tuple[int, ...]:
        tensor = self.inputs[index]
        assert tensor is not None
        return tensor.shape
