"""Lowering of TensorFlow's operations on images."""

from __future__ import annotations

import itertools
import math
from typing import Any

import tensorflow as tf

from keras_qat.frontend.graph import Call
from keras_qat.frontend.keras2.backend import keras
from keras_qat.frontend.tf_operations import operands
from keras_qat.lowering.builder import LoweringContext, PartsBuilder, replace_by

__all__ = ["split_old_resize", "split_patches", "split_resize"]

_layers = keras.layers


def split_resize(call: Call, context: LoweringContext) -> list[Call]:
    """tf.image.resize to a known size -> Resizing, where it can do the same."""
    names = ("images", "size", "method", "preserve_aspect_ratio", "antialias")
    _, _, method, *others = operands(call, *names)
    method, sizes = method or "bilinear", call.output.shape[1:3]
    is_image = len(call.output.shape) == 4 and None not in sizes
    if not is_image or any(others) or method not in ("bilinear", "nearest"):
        return []
    return replace_by(call, context, _layers.Resizing, *sizes, interpolation=method)


def split_old_resize(call: Call, context: LoweringContext) -> list[Call]:
    """The resize of TensorFlow 1 -> Resizing, of a single pixel: others it places otherwise."""
    before, sizes = call.inputs[0].shape, call.output.shape[1:3]
    if len(before) != 4 or tuple(before[1:3]) != (1, 1) or None in sizes:
        return []
    return replace_by(call, context, _layers.Resizing, *sizes, interpolation="nearest")


def split_patches(call: Call, context: LoweringContext) -> list[Call]:
    """tf.image.extract_patches -> tf.nn.space_to_depth, or crops side by side if they overlap.

    Where they do not begin at every pixel, a pooling of one pixel takes every n-th.
    """
    x, *given, padding = operands(call, "images", "sizes", "strides", "rates", "padding")
    options, shape = [_of_axes(each) for each in given], [each or 0 for each in x.shape[1:3]]
    if not all(options) or 0 in shape:
        return []
    sizes, strides, rates = options
    parts = PartsBuilder(call, context)
    are_blocks = sizes == strides == [sizes[0]] * 2 and rates == [1, 1] and sizes[0] > 1
    if are_blocks and not any(each % sizes[0] for each in shape):
        return parts.end(parts.new("", type(call.layer), tf.nn.space_to_depth), x, sizes[0])
    if math.prod(sizes) > MOST_CROPS:
        return []
    counts = [each or 0 for each in call.output.shape[1:3]]
    spans = [stride * (count - 1) + 1 for stride, count in zip(strides, counts, strict=True)]
    reach = [span + rate * (size - 1) for span, size, rate in zip(spans, sizes, rates, strict=True)]
    more = [max(0, end - size) for end, size in zip(reach, shape, strict=True)]
    if padding == "SAME" and any(more):
        pairs = [(each // 2, each - each // 2) for each in more]
        x = parts.add(parts.new("padded", _layers.ZeroPadding2D, pairs), x)
    crops = []
    for place in itertools.product(*map(range, sizes)):
        begins = [rate * at for rate, at in zip(rates, place, strict=True)]
        ends = zip(x.shape[1:3], begins, spans, strict=True)
        around = [(begin, size - begin - span) for size, begin, span in ends]
        name = "_".join(map(str, place))
        crop = parts.add(parts.new(f"crop_{name}", _layers.Cropping2D, around), x)
        if strides != [1, 1]:
            crop = parts.add(parts.new(f"take_{name}", _layers.MaxPooling2D, 1, strides), crop)
        crops.append(crop)
    return parts.end(parts.new("", _layers.Concatenate), crops)


MOST_CROPS = 64
"""Patches with more pixels than that stay in float."""


def _of_axes(given: Any) -> list[int]:
    """Options of height and width, none if they are not known or others are not 1."""
    found = tf.nest.flatten(given)
    known = len(found) == 4 and all(isinstance(each, int) for each in found)
    return found[1:3] if known and found[0] == found[3] == 1 else []
