"""Layers that compute in float, in operations that TFLite's converter takes and runtimes have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.graph.operations import get_kind, is_operation
from keras_qat.keras2.backend import keras, layers


def _category_encoding(layer: Any, x: Any, count_weights: Any = None) -> Any:
    # Keras counts with DenseBincount, which TFLite lacks.
    codes = tf.one_hot(tf.cast(x, tf.int32), layer.num_tokens, 1.0, 0.0)
    if layer.output_mode == "one_hot":
        return tf.squeeze(codes, -2) if x.shape[-1] == 1 else codes
    if layer.output_mode == "multi_hot":
        return tf.reduce_max(codes, -2)
    codes = (
        codes if count_weights is None else codes * tf.cast(count_weights, tf.float32)[..., None]
    )
    return tf.reduce_sum(codes, -2)


def _group_normalization(layer: Any, x: Any) -> Any:
    # Keras asks for the shape of its input at run time, of which TFLite makes a wrong broadcast.
    axis = layer.axis % x.shape.rank
    sizes = _sizes(x)
    split = [*sizes[:axis], layer.groups, sizes[axis] // layer.groups, *sizes[axis + 1 :]]
    grouped = tf.reshape(x, split)
    axes = [index for index in range(1, len(split)) if index != axis]
    mean = tf.reduce_mean(grouped, axes, keepdims=True)
    variance = tf.reduce_mean(tf.math.squared_difference(grouped, mean), axes, keepdims=True)
    y = tf.reshape((grouped - mean) * tf.math.rsqrt(variance + layer.epsilon), sizes)
    shape = [1] * axis + [-1] + [1] * (len(sizes) - axis - 1)
    y = y * tf.reshape(layer.gamma, shape) if layer.scale else y
    return y + tf.reshape(layer.beta, shape) if layer.center else y


def _layer_normalization(layer: Any, x: Any) -> Any:
    # Keras spells it as a batch normalization of one image, in three times as many operations.
    axes = [axis % x.shape.rank for axis in tf.nest.flatten(layer.axis)]
    mean = tf.reduce_mean(x, axes, keepdims=True)
    variance = tf.reduce_mean(tf.math.squared_difference(x, mean), axes, keepdims=True)
    y = (x - mean) * tf.math.rsqrt(variance + layer.epsilon)
    shape = [x.shape[axis] if axis in axes else 1 for axis in range(x.shape.rank)]
    y = y * tf.reshape(layer.gamma, shape) if layer.scale else y
    return y + tf.reshape(layer.beta, shape) if layer.center else y


def _random_crop(layer: Any, x: Any, training: Any = None) -> Any:
    # What Keras computes at inference, without its choice between that and a random crop.
    return keras.preprocessing.image.smart_resize(x, (layer.height, layer.width))


def _sizes(x: Any) -> list[Any]:
    """Returns the sizes of a tensor's axes: -1 for the batch, if it alone is unknown."""
    sizes = x.shape.as_list()
    if None in sizes[1:]:
        return [tf.shape(x)[axis] if size is None else size for axis, size in enumerate(sizes)]
    return [-1, *sizes[1:]]


def _activation(layer: Any, x: Any) -> Any:
    # Before TensorFlow 2.16 the converter has no Softsign.
    if layer.activation is keras.activations.softsign:
        return x / (1.0 + tf.abs(x))
    return layer(x)


def _resizing(layer: Any, x: Any) -> Any:
    if layer.interpolation not in ("nearest", "bilinear"):
        raise ValueError(
            f"{layer.name}: TFLite cannot resize with interpolation={layer.interpolation!r}. Use "
            f"'bilinear' or 'nearest', or resize the images before they go into the model."
        )
    return layer(x)


def _not_in_tflite(layer: Any, *args: Any, **kwargs: Any) -> Any:
    raise ValueError(
        f"{layer.name}: TFLite has no operation for {type(layer).__name__}. Compute it before the "
        f"model, in the input pipeline, and quantize the model after it."
    )


def _clipped(layer: Any, t: Any, clip_value_min: Any, clip_value_max: Any, **options: Any) -> Any:
    # The converter makes ReLU6 of a minimum that comes first. Of integers there is no kernel.
    if tf.as_dtype(t.dtype).is_floating:
        return layer(t, clip_value_min, clip_value_max, **options)
    return tf.minimum(tf.maximum(t, clip_value_min), clip_value_max)


def _relu6(layer: Any, features: Any, **options: Any) -> Any:
    if tf.as_dtype(features.dtype).is_floating:
        return layer(features, **options)
    return tf.minimum(tf.maximum(features, 0), 6)


def _product_without_nan(layer: Any, x: Any, y: Any, **options: Any) -> Any:
    return tf.where(tf.equal(y, 0.0), tf.zeros_like(y), x * y)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "clip_by_value": _clipped,
    "relu6": _relu6,
    "multiply_no_nan": _product_without_nan,
}
"""Operation -> its computation in float where TFLite has no kernel for TensorFlow's own."""

_FORMS: dict[type, Callable[..., Any]] = {
    layers.Activation: _activation,
    layers.Resizing: _resizing,
    **dict.fromkeys(
        (
            layers.Hashing,
            layers.HashedCrossing,
            layers.IntegerLookup,
            layers.StringLookup,
            layers.TextVectorization,
        ),
        _not_in_tflite,
    ),
    layers.CategoryEncoding: _category_encoding,
    layers.GroupNormalization: _group_normalization,
    layers.LayerNormalization: _layer_normalization,
    layers.RandomCrop: _random_crop,
}
"""Layer class -> its computation in float where TFLite has no kernel for Keras' own."""


def form_of(layer: Any) -> Callable[..., Any] | None:
    """Returns how files compute a layer in float; None if they compute its own `call`."""
    if is_operation(layer):
        return _OPERATIONS.get(get_kind(layer))
    kind: Any = type(layer)
    bases: list[Any] = [base for base in kind.__mro__ if base in _FORMS]
    return _FORMS[bases[0]] if bases and kind.call is bases[0].call else None
