"""Families of other layers, activations and operations, and short chains of them, all in int8."""

from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tests.networks.families import Family, Structure, chain, each_alone
from tests.networks.small import layers

_norm = layers.BatchNormalization


def _one_dimension(make: Any) -> dict[str, Structure]:
    """Returns structures around every convolution along one axis."""
    kernel = partial(partial, make)
    return {
        "valid": chain(kernel()),
        "no_bias": chain(kernel(use_bias=False)),
        "same": chain(kernel(padding="same")),
        "strides_valid": chain(kernel(strides=2)),
        "strides_same": chain(kernel(strides=3, padding="same")),
        "dilation": chain(kernel(dilation_rate=2)),
        "dilation_same": chain(kernel(dilation_rate=3, padding="same")),
        "relu_inside": chain(kernel(activation="relu")),
        "bn_relu6": chain(kernel(use_bias=False), _norm, partial(layers.ReLU, 6.0)),
        "bias_bn_strides": chain(kernel(strides=2, padding="same"), _norm),
    }


_conv1d = partial(partial, layers.Conv1D, 6, 3)

CONV1D = {
    **_one_dimension(partial(layers.Conv1D, 6, 3)),
    "causal": chain(_conv1d(padding="causal")),
    "causal_strides": chain(_conv1d(padding="causal", strides=2)),
    "causal_dilation_bn_relu": chain(
        _conv1d(padding="causal", dilation_rate=2), _norm, layers.ReLU
    ),
}

DEPTHWISE1D = {
    **_one_dimension(partial(layers.DepthwiseConv1D, 3)),
    "multiplier": chain(partial(layers.DepthwiseConv1D, 3, depth_multiplier=2)),
}

SEPARABLE1D = {
    "strides_same_relu": chain(
        partial(layers.SeparableConv1D, 6, 3, strides=2, padding="same", activation="relu")
    ),
    "dilation_bn": chain(partial(layers.SeparableConv1D, 6, 3, dilation_rate=2), _norm),
    "multiplier": chain(partial(layers.SeparableConv1D, 6, 3, padding="same", depth_multiplier=2)),
    "causal": chain(partial(layers.SeparableConv1D, 6, 3, padding="causal", dilation_rate=2)),
}


def _transposed(make: Any) -> dict[str, Structure]:
    kernel = partial(partial, make)
    return {
        "valid": chain(kernel(3)),
        "same": chain(kernel(3, padding="same")),
        "no_bias": chain(kernel(3, use_bias=False)),
        "no_bias_relu": chain(kernel(3, use_bias=False, activation="relu")),
        "strides_valid": chain(kernel(3, strides=2)),
        "strides_same": chain(kernel(3, strides=2, padding="same")),
        "kernel_below_strides": chain(kernel(1, strides=2)),
        "even_kernel": chain(kernel(4, strides=2, padding="same")),
        "output_padding": chain(kernel(3, strides=2, padding="same", output_padding=1)),
        "output_padding_valid": chain(kernel(2, strides=3, output_padding=2)),
        "relu_inside": chain(kernel(3, strides=2, padding="same", activation="relu")),
    }


def _transposed_with_norm(make: Any) -> dict[str, Structure]:
    kernel = partial(partial, make)
    return {
        "bn": chain(kernel(3, strides=2, use_bias=False), _norm),
        "bias_bn_relu": chain(kernel(3, padding="same"), _norm, layers.ReLU),
    }


TRANSPOSED2D = _transposed(partial(layers.Conv2DTranspose, 4))
TRANSPOSED1D = _transposed(partial(layers.Conv1DTranspose, 4))
TRANSPOSED2D_NORM = _transposed_with_norm(partial(layers.Conv2DTranspose, 4))
TRANSPOSED1D_NORM = _transposed_with_norm(partial(layers.Conv1DTranspose, 4))
"""Here, BatchNormalization is a separate operator."""

DENSE_4D = {
    "bias": chain(partial(layers.Dense, 7)),
    "bn_relu": chain(partial(layers.Dense, 7, use_bias=False), _norm, layers.ReLU),
    "no_bias": chain(partial(layers.Dense, 7, use_bias=False)),
}

