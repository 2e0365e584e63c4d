"""Between sequences and images: kernels have two axes to go along, one-dimensional layers one."""

from __future__ import annotations

from typing import Any

from keras_qat.tflite.emission import Emission

__all__ = ["from_image", "image_of", "image_shape", "pair"]


def pair(sizes: Any) -> tuple[int, int]:
    """A size for each axis of an image, from one number, one for steps or two."""
    if isinstance(sizes, int):
        return sizes, sizes
    return (1, int(sizes[0])) if len(sizes) == 1 else (int(sizes[0]), int(sizes[1]))


def image_shape(shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """[batch, steps, channels] as [batch, 1, steps, channels]; images stay."""
    return (shape[0], 1, *shape[1:]) if len(shape) == 3 else shape


def image_of(e: Emission, source: int) -> int:
    """A tensor as an image, reshaped if it is a sequence."""
    shape = e.shape(source)
    if len(shape) != 3:
        return source
    image = e.temporary("image", image_shape(shape), source)
    if shape.count(None) > 1:
        e.add("EXPAND_DIMS", [source, e.constant("axis", 1)], [image], "ExpandDimsOptions")
    else:
        e.reshape(source, image)
    return image


def from_image(e: Emission, target: int) -> tuple[int, Any]:
    """Where to write an image that becomes `target`, and what adds that step afterwards."""
    shape = e.shape(target)
    if len(shape) != 3:
        return target, lambda: None
    image = e.temporary("image_output", image_shape(shape), target)

    def finish() -> None:
        if shape.count(None) > 1:
            e.add("SQUEEZE", [image], [target], "SqueezeOptions", squeezeDims=[1])
        else:
            e.reshape(image, target)

    return image, finish
