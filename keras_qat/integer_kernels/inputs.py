"""What a kernel without weights computes with: the operands of a call, its options, its layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.keras2.backend import keras
from keras_qat.keras2.graph import Call, Value, map_values, takes_training
from keras_qat.operations import argument, is_operation

__all__ = ["axis_of", "compute", "constant", "interpolated", "operands"]


def operands(call: Call, tensors: list[Any], constants: Callable[[np.ndarray], Any]) -> list[Any]:
    """For each number that a call computes with one of `tensors`, or what `constants` makes."""
    given = iter(tensors)
    found = []
    for leaf in tf.nest.flatten((call.args, call.kwargs)):
        if isinstance(leaf, Value):
            found.append(next(given))
        elif leaf is not None and not isinstance(leaf, (str, bool)):
            found.append(constants(np.asarray(leaf, np.float32)))
    return found


def constant(values: np.ndarray) -> tuple[np.ndarray, np.float32, int]:
    """A constant as the converter quantizes it: 256 int8 codes over its values and zero.

    Returns:
        Its steps, in float32, the scale and the zero point.
    """
    low, high = (float(function(values, initial=0.0)) for function in (np.min, np.max))
    scale = (high - low) / 255 or 1.0
    zero_point = -128 + int(np.rint(-low / scale))
    codes = values / np.float32(scale) + np.float32(zero_point)
    codes = np.copysign(np.floor(np.abs(codes) + np.float32(0.5)), codes)
    steps = np.clip(codes, -128, 127) - zero_point
    # Before NumPy 2 a single number becomes a float64.
    return steps.astype(np.float32), np.float32(scale), zero_point


def compute(call: Call, numbers: list[Any]) -> Any:
    """A call's layer on other numbers."""
    here = iter(numbers)
    args, kwargs = map_values(lambda value: next(here), (call.args, call.kwargs))
    if takes_training(call.layer):
        kwargs = {**kwargs, "training": False}
    return call.layer.call(*args, **kwargs)


def axis_of(call: Call) -> int:
    """The axis of a softmax: the last one if it does not say."""
    axis = getattr(call.layer, "axis", -1)
    if is_operation(call.layer):
        axis = argument(call, "axis", 1)
    return -1 if axis is None else int(axis)


def interpolated(call: Call, x: Any, neighbours: Callable[[Any, Any], Any], bits: int) -> Any:
    """Sums of the four codes next to each pixel of a resized image, times their shares.

    Args:
        call: of a layer that resizes.
        x: the images' codes, int64.
        neighbours: from an axis' sizes before and after to the two places next to each pixel, and
            the second one's share in whole numbers of 1 / 2^`bits`.
        bits: of a share. The sums have twice as many behind the point.
    """
    layer = call.layer
    if isinstance(layer, keras.layers.Resizing):
        sizes = [layer.height, layer.width]
    else:
        sizes = [tf.shape(x)[axis + 1] * layer.size[axis] for axis in (0, 1)]
    for axis, size in zip((1, 2), sizes, strict=True):
        low, high, share = neighbours(tf.shape(x)[axis], tf.convert_to_tensor(size))
        share = tf.reshape(share, [-1 if each == axis else 1 for each in range(4)])
        first, second = tf.gather(x, low, axis=axis), tf.gather(x, high, axis=axis)
        x = first * (2**bits - share) + second * share
    return x