EINSUM = {
    "last_axis": chain(partial(layers.EinsumDense, "abc,cd->abd", (None, 7), bias_axes="d")),
    "no_bias": chain(partial(layers.EinsumDense, "abc,cd->abd", (None, 7))),
    "heads": chain(partial(layers.EinsumDense, "abc,cde->abde", (None, 2, 3), bias_axes="de")),
    "relu": chain(
        partial(layers.EinsumDense, "abc,cd->abd", (None, 7), bias_axes="d", activation="relu")
    ),
    "two_axes": chain(partial(layers.EinsumDense, "abc,bcd->ad", (7,), bias_axes="d")),
}


def _conv(x: Any, filters: int = 4, **kwargs: Any) -> Any:
    return layers.Conv2D(filters, 3, padding="same", **kwargs)(x)


AFFINE = {
    "norm_first": chain(_norm),
    "norm_relu": chain(_norm, layers.ReLU),
    "norm_without_scale": chain(partial(_norm, scale=False)),
    "norm_without_center_relu6": chain(partial(_norm, center=False), partial(layers.ReLU, 6.0)),
    "rescaling": chain(partial(layers.Rescaling, 0.5, offset=-1.0)),
    "rescaling_per_channel": chain(
        partial(layers.Rescaling, [0.5, 2.0, 0.1, 1.0], offset=[0.0, 1.0, -1.0, 0.3])
    ),
    "normalization": chain(
        partial(layers.Normalization, mean=[0.1, 0.5, -1.0, 0.0], variance=[1.0, 4.0, 0.3, 1.0])
    ),
    "normalization_of_all": chain(partial(layers.Normalization, axis=None, mean=0.5, variance=9.0)),
}

AFFINE_CHAINS = {
    "norm_after_add": lambda x: _norm()(layers.Add()([x, _conv(x)])),
    "pre_activation": lambda x: _conv(layers.ReLU()(_norm()(_conv(x)))),
    "pre_activation_shared": lambda x: (
        lambda y: layers.Add()([y, _conv(layers.ReLU()(_norm()(y)))])
    )(_conv(x)),
    "norm_behind_relu": lambda x: _norm()(_conv(x, activation="relu")),
    "norm_behind_dense_relu": lambda x: _norm()(layers.Dense(5, activation="relu")(x)),
    "norm_behind_pooling": lambda x: _norm()(layers.MaxPooling2D()(_conv(x))),
    "norm_of_vectors": lambda x: _norm()(layers.Flatten()(x)),
    "rescaling_conv": lambda x: _conv(layers.Rescaling(1 / 3, offset=-0.5)(x)),
    "normalization_conv": lambda x: _conv(
        layers.Normalization(mean=[0.1, 0.5, -1.0, 0.0], variance=[1.0, 4.0, 0.3, 1.0])(x)
    ),
}


def _activation(function: Any) -> Structure:
    return chain(partial(layers.Activation, function))


ACTIVATIONS = {
    "tanh": _activation("tanh"),
    "sigmoid": _activation("sigmoid"),
    "gelu": _activation("gelu"),
    "gelu_function": _activation(tf.nn.gelu),
    "relu_4": chain(partial(layers.ReLU, 4.0)),
    "softmax": chain(layers.Softmax),
}

ACTIVATION_CHAINS = {
    "swish": _activation("swish"),
    "silu": _activation(tf.nn.silu),
    "hard_sigmoid": _activation("hard_sigmoid"),
    "conv_swish": lambda x: _conv(x, activation="swish"),
    "conv_gelu": lambda x: _conv(x, activation="gelu"),
    "conv_gelu_function": lambda x: _conv(x, activation=tf.nn.gelu),
    "conv_softmax_layer": lambda x: _conv(x, activation=layers.Softmax()),
    "conv_relu_layer": lambda x: _conv(x, activation=layers.ReLU(6.0)),
    "conv_relu_2_layer": lambda x: _conv(x, activation=layers.ReLU(2.0)),
    "activation_of_layer": lambda x: layers.Activation(layers.ReLU(3.0))(_conv(x)),
    "dense_swish_layer": lambda x: layers.Dense(3, activation=layers.Activation("swish"))(x),
    "conv_tanh": lambda x: _conv(x, activation="tanh"),
    "conv_relu_4": lambda x: layers.ReLU(4.0)(_conv(x)),
    "conv_hard_sigmoid": lambda x: _conv(x, activation="hard_sigmoid"),
}
"""Some become several operators in sequence."""

