"""Resizing of images."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.fixed_point import divide, shift, shift_back
from keras_qat.arithmetic.plain_operations import quotient
from keras_qat.graph.calls import Call
from keras_qat.keras2.backend import layers
from keras_qat.ops.emission import Emission
from keras_qat.ops.movement import emit_by_converter, emit_slice, get_source, make_movement
from keras_qat.ops.op import Arguments, Attributes, Op, SharedRange


def read_resize_options(call: Call) -> Attributes:
    """Returns the options of a layer that resizes images. Unknown `height` and `width` are 0."""
    layer, shape = call.layer, call.output.shape
    is_first = getattr(layer, "data_format", "") == "channels_first"
    crops = getattr(layer, "crop_to_aspect_ratio", False)
    return {
        "height": shape[1] or 0 if len(shape) == 4 else 0,
        "width": shape[2] or 0 if len(shape) == 4 else 0,
        "interpolation": layer.interpolation,
        "crop": _crop(call.inputs[0].shape[1:3], shape[1:3]) if crops else (),
        "channels_last": not is_first,
    }


def _crop(old: Sequence[Any], new: Sequence[Any]) -> Any:
    """Return the slices that `crop_to_aspect_ratio` keeps. Return None if a size is unknown."""
    if None in (*old, *new):
        return None
    (height, width), (new_height, new_width) = old, new
    rows = min(height, int(np.float32(width * new_height) / np.float32(new_width)))
    columns = min(width, int(np.float32(height * new_width) / np.float32(new_height)))
    top, left = (int(np.float32(rest) / 2) for rest in (height - rows, width - columns))
    return ((top, top + rows, 1), (left, left + columns, 1)) if rows * columns else None


def _accepts(interpolation: str, call: Call, attributes: Attributes) -> str | None:
    asked = attributes["interpolation"]
    if asked != interpolation:
        return "" if interpolation == "nearest" else f"interpolation={asked!r}"
    if len(get_source(call).shape) != 4:
        return "not an image"
    if not attributes["channels_last"]:
        return "data_format='channels_first'"
    if interpolation == "bilinear" and not attributes["height"] * attributes["width"]:
        return "sizes are known only at run time"
    return None


def _row(interpolation: str, code: str, pixels: str, **fields: Any) -> Op:
    def emit(e: Emission) -> None:
        height, width, crop = (e.attributes[name] for name in ("height", "width", "crop"))
        if not height * width:
            emit_by_converter(e)
            return
        source, every = e.source, (None, None, 1)
        if crop:
            batch, *_, channels = e.shape(source)
            sizes = (end - begin for begin, end, _ in crop)
            part = e.temporary("cropped", (batch, *sizes, channels), source)
            emit_slice(e, source, part, (every, *crop, every))
            source = part
        inputs = [source, e.constant("size", [height, width])]
        e.add(code, inputs, halfPixelCenters=True)

    return make_movement(
        f"resize_{interpolation}",
        f"resized images, with {pixels} pixels",
        emit,
        layers=(layers.UpSampling2D, layers.Resizing),
        attributes=read_resize_options,
        needs=("height", "width"),
        defaults={"crop": (), "channels_last": True, "interpolation": interpolation},
        accepts=partial(_accepts, interpolation),
        integers=("uint8",) if interpolation == "nearest" else (),
        **fields,
    )


def _bilinear(a: Arguments) -> Any:
    """Resize images bilinearly, with integer weights of neighbouring pixels.

    XNNPACK's weights are multiples of 1/2048. It rounds once, halves up. TFLite's weights are
    multiples of 1/1024. It rounds halves away from zero.
    """
    bits = 11 if a.family.bilinear == "2048ths" and not a.wide else 10
    neighbours = _find_neighbours if bits == 11 else _find_neighbours_in_integers
    zero_point = tf.cast(a.params[0].zero_point, tf.int64)
    x = tf.cast(a.q[0], tf.int64) + zero_point
    if a.attributes["crop"]:
        (top, bottom, _), (left, right, _) = a.attributes["crop"]
        x = x[:, top:bottom, left:right]
    for axis, name in ((1, "height"), (2, "width")):
        low, high, share = neighbours(tf.shape(x)[axis], a.attributes[name])
        share = tf.reshape(share, [-1 if index == axis else 1 for index in range(4)])
        first, second = tf.gather(x, low, axis=axis), tf.gather(x, high, axis=axis)
        x = first * (2**bits - share) + second * share
    x = shift_back(x + 2**21, 22) if bits == 11 else divide(x, tf.constant(20, tf.int64))
    return tf.cast(x - zero_point, a.q[0].dtype)


def _find_neighbours(old: Any, new: int) -> tuple[Any, Any, Any]:
    """Return the indices of two old pixels for each new pixel, and the weight of the second."""
    scale = quotient(tf.cast(old, tf.float32), float(new))
    position = tf.cast(tf.range(new), tf.float32) * scale + (0.5 * scale - 0.5)
    position = tf.clip_by_value(position, 0.0, tf.cast(old - 1, tf.float32))
    low = tf.floor(position)
    share = tf.cast(tf.round((position - low) * 2.0**11), tf.int64)
    low = tf.cast(low, tf.int32)
    return low, tf.minimum(low + 1, old - 1), share


def _find_neighbours_in_integers(old: Any, new: int) -> tuple[Any, Any, Any]:
    """Compute the result of `_find_neighbours` in integers, as TFLite does."""
    old, count = tf.cast(old, tf.int64), tf.constant(new, tf.int64)
    scale = (shift(old, 10) + count // 2) // count
    position = tf.range(count) * scale + scale // 2 - 2**9
    low = tf.maximum(shift_back(position, 10), 0)
    high = tf.minimum(shift_back(position + 1023, 10), old - 1)
    return low, tf.maximum(high, 0), position - shift(low, 10)


RESIZE_NEAREST = _row("nearest", "RESIZE_NEAREST_NEIGHBOR", "copied")
RESIZE_BILINEAR = _row(
    "bilinear",
    "RESIZE_BILINEAR",
    "interpolated",
    compute=_bilinear,
    output=SharedRange(rounds=True),
)
