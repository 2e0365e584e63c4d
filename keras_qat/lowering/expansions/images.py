"""Expands operations and layers on images to operations with integer kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.helper_layers.operations import TrainingOnly
from keras_qat.keras2.backend import keras, layers
from keras_qat.keras2.layers_and_models import clone
from keras_qat.lowering.expand_call import Expansion, get_call, require, try_each
from keras_qat.lowering.expansions.matrices import expand_resize, multiply_by_matrix
from keras_qat.ops.movement import read_window
from keras_qat.ops.resize import read_resize_options

KERNELS = ("bilinear", "nearest")
"""Methods of `tf.image.resize` that have TFLite kernels."""

MOST_CROPS = 64
"""`tf.image.extract_patches` with more pixels per patch than this stays in float."""


def _resize(
    images: tf.Tensor,
    size: Any,
    method: str = "bilinear",
    preserve_aspect_ratio: bool = False,
    antialias: bool = False,
) -> tf.Tensor:
    result = get_call(images).output.shape
    require(len(result) == 4 and None not in result[1:3] and method in KERNELS)
    require(not preserve_aspect_ratio and not antialias)
    return layers.Resizing(*result[1:3], interpolation=method)(images)


def _old_resize(images: tf.Tensor, *args: object, **options: object) -> tf.Tensor:
    """Expand `tf.compat.v1.image.resize` of images with one pixel to a Resizing layer."""
    before, sizes = images.shape, get_call(images).output.shape[1:3]
    require(len(before) == 4 and tuple(before[1:3]) == (1, 1) and None not in sizes)
    return layers.Resizing(*sizes, interpolation="nearest")(images)


def _convert_type(image: tf.Tensor, dtype: tf.DType, saturate: bool = False) -> tf.Tensor:
    """Expand `convert_image_dtype` from integers to floats. The largest integer becomes 1."""
    require(image.dtype in (tf.uint8, tf.int8, tf.uint16, tf.int16) and dtype == tf.float32)
    real = tf.cast(image, dtype="float32", name="cast")
    return tf.multiply(real, 1.0 / image.dtype.max)


def _extract_patches(
    images: tf.Tensor, sizes: Any, strides: Any, rates: Any, padding: str
) -> tf.Tensor:
    """Expand `tf.image.extract_patches` to crops, which are concatenated along the channels.

    The first crop has the first pixels of all patches. The next one has their second pixels.
    Adjacent square patches become a `tf.nn.space_to_depth` instead.
    """
    windows = [read_window(option, 2) for option in (sizes, strides, rates)]
    require(all(windows) and None not in images.shape[1:3])
    sizes, strides, rates = windows
    are_blocks = sizes == strides == (sizes[0],) * 2 and rates == (1, 1) and sizes[0] > 1
    if are_blocks and not any(size % sizes[0] for size in images.shape[1:3]):
        return tf.nn.space_to_depth(images, sizes[0])
    require(math.prod(sizes) <= MOST_CROPS)
    counts = [size or 0 for size in get_call(images).output.shape[1:3]]
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


def _resize_layer(layer: keras.layers.Layer, x: tf.Tensor) -> tf.Tensor:
    """Replace a resize layer by `tf.image.resize` if TFLite lacks its method, such as bicubic."""
    call = get_call(x)
    options, sizes = read_resize_options(call), list(call.output.shape[1:3])
    require(len(x.shape) == 4 and options["channels_last"])
    require(None not in (*sizes, options["crop"]) and layer.interpolation not in KERNELS)
    if options["crop"]:
        ends = zip(options["crop"], x.shape[1:3], strict=True)
        cropping = [(begin, size - end) for (begin, end, _), size in ends]
        x = layers.Cropping2D(cropping, name="crop")(x)
    return tf.image.resize(x, sizes, method=layer.interpolation)


def _random_crop(layer: keras.layers.Layer, x: tf.Tensor, **options: object) -> tf.Tensor:
    """Expand RandomCrop to random crops in training, and a resized center crop at inference."""
    require(len(x.shape) == 4 and None not in x.shape[1:])
    (rows, columns), (height, width) = x.shape[1:3], (layer.height, layer.width)
    kept = min(rows, columns * height // width), min(columns, rows * width // height)
    margins = rows - kept[0], columns - kept[1]
    crop = [(margin // 2, margin - margin // 2) for margin in margins]
    y = layers.Cropping2D(crop, name="crop")(x)
    y = layers.Resizing(height, width, name="resize")(y)
    image = keras.Input(x.shape[1:], dtype=x.dtype)
    return TrainingOnly(keras.Model(image, clone(layer)(image)))(y, given=[x])


def _flip(axis: int) -> Callable[[Any], Any]:
    return lambda image: tf.reverse(image, [len(image.shape) + axis])


def _crop(
    image: tf.Tensor, offset_height: int, offset_width: int, target_height: int, target_width: int
) -> tf.Tensor:
    rows, columns = offset_height + target_height, offset_width + target_width
    return image[..., offset_height:rows, offset_width:columns, :]


def _pad(
    image: tf.Tensor, offset_height: int, offset_width: int, target_height: int, target_width: int
) -> tf.Tensor:
    *examples, height, width, _ = image.shape
    require(None not in (height, width))
    rows = offset_height, target_height - offset_height - height
    columns = offset_width, target_width - offset_width - width
    return tf.pad(image, [(0, 0)] * len(examples) + [rows, columns, (0, 0)])


def _crop_or_pad(image: tf.Tensor, target_height: int, target_width: int) -> tf.Tensor:
    height, width = image.shape[-3:-1]
    require(None not in (height, width))
    rows, columns = min(height, target_height), min(width, target_width)
    image = _crop(image, (height - rows) // 2, (width - columns) // 2, rows, columns)
    above, left = (target_height - rows) // 2, (target_width - columns) // 2
    return _pad(image, above, left, target_height, target_width)


def _resize_and_pad(
    image: tf.Tensor,
    target_height: int,
    target_width: int,
    method: str = "bilinear",
    antialias: bool = False,
) -> tf.Tensor:
    target, sizes = (target_height, target_width), image.shape[-3:-1]
    require(None not in sizes)
    size, end = np.asarray(sizes, np.float32), np.asarray(target, np.float32)
    fitting = size / np.max(size / end)
    resized = tf.image.resize(image, fitting.astype(int).tolist(), method, antialias=antialias)
    above, left = np.maximum((end - fitting) / 2, 0).astype(int).tolist()
    return _pad(resized, above, left, *target)


def _adjust_contrast(images: tf.Tensor, contrast_factor: float) -> tf.Tensor:
    mean = tf.reduce_mean(images, [-3, -2], keepdims=True)
    return mean + (images - mean) * contrast_factor


def _crop_center(image: tf.Tensor, central_fraction: float) -> tf.Tensor:
    sizes = image.shape[-3:-1]
    require(None not in sizes)
    starts = [int((size - size * central_fraction) / 2) for size in sizes]
    sizes = [size - 2 * start for size, start in zip(sizes, starts, strict=True)]
    return _crop(image, *starts, *sizes)


def _rotate(image: tf.Tensor, k: int = 1) -> tf.Tensor:
    require(len(image.shape) == 4)
    turned = tf.transpose(image, (0, 2, 1, 3)) if k % 2 else image
    axes = [[], [1], [1, 2], [2]][k % 4]
    return tf.reverse(turned, axes) if axes else tf.identity(turned)


def _standardize(image: tf.Tensor) -> tf.Tensor:
    axes = [-3, -2, -1]
    require(None not in image.shape[-3:])
    least = 1.0 / math.sqrt(math.prod(image.shape[-3:]))
    centered = image - tf.reduce_mean(image, axes, keepdims=True)
    deviation = tf.sqrt(tf.reduce_mean(tf.square(centered), axes, keepdims=True))
    return centered / tf.maximum(deviation, least)


def _normalize_by_near_channels(
    input: tf.Tensor,
    depth_radius: int = 5,
    bias: tf.Tensor = 1.0,
    alpha: Any = 1.0,
    beta: float = 0.5,
) -> tf.Tensor:
    channels = np.arange(input.shape[-1])
    near = np.abs(channels[:, None] - channels) <= depth_radius
    sums = tf.matmul(tf.square(input), (alpha * near).astype(np.float32))
    return input * tf.pow(sums + bias, -beta)


EARLY: dict[str, Expansion] = {
    "central_crop": _crop_center,
    "resize_with_crop_or_pad": _crop_or_pad,
    "resize_with_pad": _resize_and_pad,
    "adjust_contrast": _adjust_contrast,
    "adjust_brightness": lambda image, delta: image + delta,
    "grayscale_to_rgb": lambda images: tf.concat([images] * 3, -1),
    "rot90": _rotate,
    "transpose_image": lambda image: tf.transpose(image, (0, 2, 1, 3)),
    "per_image_standardization": _standardize,
    "crop_to_bounding_box": _crop,
    "flip_left_right": _flip(-2),
    "flip_up_down": _flip(-3),
    "pad_to_bounding_box": _pad,
    "rgb_to_grayscale": multiply_by_matrix(tf.image.rgb_to_grayscale),
    "rgb_to_yiq": multiply_by_matrix(tf.image.rgb_to_yiq),
    "rgb_to_yuv": multiply_by_matrix(tf.image.rgb_to_yuv),
    "yiq_to_rgb": multiply_by_matrix(tf.image.yiq_to_rgb),
    "yuv_to_rgb": multiply_by_matrix(tf.image.yuv_to_rgb),
    "local_response_normalization": _normalize_by_near_channels,
}

OLD_RESIZES = ("v1_resize_bicubic", "v1_resize_bilinear", "v1_resize_nearest_neighbor")

OPERATIONS: dict[str, Expansion] = {
    "resize": try_each(_resize, expand_resize),
    "v1_resize_images": try_each(_old_resize, expand_resize),
    **dict.fromkeys(OLD_RESIZES, expand_resize),
    "convert_image_dtype": _convert_type,
    "extract_patches": _extract_patches,
}

LAYERS: dict[type, Expansion] = {
    layers.RandomCrop: _random_crop,
    **dict.fromkeys((layers.UpSampling2D, layers.Resizing), _resize_layer),
}