OTHER_ROUNDING = {
    "leaky_relu": chain(partial(layers.LeakyReLU, 0.1)),
    "relu_with_slope": chain(partial(layers.ReLU, negative_slope=0.25)),
    "prelu": chain(partial(layers.Conv2D, 4, 1), layers.PReLU),
    "prelu_shared_axes": chain(
        partial(layers.Conv2D, 4, 1), partial(layers.PReLU, shared_axes=[1, 2])
    ),
    "leaky_relu_inside": lambda x: _conv(x, activation=layers.LeakyReLU(0.1)),
    "leaky_relu_function": chain(partial(layers.Activation, tf.nn.leaky_relu)),
    "upsampling_bilinear": chain(partial(layers.UpSampling2D, interpolation="bilinear")),
    "resizing_bilinear": chain(partial(layers.Resizing, 7, 9)),
}
"""Kernels that round with integers, unlike a division."""


ELU = {
    "layer": chain(layers.ELU),
    "activation": _activation("elu"),
    "function": _activation(tf.nn.elu),
    "operation": lambda x: tf.nn.elu(x),
    "conv": lambda x: _conv(x, activation="elu"),
    "conv_bn_pooling": chain(partial(layers.Conv2D, 4, 1), _norm, layers.ELU, layers.MaxPooling2D),
    "between_convolutions": lambda x: _conv(_conv(x, activation="elu")),
    "read_twice": lambda x: _twice(layers.ELU()(x)),
}
"""In int8 after an edit of the file. The interpreter has no reference kernels for it."""


def _twice(x: Any) -> Any:
    return layers.Add()([_conv(x), x])


UNIT_NORM = {
    "layer": chain(layers.UnitNormalization),
    "dense": chain(layers.Flatten, partial(layers.Dense, 5), layers.UnitNormalization),
    "operation": lambda x: tf.math.l2_normalize(x, axis=-1),
    "axes": lambda x: tf.nn.l2_normalize(x, [3], 1e-6),
    "moved": lambda x: layers.Reshape((36, 4))(layers.UnitNormalization()(x)),
    "many": chain(layers.Flatten, layers.UnitNormalization),
    "columns": chain(partial(layers.UnitNormalization, axis=1)),
    "joined": lambda x: layers.Concatenate()([layers.UnitNormalization()(x), tf.tanh(x)]),
    "steps": chain(partial(layers.Reshape, (36, 4)), layers.UnitNormalization),
    "before_conv": lambda x: _conv(layers.UnitNormalization()(x)),
}


HARD_SWISH = {
    "product_of_gate": lambda x: x * (tf.nn.relu6(x + 3.0) / 6.0),
    "gate_first": lambda x: (tf.nn.relu6(x + 3.0) * (1.0 / 6.0)) * x,
    "product_divided": lambda x: x * tf.nn.relu6(x + 3.0) / 6.0,
    "product_times_a_sixth": lambda x: x * tf.nn.relu6(3.0 + x) * (1.0 / 6.0),
    "relu_layer": lambda x: tf.multiply(x, layers.ReLU(6.0)(tf.add(x, 3.0)) / 6.0),
    "keras_applications": lambda x: layers.Multiply()([x, layers.ReLU(6.0)(x + 3.0) * (1.0 / 6.0)]),
}
"""Ways to write it, each after a convolution."""

MERGES = {
    "subtract": lambda x, z: layers.Subtract()([x, z]),
    "subtract_relu": lambda x, z: layers.ReLU()(layers.Subtract()([x, z])),
    "average": lambda x, z: layers.Average()([x, z]),
    "maximum": lambda x, z: layers.Maximum()([x, z]),
    "minimum": lambda x, z: layers.Minimum()([x, z]),
    "maximum_of_three": lambda x, z: layers.Maximum()([x, z, layers.ReLU()(x)]),
    "average_of_three": lambda x, z: layers.Average()([x, z, layers.ReLU()(x)]),
}

