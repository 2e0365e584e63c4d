"""Adds operators to a TFLite file. An `Emission` adds all TFLite operators for one node.

A `Node` is a quantized layer or operation. A Conv1D, for example, needs RESHAPE, CONV_2D and
RESHAPE.
"""

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
    """Adds the TFLite operators for one node to a file.

    Args:
        inputs: indices of the input tensors in the file. Constants that the node reads are
            included.
        outputs: indices of the output tensors in the file. They already have the quantization
            parameters that TFLite's kernel requires, such as the scale 1/256 for a SOFTMAX.
    """

    builder: Builder
    node: Node
    inputs: list[int]
    outputs: list[int]

    @property
    def attributes(self) -> Attributes:
        """The options of the operator, such as `axis` or `strides`."""
        return self.node.attributes

    @property
    def weights(self) -> Weights:
        """The quantized weights of the node, for example of a Dense layer."""
        assert self.node.weights is not None
        return self.node.weights

    @property
    def params(self) -> QuantParams:
        """The quantization parameters of the node's first output, which must be quantized."""
        assert self.node.output.params is not None
        return self.node.output.params

    @property
    def input_params(self) -> QuantParams:
        """The quantization parameters of the node's first input, which must be quantized."""
        params = self.node.inputs[0].params
        assert params is not None
        return params

    @property
    def all_params(self) -> list[QuantParams]:
        """The quantization parameters of the quantized inputs, in order."""
        return [x.params for x in self.node.inputs if x.params is not None]

    @property
    def source(self) -> int:
        """The index of the first quantized input, or otherwise of the first input."""
        inputs = zip(self.inputs, self.node.inputs, strict=True)
        return next((index for index, x in inputs if x.params is not None), self.inputs[0])

    @property
    def wide(self) -> bool:
        """Whether the first input is int16."""
        return self.builder.graph.tensors[self.inputs[0]].type == schema.TensorType.INT16

    @property
    def activation(self) -> int:
        """The fused activation in TFLite's schema: none, ReLU or ReLU6.

        A ReLU with a maximum other than 6 becomes a plain ReLU. The kernel still clips at this
        maximum, because the quantized range of the output ends there.
        """
        if self.node.maximum is None:
            return Activation.NONE
        return Activation.RELU6 if self.ends_at_6(self.node.maximum) else Activation.RELU

    def ends_at_6(self, maximum: float) -> bool:
        """Returns True if `maximum` is 6, and the output's range ends above 6.

        Otherwise, a plain ReLU is enough. A kernel with ReLU6 fails if the range ends far below 6.
        """
        params = self.params
        return maximum == 6 and bool(6 / params.scale < params.highest - params.zero_point)

    def add(
        self,
        code: str,
        inputs: list[int] | None = None,
        outputs: list[int] | None = None,
        **options: Any,
    ) -> None:
        """Adds a TFLite operator. By default, it has all inputs and outputs of the node.

        `options` are the operator's options in TFLite's schema, such as `axis`. The option
        `intermediates` lists the intermediate tensors of an LSTM.
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
        """Adds a constant tensor, and returns its index. `Builder.constant` defines `options`."""
        if not isinstance(values, (np.ndarray, np.generic)):
            values = np.array(values, np.int32)
        return self.builder.constant(f"{SCOPE}/{self.node.name}/{name}", values, params, **options)

    def temporary(self, name: str, shape: Shape, like: int | str | QuantParams) -> int:
        """Adds a tensor between two operators, and returns its index.

        `like` determines the type and the quantization parameters. It is a type, such as "int32",
        `QuantParams`, or the index of a similar tensor.
        """
        name = f"{SCOPE}/{self.node.name}/{name}"
        if isinstance(like, QuantParams):
            return self.builder.tensor(name, shape, like.dtype.name, like)
        if isinstance(like, str):
            return self.builder.tensor(name, shape, like)
        return self.builder.similar(like, shape, name)

    def shape(self, index: int) -> Shape:
        """Returns the shape of a tensor. Unknown sizes are None."""
        return tuple(None if size < 0 else int(size) for size in self.builder.sizes(index))

    def dtype(self, index: int) -> str:
        return TYPE_NAMES[self.builder.graph.tensors[index].type]

    def cast(self, source: int, target: int) -> None:
        before, after = (self.builder.graph.tensors[end].type for end in (source, target))
        self.add("CAST", [source], [target], inDataType=before, outDataType=after)

    def reshape(self, source: int, target: int) -> None:
        """Adds a RESHAPE of the tensor `source` to the shape of the tensor `target`.

        If several sizes are unknown, they must be the first sizes of both shapes. For example,
        [None, None, 4, 2] can become [None, None, 8].
        """
        sizes = self.builder.sizes(target)
        if sizes.count(-1) > 1:
            self._reshape_after_unknown(source, target, sizes)
            return
        shape = np.array(sizes, np.int32)
        self.add("RESHAPE", [source, self.constant("shape", shape)], [target], newShape=shape)

    def make_reshaped(self, source: int, shape: Shape, name: str) -> int:
        """Returns a tensor with this shape and the values of `source`.

        Returns `source` itself if it has this shape. Otherwise adds a RESHAPE.
        """
        if self.shape(source) == shape:
            return source
        target = self.temporary(name, shape, source)
        self.reshape(source, target)
        return target

    def transpose(
        self, source: int, order: Sequence[int], target: int | None = None, name: str = "transposed"
    ) -> int:
        """Adds a TRANSPOSE that writes to `target`, which by default is a new tensor.

        Returns:
            The index of the transposed tensor, or `source` if `order` changes nothing and `target`
            is None.
        """
        if target is None:
            if list(order) == sorted(order):
                return source
            shape = self.shape(source)
            target = self.temporary(name, tuple(shape[axis] for axis in order), source)
        self.add("TRANSPOSE", [source, self.constant("order", order)], [target])
        return target

    def _reshape_after_unknown(self, source: int, target: int, sizes: list[int]) -> None:
        """Add a RESHAPE that copies leading sizes of `source` at run time."""
        same = 0
        for before, after in zip(self.shape(source), self.shape(target), strict=False):
            if before != after:
                break
            same += 1
        if sizes[same:].count(-1) > 1:
            raise NotImplementedError(
                f"'{self.node.name}' reshapes to {[int(size) for size in sizes]}, but TFLite's "
                f"RESHAPE allows only one unknown size. Specify the sizes of the model's "
                f"keras.Input: keras.Input((128,)) instead of keras.Input((None,))."
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


# The inputs of convolutions are images: [batch, height, width, channels].

ONE_PIXEL = {"padding": schema.Padding.VALID, "strideH": 1, "strideW": 1}
"""Options of a convolution with a 1x1 kernel and strides of 1."""


def as_pair(sizes: Any) -> tuple[int, int]:
    """Returns a kernel size or strides as (height, width). For example, 3 becomes (3, 3).

    A layer for sequences has one size: [3] becomes (1, 3).
    """
    if isinstance(sizes, int):
        return sizes, sizes
    return (1, int(sizes[0])) if len(sizes) == 1 else (int(sizes[0]), int(sizes[1]))


def _image_shape(shape: Shape) -> Shape:
    """Return the shape [batch, height, width, channels] for a tensor. A sequence has height 1.

    A matrix [rows, channels] becomes [rows, 1, 1, channels]. With five axes, all axes except the
    last are merged into rows.
    """
    if len(shape) == 3:
        return shape[0], 1, *shape[1:]
    if len(shape) == 4:
        return shape
    known = math.prod(size for size in shape[:-1] if size is not None)
    return (None if None in shape[:-1] else known), 1, 1, shape[-1]


def _has_unknown_sizes(shape: Shape) -> bool:
    """Return True for a sequence with several unknown sizes. RESHAPE can infer only one size."""
    return len(shape) == 3 and shape.count(None) > 1


def as_image(e: Emission, source: int) -> int:
    """Returns a tensor as images [batch, height, width, channels]. Reshapes it if necessary."""
    shape = e.shape(source)
    if not _has_unknown_sizes(shape):
        return e.make_reshaped(source, _image_shape(shape), "image")
    image = e.temporary("image", _image_shape(shape), source)
    e.add("EXPAND_DIMS", [source, e.constant("axis", 1)], [image])
    return image


def make_image_output(e: Emission, target: int) -> int:
    """Returns a tensor of images that `emit_from_image` can reshape to `target`.

    Returns `target` itself if it contains images.
    """
    shape = e.shape(target)
    return target if len(shape) == 4 else e.temporary("image_output", _image_shape(shape), target)


def emit_from_image(e: Emission, image: int, target: int) -> None:
    """Adds a RESHAPE or a SQUEEZE from `image` to `target`. Does nothing if they are the same."""
    if image != target and _has_unknown_sizes(e.shape(target)):
        e.add("SQUEEZE", [image], [target], squeezeDims=[1])
    elif image != target:
        e.reshape(image, target)


def emit_on_images(
    e: Emission, code: str, inputs: list[int], target: int | None = None, **options: Any
) -> None:
    """Adds an operator that supports only images, such as CONV_2D.

    The first input is reshaped to images. The result is reshaped to `target`, by default the node's
    output. A ReLU of the node is fused.
    """
    target = e.outputs[0] if target is None else target
    image = make_image_output(e, target)
    inputs = [as_image(e, inputs[0]), *inputs[1:]]
    e.add(code, inputs, [image], fusedActivationFunction=e.activation, **options)
    emit_from_image(e, image, target)
