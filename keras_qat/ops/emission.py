"""Adds the operators of a node to a TFLite file."""

from __future__ import annotations

import dataclasses
import math
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
Shape = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Emission:
    """Adds one node to a file.

    Args:
        builder: the file that is being built.
        node: the node.
        inputs: index of the tensor of each input, including constants of the call.
        outputs: indices of the output tensors, which have the parameters that the kernels require.
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
        """Whether activations have 16 bits."""
        return self.builder.graph.tensors[self.inputs[0]].type == schema.TensorType.INT16

    @property
    def activation(self) -> int:
        """The fused activation of an operator: none, ReLU or ReLU6.

        A ReLU with another maximum is a plain ReLU, because the output's range ends there too.
        """
        if self.node.maximum is None:
            return Activation.NONE
        return Activation.RELU6 if self.ends_at_6(self.node.maximum) else Activation.RELU

    def ends_at_6(self, maximum: float) -> bool:
        """Whether a ReLU clips at 6 inside the range. Kernels refuse 6 far outside of it."""
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

        `options` that are None keep the schema's defaults. `intermediates` may be one of them.
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
        """Adds a constant: an array, or integers as int32. Its name starts with the node's name.

        `options` are arguments of `Builder.constant`.
        """
        if not isinstance(values, (np.ndarray, np.generic)):
            values = np.array(values, np.int32)
        return self.builder.constant(f"{SCOPE}/{self.node.name}/{name}", values, params, **options)

    def temporary(self, name: str, shape: Shape, like: int | str | QuantParams) -> int:
        """Adds a tensor between two operators of the node.

        `like` is its type, its quantization parameters, or the index of a similar tensor.
        """
        name = f"{SCOPE}/{self.node.name}/{name}"
        if isinstance(like, QuantParams):
            return self.builder.tensor(name, shape, like.dtype.name, like)
        if isinstance(like, str):
            return self.builder.tensor(name, shape, like)
        return self.builder.similar(like, shape, name)

    def shape(self, index: int) -> Shape:
        """Returns the shape of a tensor, with None for unknown sizes."""
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

        Several sizes may be unknown if they are the first sizes of both tensors.
        """
        sizes = self.builder.sizes(target)
        if sizes.count(-1) > 1:
            self._reshape_after_unknown(source, target, sizes)
            return
        shape = np.array(sizes, np.int32)
        self.add("RESHAPE", [source, self.constant("shape", shape)], [target], newShape=shape)

    def make_reshaped(self, source: int, shape: Shape, name: str) -> int:
        """Returns a new tensor with another shape, or `source` if it has that shape."""
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

    def _reshape_after_unknown(self, source: int, target: int, sizes: list[int]) -> None:
        """Reshape the axes after the axes of unknown size. Their sizes are read at run time."""
        same = 0
        for before, after in zip(self.shape(source), self.shape(target), strict=False):
            if before != after:
                break
            same += 1
        if sizes[same:].count(-1) > 1:
            raise NotImplementedError(
                f"'{self.node.name}' needs a reshape to several unknown sizes, "
                f"{[int(size) for size in sizes]}, but a file can have only one. Specify the sizes "
                f"of the model's keras.Input: keras.Input((128,)) instead of keras.Input((None,))."
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


# Convolutions read images: [batch, height, width, channels].

ONE_PIXEL = {"padding": schema.Padding.VALID, "strideH": 1, "strideW": 1}
"""Options of a convolution with a kernel of one pixel."""


def as_pair(sizes: Any) -> tuple[int, int]:
    """Returns sizes for both axes of an image, given one size, or a list of one or two."""
    if isinstance(sizes, int):
        return sizes, sizes
    return (1, int(sizes[0])) if len(sizes) == 1 else (int(sizes[0]), int(sizes[1]))


def _image_shape(shape: Shape) -> Shape:
    """Return the shape of an image: [batch, 1, steps, channels] for [batch, steps, channels].

    Images keep their shape. In other tensors each vector of channels becomes a one-pixel image.
    """
    if len(shape) == 3:
        return shape[0], 1, *shape[1:]
    if len(shape) == 4:
        return shape
    known = math.prod(size for size in shape[:-1] if size is not None)
    return (None if None in shape[:-1] else known), 1, 1, shape[-1]


def _has_unknown_sizes(shape: Shape) -> bool:
    """Whether a sequence has more unknown sizes than a RESHAPE can infer."""
    return len(shape) == 3 and shape.count(None) > 1


def as_image(e: Emission, source: int) -> int:
    """Returns a tensor as an image, reshaped if necessary."""
    shape = e.shape(source)
    if not _has_unknown_sizes(shape):
        return e.make_reshaped(source, _image_shape(shape), "image")
    image = e.temporary("image", _image_shape(shape), source)
    e.add("EXPAND_DIMS", [source, e.constant("axis", 1)], [image])
    return image


def make_image_output(e: Emission, target: int) -> int:
    """Returns the image that `emit_from_image` will reshape to `target`, or `target` itself."""
    shape = e.shape(target)
    return target if len(shape) == 4 else e.temporary("image_output", _image_shape(shape), target)


def emit_from_image(e: Emission, image: int, target: int) -> None:
    """Reshapes an image to a tensor's shape, unless it is that tensor."""
    if image != target and _has_unknown_sizes(e.shape(target)):
        e.add("SQUEEZE", [image], [target], squeezeDims=[1])
    elif image != target:
        e.reshape(image, target)


def emit_on_images(
    e: Emission, code: str, inputs: list[int], target: int | None = None, **options: Any
) -> None:
    """Adds an operator on images, with its fused ReLU, for tensors of any shape.

    The first of the `inputs` is reshaped to an image, and the result to `target`, by default the
    output.
    """
    target = e.outputs[0] if target is None else target
    image = make_image_output(e, target)
    inputs = [as_image(e, inputs[0]), *inputs[1:]]
    e.add(code, inputs, [image], fusedActivationFunction=e.activation, **options)
    emit_from_image(e, image, target)