MOVES = {
    "upsampling_nearest": chain(layers.UpSampling2D),
    "resizing_nearest": chain(partial(layers.Resizing, 9, 5, interpolation="nearest")),
    "upsampling_bicubic": chain(partial(layers.UpSampling2D, (2, 3), interpolation="bicubic")),
    "resizing_area": chain(partial(layers.Resizing, 9, 3, "area", crop_to_aspect_ratio=True)),
    "zero_padding": chain(partial(layers.ZeroPadding2D, ((1, 0), (2, 1)))),
    "cropping": chain(partial(layers.Cropping2D, ((1, 0), (0, 2)))),
    "permute": chain(partial(layers.Permute, (2, 3, 1))),
    "noise": chain(
        partial(layers.GaussianNoise, 0.5), partial(layers.SpatialDropout2D, 0.5), layers.ReLU
    ),
    "one_dimension": chain(
        partial(layers.Reshape, (36, 4)),
        partial(layers.ZeroPadding1D, 2),
        partial(layers.Cropping1D, 1),
        layers.MaxPooling1D,
    ),
    "average_1d": chain(partial(layers.Reshape, (36, 4)), layers.AveragePooling1D),
    "global_1d": chain(partial(layers.Reshape, (36, 4)), layers.GlobalMaxPooling1D),
}

TILING = {
    "repeat": chain(layers.GlobalMaxPooling2D, partial(layers.RepeatVector, 3)),
    "tile": lambda x: tf.tile(x, [1, 2, 1, 1]),
}
"""The interpreter has no current version of its reference kernels."""

OPERATIONS = {
    "relu": lambda x: tf.nn.relu(x),
    "relu6": lambda x: tf.nn.relu6(x),
    "conv_relu": lambda x: tf.nn.relu(_conv(x)),
    "add_constant": lambda x: x + 0.7,
    "times_constant": lambda x: x * 2.0,
    "times_and_add": lambda x: x * 2.0 + 1.0,
    "constant_first": lambda x: 1.0 - x,
    "divide": lambda x: x / 3.0,
    "divide_by_tensor": lambda x: x / tf.math.sqrt(8.0),
    "divide_by_numpy": lambda x: tf.divide(x, np.float32(3)),
    "power_of_numpy": lambda x: tf.pow(x, np.float32(2)),
    "clip_to_tensor": lambda x: tf.clip_by_value(x, tf.constant(-0.5), np.float32(1.2)),
    "cast_to_same": lambda x: tf.cast(_conv(x), tf.float32),
    "negative": lambda x: -x,
    "reshape": lambda x: tf.reshape(x, (-1, 9, 16)),
    "flatten_dense": lambda x: layers.Dense(3)(tf.reshape(x, (-1, 144))),
    "mean": lambda x: tf.reduce_mean(x, axis=[1, 2]),
    "max": lambda x: tf.reduce_max(x, axis=[1, 2]),
    "slice": lambda x: x[:, 1:4, ::2],
    "silu": lambda x: tf.nn.silu(x),
    "gelu": lambda x: tf.nn.gelu(x),
    "resize_nearest": lambda x: tf.image.resize(x, (9, 3), method="nearest"),
    "gather": lambda x: tf.gather(x, [3, 0], axis=2),
    "channel": lambda x: x[..., 1],
    "transpose": lambda x: tf.transpose(x, (0, 3, 1, 2)),
    "expand_squeeze": lambda x: tf.squeeze(tf.expand_dims(x, 1), 1),
    "sigmoid": lambda x: tf.sigmoid(x),
    "softmax": lambda x: tf.nn.softmax(x),
    "pad": lambda x: tf.pad(x, [[0, 0], [1, 1], [2, 0], [0, 0]]),
    "pad_conv": lambda x: _conv(tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]])),
    "pad_reflect": lambda x: tf.pad(x, [[0, 0], [1, 1], [2, 0], [0, 0]], "REFLECT"),
    "pad_symmetric": lambda x: tf.pad(x, [[0, 0], [1, 1], [2, 0], [0, 0]], mode="SYMMETRIC"),
    "reverse": lambda x: tf.reverse(x, [1, 3, 2]),
    "roll": lambda x: tf.roll(x, [2, -1], axis=[1, 2]),
    "square": lambda x: tf.square(x),
    "power": lambda x: x**2,
    "abs": lambda x: tf.abs(x),
    "sum": lambda x: tf.reduce_sum(x, axis=[1, 2]),
    "sum_of_channels": lambda x: tf.reduce_sum(x, -1, keepdims=True),
    "clip": lambda x: tf.clip_by_value(x, -0.5, 1.2),
    "clip_at_zero": lambda x: tf.clip_by_value(1.5 * x, 0.0, 1.0),
    "conv_clip": lambda x: tf.clip_by_value(_conv(x), 0, 1),
    "resize_like": lambda x: tf.image.resize(
        layers.MaxPooling2D()(x), tf.shape(x)[1:3], method="nearest"
    ),
    "max_pool": lambda x: tf.nn.max_pool2d(x, 2, 2, "VALID"),
    "average_pool": lambda x: tf.nn.avg_pool2d(x, 2, 2, "VALID"),
}


