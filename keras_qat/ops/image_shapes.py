"""Reshapes tensors to the images that convolutions take: [batch, height, width, channels]."""

from __future__ import annotations

import math
from typing import Any

from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.ops.emission import Emission

Shape = tuple[int | None, ...]

ONE_PIXEL = {"padding": schema.Padding.VALID, "strideH": 1, "strideW": 1}
"""Options of a convolution with a kernel of one pixel."""


def as_pair(sizes: Any) -> tuple[int, int]:
    """Returns a size for each axis of an image, from one number or from one or two sizes."""
    if isinstance(sizes, int):
        return sizes, sizes
    return (1, int(sizes[0])) if len(sizes) == 1 else (int(sizes[0]), int(sizes[1]))


def _image_shape(shape: Shape) -> Shape:
    """Returns the shape of an image: [batch, 1, steps, channels] for [batch, steps, channels].

    Images keep their shape. In other tensors each vector of channels becomes an image.
    """
    if len(shape) == 3:
        return shape[0], 1, *shape[1:]
    if len(shape) == 4:
        return shape
    known = math.prod(size for size in shape[:-1] if size is not None)
    return (None if None in shape[:-1] else known), 1, 1, shape[-1]


def _is_open(shape: Shape) -> bool:
    """Returns whether a sequence has more open sizes than a RESHAPE can infer."""
    return len(shape) == 3 and shape.count(None) > 1


def as_image(e: Emission, source: int) -> int:
    """Returns a tensor as an image, reshaped if necessary."""
    shape = e.shape(source)
    if not _is_open(shape):
        return e.reshaped(source, _image_shape(shape), "image")
    image = e.temporary("image", _image_shape(shape), source)
    e.add("EXPAND_DIMS", [source, e.constant("axis", 1)], [image])
    return image


def make_image_output(e: Emission, target: int) -> int:
    """Returns the image that `emit_from_image` turns into `target`; or `target` itself."""
    shape = e.shape(target)
    return target if len(shape) == 4 else e.temporary("image_output", _image_shape(shape), target)


def emit_from_image(e: Emission, image: int, target: int) -> None:
    """Reshapes an image to a tensor's shape, unless it is that tensor."""
    if image != target and _is_open(e.shape(target)):
        e.add("SQUEEZE", [image], [target], squeezeDims=[1])
    elif image != target:
        e.reshape(image, target)


def emit_on_images(
    e: Emission, code: str, inputs: list[int], target: int | None = None, **options: Any
) -> None:
    """Adds an operator on images, with its fused ReLU, for tensors of any shape.

    Args:
        e: the operator.
        code: its name in TFLite.
        inputs: the tensor that becomes an image, and further inputs.
        target: the tensor to write to, the output by default.
        options: its options.
    """
    target = e.outputs[0] if target is None else target
    image = make_image_output(e, target)
    inputs = [as_image(e, inputs[0]), *inputs[1:]]
    e.add(code, inputs, [image], fusedActivationFunction=e.activation, **options)
    emit_from_image(e, image, target)
