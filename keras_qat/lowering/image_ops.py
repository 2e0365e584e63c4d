"""Lowers TensorFlow's operations on images."""

from __future__ import annotations

import itertools
import math

import tensorflow as tf

from keras_qat.graph.calls import Call
from keras_qat.graph.tf_operations import operands, operation_class
from keras_qat.helper_layers.operations import TrainingOnly
from keras_qat.keras2.backend import keras, layers
from keras_qat.keras2.layers_and_models import clone
from keras_qat.lowering.builder import LoweringContext, PartsBuilder, replace_by
from keras_qat.ops.movement import window
from keras_qat.ops.resize import options_of_resize

KERNELS = ("bilinear", "nearest")
"""Methods of TFLite's kernels."""


def split_resize(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers tf.image.resize to a known size to Resizing, for the options that Resizing has."""
    names = ("images", "size", "method", "preserve_aspect_ratio", "antialias")
    _, _, method, *other_arguments = operands(call, *names)
    method, sizes = method or "bilinear", call.output.shape[1:3]
    is_image = len(call.output.shape) == 4 and None not in sizes
    if not is_image or any(other_arguments) or method not in KERNELS:
        return []
    return replace_by(call, context, layers.Resizing, *sizes, interpolation=method)


def split_resizing_layer(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers UpSampling2D and Resizing by other methods than TFLite's to tf.image.resize."""
    layer, x, sizes = call.layer, call.inputs[0], list(call.output.shape[1:3])
    options = options_of_resize(call)
    is_image = len(x.shape) == 4 and options["channels_last"]
    if not is_image or None in (*sizes, options["crop"]) or layer.interpolation in KERNELS:
        return []
    parts = PartsBuilder(call, context)
    if options["crop"]:
        ends = zip(options["crop"], x.shape[1:3], strict=True)
        cropping = [(begin, size - end) for (begin, end, _), size in ends]
        x = parts.add(parts.new("crop", layers.Cropping2D, cropping), x)
    resize = parts.new("", operation_class(), tf.image.resize)
    return parts.end(resize, x, sizes, kwargs={"method": layer.interpolation})


def split_old_resize(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers TensorFlow 1's resize of a single pixel to Resizing; larger images differ."""
    before, sizes = call.inputs[0].shape, call.output.shape[1:3]
    if len(before) != 4 or tuple(before[1:3]) != (1, 1) or None in sizes:
        return []
    return replace_by(call, context, layers.Resizing, *sizes, interpolation="nearest")


def split_converted(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers tf.image.convert_image_dtype of pixels to a cast, and a product with 1 / 255."""
    x, dtype = operands(call, "image", "dtype")
    most = tf.as_dtype(x.dtype).max
    if x.is_float or x.dtype not in ("uint8", "int8", "uint16", "int16") or dtype != tf.float32:
        return []
    parts = PartsBuilder(call, context)
    cast = parts.new("cast", operation_class(), tf.cast)
    real = parts.add(cast, x, kwargs={"dtype": "float32"}, shape=x.shape)
    return parts.end(parts.new("", operation_class(), tf.multiply), real, 1.0 / most)


def split_random_crop(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers RandomCrop to what it computes at inference: a crop of the new ratio, resized.

    In training it crops as before.
    """
    layer, x = call.layer, call.inputs[0]
    if len(x.shape) != 4 or None in x.shape[1:]:
        return []
    (rows, columns), (height, width) = x.shape[1:3], (layer.height, layer.width)
    kept = min(rows, columns * height // width), min(columns, rows * width // height)
    margins = rows - kept[0], columns - kept[1]
    parts = PartsBuilder(call, context)
    crop = [(margin // 2, margin - margin // 2) for margin in margins]
    y = parts.add(parts.new("crop", layers.Cropping2D, crop), x)
    y = parts.add(parts.new("resize", layers.Resizing, height, width), y)
    image = keras.Input(x.shape[1:], dtype=x.dtype)
    in_training = keras.Model(image, clone(layer)(image))
    last = parts.new("", TrainingOnly, in_training, weights=in_training.weights)
    return parts.end(last, y, kwargs={"given": [x]})


def split_patches(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers tf.image.extract_patches to tf.nn.space_to_depth, or to crops if patches overlap.

    Where patches do not begin at every pixel, a strided pooling of one pixel thins out the crops.
    """
    x, *options, padding = operands(call, "images", "sizes", "strides", "rates", "padding")
    options = [window(option, 2) for option in options]
    shape = [size or 0 for size in x.shape[1:3]]
    if not all(options) or 0 in shape:
        return []
    sizes, strides, rates = options
    parts = PartsBuilder(call, context)
    are_blocks = sizes == strides == (sizes[0],) * 2 and rates == (1, 1) and sizes[0] > 1
    if are_blocks and not any(size % sizes[0] for size in shape):
        return parts.end(parts.new("", type(call.layer), tf.nn.space_to_depth), x, sizes[0])
    if math.prod(sizes) > MOST_CROPS:
        return []
    counts = [size or 0 for size in call.output.shape[1:3]]
    spans = [stride * (count - 1) + 1 for stride, count in zip(strides, counts, strict=True)]
    reach = [span + rate * (size - 1) for span, size, rate in zip(spans, sizes, rates, strict=True)]
    more = [max(0, end - size) for end, size in zip(reach, shape, strict=True)]
    if padding == "SAME" and any(more):
        pairs = [(total // 2, total - total // 2) for total in more]
        x = parts.add(parts.new("padded", layers.ZeroPadding2D, pairs), x)
    crops = []
    for offset in itertools.product(*map(range, sizes)):
        begins = [rate * at for rate, at in zip(rates, offset, strict=True)]
        ends = zip(x.shape[1:3], begins, spans, strict=True)
        around = [(begin, size - begin - span) for size, begin, span in ends]
        name = "_".join(map(str, offset))
        crop = parts.add(parts.new(f"crop_{name}", layers.Cropping2D, around), x)
        if strides != (1, 1):
            crop = parts.add(parts.new(f"take_{name}", layers.MaxPooling2D, 1, strides), crop)
        crops.append(crop)
    return parts.end(parts.new("", layers.Concatenate), crops)


MOST_CROPS = 64
"""Patches with more pixels than this stay in float."""
