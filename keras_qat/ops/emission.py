"""Writes a node's operators into a TFLite file."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.ops.node import Node
from keras_qat.ops.op import Attributes
from keras_qat.ops.weights import Weights
from keras_qat.tflite.builder import Builder
from keras_qat.tflite.schema import SCOPE, TYPE_NAMES, TYPES

Activation = schema.ActivationFunctionType


@dataclasses.dataclass(frozen=True)
class Emission:
    """Writes one node into a file.

    Args:
        builder: the file that is being built.
        node: the node.
        inputs: index of each input's tensor, constants of the call included.
        outputs: indices of the tensors to write to, with the quantization parameters that the
            operator's kernels return.
    """

    builder: Builder
    node: Node
    inputs: list[int]
    outputs: list[int]

    @property
    def attributes(self) -> Attributes:
        """The operator's options in this call."""
        return self.node.attributes

    @property
    def weights(self) -> Weights:
        """The weights of a weighted operator."""
        assert self.node.weights is not None
        return self.node.weights

    @property
    def params(self) -> QuantParams:
        """The quantization parameters of the node's output, which is quantized."""
        assert self.node.output.params is not None
        return self.node.output.params

    @property
    def input_params(self) -> QuantParams:
        """The quantization parameters of the node's first input, which is quantized."""
        params = self.node.inputs[0].params
        assert params is not None
        return params

    @property
    def all_params(self) -> list[QuantParams]:
        """The quantization parameters of the inputs that are quantized, in order."""
        return [x.params for x in self.node.inputs if x.params is not None]

    @property
    def source(self) -> int:
        """The tensor whose values an operator moves. Other inputs are integers, such as indices."""
        inputs = zip(self.inputs, self.node.inputs, strict=True)
        return next((index for index, x in inputs if x.params is not None), self.inputs[0])

    @property
    def wide(self) -> bool:
        """True if activations have 16 bits."""
        return self.builder.graph.tensors[self.inputs[0]].type == schema.TensorType.INT16

    @property
    def activation(self) -> int:
        """The fused activation of an operator: none, ReLU or ReLU6.

        A ReLU with another maximum is an ordinary ReLU, as the output's range ends there too.
        """
        if self.node.maximum is None:
            return Activation.NONE
        return Activation.RELU6 if self.ends_at_6(self.node.maximum) else Activation.RELU

    def ends_at_6(self, maximum: float) -> bool:
        """Returns whether a ReLU clips at 6 inside the range: kernels refuse a 6 far outside it."""
        params = self.params
        return maximum == 6 and bool(6 / params.scale < params.highest - params.zero_point)

    def add(
        self,
        code: str,
        inputs: list[int] | None = None,
        outputs: list[int] | None = None,
        **options: Any,
    ) -> None:
        """Adds an operator, by default with all inputs and outputs of the node.

        `options` without a value keep the schema's defaults; `intermediates` may be among them.
        """
        self.builder.operator(
            code,
            self.inputs if inputs is None else inputs,
            self.outputs if outputs is None else outputs,
            **options,
        )

    def constant(
        self, name: str, values: Any, params: QuantParams | None = None, **options: Any
    ) -> int:
        """Adds a constant named after the node: an array, or integers, which become int32.

        `options` are those of `Builder.constant`.
        """
        if not isinstance(values, (np.ndarray, np.generic)):
            values = np.array(values, np.int32)
        return self.builder.constant(f"{SCOPE}/{self.node.name}/{name}", values, params, **options)

    def temporary(
        self, name: str, shape: tuple[int | None, ...], like: int | str | QuantParams
    ) -> int:
        """Adds a tensor between two operators of the node.

        `like` is its type, its quantization parameters, or the index of a similar tensor.
        """
        name = f"{SCOPE}/{self.node.name}/{name}"
        if isinstance(like, QuantParams):
            return self.builder.tensor(name, shape, like.dtype.name, like)
        if isinstance(like, str):
            return self.builder.tensor(name, shape, like)
        return self.builder.similar(like, shape, name)

    def shape(self, index: int) -> tuple[int | None, ...]:
        """Returns the shape of a tensor, None for open sizes."""
        return tuple(None if size < 0 else int(size) for size in self.builder.sizes(index))

    def dtype(self, index: int) -> str:
        """Returns the type of a tensor."""
        return TYPE_NAMES[self.builder.graph.tensors[index].type]

    def cast(self, source: int, target: int) -> None:
        """Adds a CAST of one tensor to the type of another."""
        before, after = (self.builder.graph.tensors[end].type for end in (source, target))
        self.add("CAST", [source], [target], inDataType=before, outDataType=after)

    def reshape(self, source: int, target: int) -> None:
        """Adds a RESHAPE of one tensor to the shape of another.

        Several sizes may be open if they are the first ones of both tensors.
        """
        sizes = self.builder.sizes(target)
        if sizes.count(-1) > 1:
            self._reshape_behind(source, target, sizes)
            return
        shape = np.array(sizes, np.int32)
        self.add("RESHAPE", [source, self.constant("shape", shape)], [target], newShape=shape)

    def reshaped(self, source: int, shape: tuple[int | None, ...], name: str) -> int:
        """Returns a tensor in another shape, under a new name; itself if it has that shape."""
        if self.shape(source) == shape:
            return source
        target = self.temporary(name, shape, source)
        self.reshape(source, target)
        return target

    def transpose(
        self, source: int, order: Sequence[int], target: int | None = None, name: str = "transposed"
    ) -> int:
        """Adds a TRANSPOSE into `target`, by default a new tensor with this name.

        Returns:
            The transposed tensor; `source` if nothing changes and no target is given.
        """
        if target is None:
            if list(order) == sorted(order):
                return source
            shape = self.shape(source)
            target = self.temporary(name, tuple(shape[axis] for axis in order), source)
        self.add("TRANSPOSE", [source, self.constant("order", order)], [target])
        return target

    def _reshape_behind(self, source: int, target: int, sizes: list[int]) -> None:
        """Reshapes the axes after open ones, whose sizes are read at run time."""
        same = 0
        for before, after in zip(self.shape(source), self.shape(target), strict=False):
            if before != after:
                break
            same += 1
        if sizes[same:].count(-1) > 1:
            raise NotImplementedError(
                f"'{self.node.name}' needs a reshape to several open sizes, "
                f"{[int(size) for size in sizes]}, of which files know one. Give the model's "
                f"keras.Input its sizes: keras.Input((128,)) instead of keras.Input((None,))."
            )
        all_sizes = self.temporary("sizes", (len(self.shape(source)),), "int32")
        first = self.temporary("sizes/kept", (same,), "int32")
        shape = self.temporary("sizes/new", (len(sizes),), "int32")
        self.add("SHAPE", [source], [all_sizes], outType=TYPES["int32"])
        limits = [self.constant(f"sizes/{limit}", [limit]) for limit in (0, same)]
        self.add("SLICE", [all_sizes, *limits], [first])
        rest = self.constant("sizes/rest", sizes[same:])
        self.add("CONCATENATION", [first, rest], [shape], axis=0)
        self.add("RESHAPE", [source, shape], [target])
