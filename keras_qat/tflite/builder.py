"""Builds a TFLite file from tensors, constants and operators that are added one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flatbuffers
import numpy as np
from numpy.typing import NDArray
from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.arithmetic.fixed_point import FINER_STEPS, LEAST_RATIO
from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.tflite.metadata import compress
from keras_qat.tflite.op_versions import choose_version, find_min_runtime_version
from keras_qat.tflite.schema import TYPE_NAMES, TYPES, new

SIGNATURE = b"serving_default"

_OPTIONS = {name[:-8].lower(): name[:-1] for name in vars(schema) if name.endswith("OptionsT")} | {
    **dict.fromkeys(("averagepool2d", "maxpool2d"), "Pool2DOptions"),
    **dict.fromkeys(("mean", "reducemax", "reducemin", "reduceprod"), "ReducerOptions"),
    **dict.fromkeys(("maximum", "minimum"), "MaximumMinimumOptions"),
    "l2normalization": "L2NormOptions",
}
"""Maps operators, such as "conv2d", to options in the schema, such as "Conv2DOptions"."""


class _Buffer(schema.BufferT):
    """The data of a tensor, aligned to 16 bytes as the schema requires."""

    def Pack(self, builder: flatbuffers.Builder) -> int:
        if self.data is None:
            return super().Pack(builder)
        builder.StartVector(1, self.data.size, 16)
        builder.head -= self.data.size  # Like `CreateNumpyVector`, but aligned.
        start = builder.Head()
        builder.Bytes[start : start + self.data.size] = self.data.tobytes()
        data = builder.EndVector()
        schema.BufferStart(builder)
        schema.BufferAddData(builder, data)
        return schema.BufferEnd(builder)


class _Packer(flatbuffers.Builder):
    """Writes the bytes of a file. Equal lists of scales or zero points are stored only once."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._vectors: dict[tuple[str, bytes], int] = {}

    def add_vector(self, values: NDArray) -> int:
        """Return the position of a vector in the file. Write it if no equal vector exists."""
        key = values.dtype.name, values.tobytes()
        if key not in self._vectors:
            self._vectors[key] = self.CreateNumpyVector(values)
        return self._vectors[key]


class _Quantization(schema.QuantizationParametersT):
    """Scales and zero points of a tensor."""

    def Pack(self, builder: flatbuffers.Builder) -> int:
        if not isinstance(builder, _Packer):
            return super().Pack(builder)
        scale, zero_point = builder.add_vector(self.scale), builder.add_vector(self.zeroPoint)
        schema.QuantizationParametersStart(builder)
        schema.QuantizationParametersAddScale(builder, scale)
        schema.QuantizationParametersAddZeroPoint(builder, zero_point)
        schema.QuantizationParametersAddQuantizedDimension(builder, self.quantizedDimension)
        return schema.QuantizationParametersEnd(builder)