def _vector(x: Any) -> Any:
    return layers.GlobalAveragePooling2D()(x)


OPERATION_MERGES = {
    "op_add": lambda x, z: x + z,
    "op_add_relu": lambda x, z: tf.nn.relu(tf.add(x, z)),
    "op_subtract": lambda x, z: x - z,
    "op_multiply": lambda x, z: x * z,
    "op_maximum": lambda x, z: tf.maximum(x, z),
    "op_add_n": lambda x, z: tf.add_n([x, z, tf.nn.relu(x)]),
    "op_distance": lambda x, z: tf.abs(x - z),
    "cosine": lambda x, z: layers.Dot(1, normalize=True)([_vector(x), _vector(z)]),
    "cosines": lambda x, z: layers.Dot((3, 3), normalize=True)([x, z]),
    "op_squared_difference": lambda x, z: tf.math.squared_difference(x, z),
    "op_concat": lambda x, z: tf.concat([x, z], axis=-1),
}

_IMAGE = [(6, 6, 4)]

INEXACT: dict[str, Family] = {
    "other_rounding": Family(_IMAGE, OTHER_ROUNDING),
    "hard_swish": Family(
        _IMAGE,
        {
            name: lambda x, swish=swish: swish(layers.Conv2D(4, 1)(x))
            for name, swish in HARD_SWISH.items()
        },
    ),
}
"""Families with kernels that do not return the nearest quantized value."""

FAMILIES: dict[str, Family] = {
    "conv1d": Family([(12, 4)], CONV1D),
    "depthwise1d": Family([(12, 4)], DEPTHWISE1D),
    "separable1d": Family([(12, 4)], SEPARABLE1D),
    "transposed2d": Family([(5, 6, 3)], TRANSPOSED2D),
    "transposed1d": Family([(7, 3)], TRANSPOSED1D),
    "transposed2d_norm": Family([(5, 6, 3)], TRANSPOSED2D_NORM),
    "transposed1d_norm": Family([(7, 3)], TRANSPOSED1D_NORM),
    "dense_4d": Family([(3, 4, 5)], DENSE_4D),
    "einsum": Family([(5, 6)], EINSUM),
    "affine": Family(_IMAGE, AFFINE),
    "affine_chains": Family(_IMAGE, AFFINE_CHAINS),
    "activations": Family(_IMAGE, ACTIVATIONS),
    "activation_chains": Family(_IMAGE, ACTIVATION_CHAINS),
    "elu": Family(_IMAGE, ELU),
    "unit_norm": Family(_IMAGE, UNIT_NORM),
    "moves": Family(_IMAGE, MOVES),
    "tiling": Family(_IMAGE, TILING),
    "operations": Family(_IMAGE, OPERATIONS),
    **each_alone(_IMAGE * 2, MERGES | OPERATION_MERGES),
    **INEXACT,
}
