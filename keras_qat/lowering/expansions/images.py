"""Expands operations and layers on images to those that have integer kernels."""

from __future__ import annotations

import itertools
import math
from typing import Any

import tensorflow as tf

from keras_qat.helper_layers.operations import TrainingOnly
from keras_qat.keras2.backend import keras, layers
from keras_qat.keras2.layers_and_models import clone
from keras_qat.lowering.expand_call import Expansion, call_of, require
from keras_qat.ops.movement import window
from keras_qat.ops.resize import options_of_resize

KERNELS = ("bilinear", "nearest")
"""Methods of TFLite's kernels."""

MOST_CROPS = 64
"""Patches with more pixels than this stay in float."""


def _resize(
    images: Any,
    size: Any,
    method: Any = "bilinear",
    preserve_aspect_ratio: Any = False,
    antialias: Any = False,
    name: Any = None,
) -> Any:
    result = call_of(images).output.shape
    require(len(result) == 4 and None not in result[1:3] and method in KERNELS)
    require(not preserve_aspect_ratio and not antialias)
    return layers.Resizing(*result[1:3], interpolation=method)(images)


def _old_resize(images: Any, *args: Any, **options: Any) -> Any:
    """Resize a single pixel as TensorFlow 1 does; larger images differ."""
    before, sizes = images.shape, call_of(images).output.shape[1:3]
    require(len(before) == 4 and tuple(before[1:3]) == (1, 1) and None not in sizes)
    return layers.Resizing(*sizes, interpolation="nearest")(images)


def _convert(image: Any, dtype: Any, saturate: Any = False, name: Any = None) -> Any:
    """Cast pixels, and multiply them by 1 / 255."""
    require(image.dtype in (tf.uint8, tf.int8, tf.uint16, tf.int16) and dtype == tf.float32)
    real = tf.cast(image, dtype="float32", name="cast")
    return tf.multiply(real, 1.0 / image.dtype.max)


def _patches(
    images: Any, sizes: Any, strides: Any, rates: Any, padding: Any, name: Any = None
) -> Any:
    """Use `tf.nn.space_to_depth`, or crops if patches overlap.

    If patches do not begin at every pixel, a strided pooling of one pixel thins out the crops.
    """
    windows = [window(option, 2) for option in (sizes, strides, rates)]
    require(all(windows) and None not in images.shape[1:3])
    sizes, strides, rates = windows
    are_blocks = sizes == strides == (sizes[0],) * 2 and rates == (1, 1) and sizes[0] > 1
    if are_blocks and not any(size % sizes[0] for size in images.shape[1:3]):
        return tf.nn.space_to_depth(images, sizes[0])
    require(math.prod(sizes) <= MOST_CROPS)
    counts = [size or 0 for size in call_of(images).output.shape[1:3]]
    spans = [stride * (count - 1) + 1 for stride, count in zip(strides, counts, strict=True)]
    reach = [span + rate * (size - 1) for span, size, rate in zip(spans, sizes, rates, strict=True)]
    more = [max(0, end - size) for end, size in zip(reach, images.shape[1:3], strict=True)]
    if padding == "SAME" and any(more):
        pairs = [(total // 2, total - total // 2) for total in more]
        images = layers.ZeroPadding2D(pairs, name="padded")(images)
    crops = []
    for offset in itertools.product(*map(range, sizes)):
        begins = [rate * at for rate, at in zip(rates, offset, strict=True)]
        ends = zip(images.shape[1:3], begins, spans, strict=True)
        around = [(begin, size - begin - span) for size, begin, span in ends]
        name = "_".join(map(str, offset))
        crop = layers.Cropping2D(around, name=f"crop_{name}")(images)
        if strides != (1, 1):
            crop = layers.MaxPooling2D(1, strides, name=f"take_{name}")(crop)
        crops.append(crop)
    return layers.Concatenate()(crops)


def _resize_layer(layer: Any, x: Any) -> Any:
    """Use `tf.image.resize` for methods that TFLite's kernels do not have."""
    call = call_of(x)
    options, sizes = options_of_resize(call), list(call.output.shape[1:3])
    require(len(x.shape) == 4 and options["channels_last"])
    require(None not in (*sizes, options["crop"]) and layer.interpolation not in KERNELS)
    if options["crop"]:
        ends = zip(options["crop"], x.shape[1:3], strict=True)
        cropping = [(begin, size - end) for (begin, end, _), size in ends]
        x = layers.Cropping2D(cropping, name="crop")(x)
    return tf.image.resize(x, sizes, method=layer.interpolation)


def _random_crop(layer: Any, x: Any, **options: Any) -> Any:
    """Crop in training, and at inference crop to the new ratio and resize."""
    require(len(x.shape) == 4 and None not in x.shape[1:])
    (rows, columns), (height, width) = x.shape[1:3], (layer.height, layer.width)
    kept = min(rows, columns * height // width), min(columns, rows * width // height)
    margins = rows - kept[0], columns - kept[1]
    crop = [(margin // 2, margin - margin // 2) for margin in margins]
    y = layers.Cropping2D(crop, name="crop")(x)
    y = layers.Resizing(height, width, name="resize")(y)
    image = keras.Input(x.shape[1:], dtype=x.dtype)
    return TrainingOnly(keras.Model(image, clone(layer)(image)))(y, given=[x])


IMAGES: dict[str, Expansion] = {
    "resize": _resize,
    "v1_resize_images": _old_resize,
    "convert_image_dtype": _convert,
    "extract_patches": _patches,
}
"""Kind of an operation -> its expansion."""

IMAGE_LAYERS: dict[type, Expansion] = {
    layers.RandomCrop: _random_crop,
    **dict.fromkeys((layers.UpSampling2D, layers.Resizing), _resize_layer),
}
"""Layer class -> a function of the layer and its input."""