class Builder:
    """Collects the tensors and operators of a file with one main graph.

    `tensor` and `constant` return a tensor's index in the main graph. Other methods expect this
    index. An unknown size, such as the batch size, is None in shapes. Files store it as 1 in the
    shape, and as -1 in the shape signature.
    """

    def __init__(self) -> None:
        self.knows_sizes = True
        """False if a SHAPE or operators of `splice_model` may cause unknown sizes."""
        self.model = new("ModelT", version=3, description=b"keras_qat")
        self.model.buffers = [_Buffer()]  # Buffer 0 means no data.
        self.model.operatorCodes, self.model.metadata = [], []
        self.graph = new("SubGraphT", tensors=[], operators=[], name=b"main")
        self.model.subgraphs = [self.graph]
        self._opcodes: dict[tuple[int, str, int], int] = {}
        self._waiting: list[tuple[Any, Callable[[], None]]] = []
        self._constants: dict[tuple[Any, ...], int] = {}

    def tensor(
        self,
        name: str,
        shape: tuple[int | None, ...],
        dtype: str,
        params: QuantParams | None = None,
        *,
        scales: NDArray | None = None,
        axis: int = 0,
        buffer: int = 0,
    ) -> int:
        """Adds a tensor and returns its index.

        A tensor with one scale has `params`. A tensor with one scale per channel has `scales` and
        the `axis` of the channels. Without both, the tensor is not quantized.
        `buffer` is the index of a constant's data. It is 0 for other tensors.
        """
        tensor = new(
            "TensorT",
            name=name.encode(),
            shape=np.array([1 if size is None else size for size in shape], np.int32),
            type=TYPES[dtype],
            buffer=buffer,
            hasRank=True,
        )
        if None in shape:
            sizes = [-1 if size is None else size for size in shape]
            tensor.shapeSignature = np.array(sizes, np.int32)
        if params is not None:
            scales, zero_points = np.array([params.scale], np.float32), [int(params.zero_point)]
        elif scales is not None:
            scales = np.asarray(scales, np.float32).reshape(-1)
            zero_points = [0] * scales.size
        if scales is not None:
            tensor.quantization = _Quantization()
            tensor.quantization.scale = scales
            tensor.quantization.zeroPoint = np.array(zero_points, np.int64)
            tensor.quantization.quantizedDimension = axis if len(scales) > 1 else 0
        self.graph.tensors.append(tensor)
        return len(self.graph.tensors) - 1

    def constant(
        self,
        name: str,
        values: NDArray,
        params: QuantParams | None = None,
        *,
        dtype: str = "",
        shape: tuple[int, ...] | None = None,
        scales: NDArray | None = None,
        axis: int = 0,
    ) -> int:
        """Returns the index of a constant tensor. Adds the tensor if no equal constant exists.

        `values` are stored unchanged. Packed int4 values need `dtype` and `shape`.
        """
        values = np.asarray(values, order="C")
        dtype, shape = dtype or values.dtype.name, values.shape if shape is None else shape
        data = values.reshape(-1).view(np.uint8)
        scale_bytes = None if scales is None else np.asarray(scales, np.float32).tobytes()
        key = (dtype, shape, params, scale_bytes, axis, hash(data.tobytes()), data.size)
        if key not in self._constants:
            self._constants[key] = self.tensor(
                name, shape, dtype, params, scales=scales, axis=axis, buffer=self.buffer(data)
            )
        return self._constants[key]

    def similar(self, index: int, shape: tuple[int | None, ...], name: str) -> int:
        """Adds a tensor with the type and scales of tensor `index`. Returns the new index."""
        source = self.graph.tensors[index]
        new_index = self.tensor(name, shape, TYPE_NAMES[source.type])
        self.graph.tensors[new_index].quantization = source.quantization
        return new_index

    def buffer(self, data: NDArray) -> int:
        """Stores data in the file. Returns its index, for the argument `buffer` of `tensor`."""
        buffer = _Buffer()
        buffer.data = data
        self.model.buffers.append(buffer)
        return len(self.model.buffers) - 1

    def drop_unused(self) -> None:
        """Drops the data of constants that no operator reads."""
        read = {index for operator in self.graph.operators for index in operator.inputs}
        tensors = [self.graph.tensors[index] for index in (read | set(self.graph.outputs)) - {-1}]
        tensors += [tensor for graph in self.model.subgraphs[1:] for tensor in graph.tensors]
        used = {tensor.buffer for tensor in tensors}
        self.model.buffers = [
            buffer if index in used else _Buffer()
            for index, buffer in enumerate(self.model.buffers)
        ]

    def variable(self, index: int) -> int:
        """Marks a tensor as a state that is kept between runs. Returns the same `index`."""
        self.graph.tensors[index].isVariable = True
        return index

    def operator(
        self,
        code: str,
        inputs: list[int],
        outputs: list[int],
        intermediates: list[int] | None = None,
        **options: Any,
    ) -> None:
        """Adds an operator. `code` is a name in TFLite's `BuiltinOperator`, such as "CONV_2D".

        An index of -1 leaves out an optional input. `intermediates` are tensors that only hold the
        scales inside an LSTM. Missing `options` have the schema's defaults.
        """
        self.knows_sizes &= code != "SHAPE"
        number = getattr(schema.BuiltinOperator, code)
        tensors = {"inputs": np.array(inputs, np.int32), "outputs": np.array(outputs, np.int32)}
        operator = new("OperatorT", **tensors)
        if intermediates is not None:
            operator.intermediates = np.array(intermediates, np.int32)
        table = _OPTIONS.get(code.replace("_", "").lower())
        if table is not None:
            operator.builtinOptionsType = getattr(schema.BuiltinOptions, table)
            operator.builtinOptions = new(f"{table}T", **options)
        version = choose_version(number, operator, self.graph.tensors)
        operator.opcodeIndex = self.opcode(number, version)
        self.graph.operators.append(operator)

    def once_known(self, prepare: Callable[[], None]) -> None:
        """Registers a function that `finish` calls. It adds operators before an LSTM.

        The LSTM is the last operator so far. The function sets the LSTM's states to zeros. It is
        called late, because it reads `knows_sizes`, which may still change. If `knows_sizes` is
        False, the new operators are moved to the start of the file.
        """
        self._waiting.append((self.graph.operators[-1], prepare))

    def _prepare(self) -> None:
        for operator, prepare in self._waiting:
            operators, self.graph.operators = self.graph.operators, []
            prepare()
            index = operators.index(operator) if self.knows_sizes else 0
            self.graph.operators = [*operators[:index], *self.graph.operators, *operators[index:]]
        self._waiting.clear()

    def sizes(self, index: int) -> list[int]:
        """Returns the shape of a tensor, with -1 for unknown sizes."""
        tensor = self.graph.tensors[index]
        return list(tensor.shape if tensor.shapeSignature is None else tensor.shapeSignature)

    def quantize(self, source: int, target: int) -> None:
        """Adds QUANTIZE operators that convert `source` to the scale and zero point of `target`.

        If the scale of `target` is far larger, it adds two QUANTIZE. `LEAST_RATIO` explains why.
        """
        ends = [self.graph.tensors[index] for index in (source, target)]
        if all(end.type == TYPES["int8"] for end in ends):
            before, after = (end.quantization.scale[0] for end in ends)
            if before / after < LEAST_RATIO:
                shape = tuple(None if size < 0 else size for size in self.sizes(source))
                params = QuantParams(before / np.float32(FINER_STEPS), 0, 16)
                finer = self.tensor(f"{ends[1].name.decode()}/finer", shape, "int16", params)
                self.operator("QUANTIZE", [source], [finer])
                source = finer
        self.operator("QUANTIZE", [source], [target])

    def copy(self, source: int, target: int) -> None:
        """Adds a RESHAPE or SLICE that copies all values of `source` to `target`."""
        sizes = self.sizes(target)
        if sizes.count(-1) > 1:  # RESHAPE infers only one size.
            begin = self.constant("begin", np.zeros(len(sizes), np.int32))
            full_size = self.constant("size", np.full(len(sizes), -1, np.int32))
            self.operator("SLICE", [source, begin, full_size], [target])
            return
        shape = np.array(sizes, np.int32)
        inputs = [source, self.constant("shape", shape)]
        self.operator("RESHAPE", inputs, [target], newShape=shape)

    def opcode(self, number: int, version: int, custom: str = "") -> int:
        """Returns the index of an operator in the file's list. Adds it if it is missing."""
        key = (number, custom, version)
        if key not in self._opcodes:
            # Old runtimes read a code up to 127 from a separate field.
            codes = {"builtinCode": number, "deprecatedBuiltinCode": min(number, 127)}
            code = new(
                "OperatorCodeT", **codes, version=version, customCode=custom.encode() or None
            )
            self.model.operatorCodes.append(code)
            self._opcodes[key] = len(self.model.operatorCodes) - 1
        return self._opcodes[key]

    def metadata(self, name: str, data: bytes) -> None:
        buffer = self.buffer(np.frombuffer(data, np.uint8))
        self.model.metadata.append(new("MetadataT", name=name.encode(), buffer=buffer))

    def finish(
        self,
        inputs: dict[str, int],
        outputs: dict[str, int],
        rewrite: Callable[[Builder], None] | None = None,
        **metadata: object,
    ) -> bytes:
        """Returns the contents of the file. `inputs` and `outputs` map names to tensor indices.

        `rewrite` is a function that may change the operators before the file is packed.
        """
        self._prepare()
        self.graph.inputs = np.array(list(inputs.values()), np.int32)
        self.graph.outputs = np.array(list(outputs.values()), np.int32)
        maps = [
            [new("TensorMapT", name=key.encode(), tensorIndex=i) for key, i in tensors.items()]
            for tensors in (inputs, outputs)
        ]
        signature = {"inputs": maps[0], "outputs": maps[1], "signatureKey": SIGNATURE}
        self.model.signatureDefs = [new("SignatureDefT", **signature, subgraphIndex=0)]
        if rewrite is not None:
            rewrite(self)
        oldest = find_min_runtime_version(self.model.operatorCodes).encode()
        self.metadata("min_runtime_version", oldest.ljust(16, b"\0"))
        for name, entry in metadata.items():
            self.metadata(name, compress(entry))
        data = [buffer.data for buffer in self.model.buffers if buffer.data is not None]
        packer = _Packer(sum(array.size for array in data) + 2**17)
        packer.Finish(self.model.Pack(packer), b"TFL3")
        return bytes(packer.Output())
