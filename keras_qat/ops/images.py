"""Tensors as the images that kernels of convolutions take: [batch, height, width, channels]."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from keras_qat.tflite.emission import Emission

__all__ = ["from_image", "image_of", "image_shape", "pair"]


def pair(sizes: Any) -> tuple[int, int]:
    """A size for each axis of an image, from one number, one for steps or two."""
    if isinstance(sizes, int):
        return sizes, sizes
    return (1, int(sizes[0])) if len(sizes) == 1 else (int(sizes[0]), int(sizes[1]))


def image_shape(shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """[batch, steps, channels] as [batch, 1, steps, channels]; images stay.

    Of other tensors each vector of channels becomes an image.
    """
    if len(shape) == 3:
        return shape[0], 1, *shape[1:]
    if len(shape) == 4:
        return shape
    known = math.prod(size for size in shape[:-1] if size is not None)
    return (None if None in shape[:-1] else known), 1, 1, shape[-1]


def image_of(e: Emission, source: int) -> int:
    """A tensor as an image, reshaped if it is none."""
    shape = e.shape(source)
    if len(shape) == 4:
        return source
    image = e.temporary("image", image_shape(shape), source)
    if len(shape) == 3 and shape.count(None) > 1:
        e.add("EXPAND_DIMS", [source, e.constant("axis", 1)], [image], "ExpandDimsOptions")
    else:
        e.reshape(source, image)
    return image


def from_image(e: Emission, target: int) -> tuple[int, Callable[[], None]]:
    """Where to write an image that becomes `target`, and what adds that step afterwards."""
    shape = e.shape(target)
    if len(shape) == 4:
        return target, lambda: None
    image = e.temporary("image_output", image_shape(shape), target)

    def finish() -> None:
        if len(shape) == 3 and shape.count(None) > 1:
            e.add("SQUEEZE", [image], [target], "SqueezeOptions", squeezeDims=[1])
        else:
            e.reshape(image, target)

    return image, finish
