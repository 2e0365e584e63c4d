"""Families of convolutions, dense layers, pooling, merges and blocks, all in int8."""

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.helpers import layers
from tests.networks.families import Family, Structure, chain, each_alone


def _kernel_structures(make: Callable[..., Any]) -> dict[str, Structure]:
    """Returns structures around every kind of convolution."""
    norm, relu = layers.BatchNormalization, layers.ReLU
    kernel = partial(partial, make)
    return {
        "bias": chain(kernel()),
        "no_bias": chain(kernel(use_bias=False)),
        "bn": chain(kernel(use_bias=False), norm),
        "bias_bn": chain(kernel(), norm),
        "bn_without_scale": chain(kernel(), partial(norm, scale=False)),
        "bn_without_center": chain(kernel(), partial(norm, center=False)),
        "relu_inside": chain(kernel(activation="relu")),
        "relu_layer": chain(kernel(), relu),
        "relu_activation": chain(kernel(), partial(layers.Activation, "relu")),
        "relu6_layer": chain(kernel(), partial(relu, 6.0)),
        "linear_layer": chain(kernel(), partial(layers.Activation, "linear")),
        "bn_relu": chain(kernel(use_bias=False), norm, relu),
        "bn_relu6": chain(kernel(), norm, partial(relu, 6.0)),
        "strides_valid": chain(kernel(strides=2)),
        "strides_same": chain(kernel(strides=2, padding="same", activation="relu")),
        "dilation_valid": chain(kernel(dilation_rate=2)),
        "dilation_same_bn_relu": chain(kernel(dilation_rate=2, padding="same"), norm, relu),
    }


CONV = {
    **_kernel_structures(partial(layers.Conv2D, 6, 3)),
    "groups": chain(partial(layers.Conv2D, 8, 3, groups=2)),
    "groups_bn_relu": chain(
        partial(layers.Conv2D, 8, 3, groups=4), layers.BatchNormalization, layers.ReLU
    ),
    "pointwise": chain(partial(layers.Conv2D, 6, 1)),
    "even_oblong": chain(partial(layers.Conv2D, 6, (2, 4), strides=2, padding="same")),
}

DEPTHWISE = {
    **_kernel_structures(partial(layers.DepthwiseConv2D, 3)),
    "multiplier": chain(partial(layers.DepthwiseConv2D, 3, depth_multiplier=2)),
    "multiplier_bn_relu": chain(
        partial(layers.DepthwiseConv2D, 3, depth_multiplier=2, padding="same", use_bias=False),
        layers.BatchNormalization,
        layers.ReLU,
    ),
    "multiplier_dilation": chain(
        partial(layers.DepthwiseConv2D, 3, depth_multiplier=2, dilation_rate=2)
    ),
}

SEPARABLE = {
    **_kernel_structures(partial(layers.SeparableConv2D, 6, 3)),
    "multiplier": chain(partial(layers.SeparableConv2D, 6, 3, depth_multiplier=2)),
}

_dense = partial(partial, layers.Dense, 7)
_norm = layers.BatchNormalization

DENSE = {
    "bias": chain(_dense()),
    "no_bias": chain(_dense(use_bias=False)),
    "bn": chain(_dense(use_bias=False), _norm),
    "bias_bn": chain(_dense(), _norm),
    "bn_without_scale": chain(_dense(), partial(_norm, scale=False)),
    "bn_without_center": chain(_dense(), partial(_norm, center=False)),
    "relu_inside": chain(_dense(activation="relu")),
    "relu6_layer": chain(_dense(), partial(layers.ReLU, 6.0)),
    "bn_relu": chain(_dense(use_bias=False), _norm, layers.ReLU),
}
"""For inputs with two and with three axes."""

POOLING_THEN_RELU = {
    "max_relu": chain(layers.MaxPooling2D, layers.ReLU),
    "average_relu": chain(layers.AveragePooling2D, layers.ReLU),
    "average_relu6": chain(layers.AveragePooling2D, partial(layers.ReLU, 6.0)),
}

HEADS = {
    "softmax_inside": chain(_dense(activation="softmax")),
    "softmax_layer": chain(_dense(), layers.Softmax),
    "bn_softmax": chain(_dense(), _norm, partial(layers.Activation, "softmax")),
    "sigmoid_inside": chain(_dense(activation="sigmoid")),
    "sigmoid_activation": chain(_dense(), partial(layers.Activation, "sigmoid")),
    "tanh_inside": chain(_dense(activation="tanh")),
}
"""Two quantized layers in sequence."""


def _add(*values: Any) -> Any:
    return layers.Add()(list(values))


def _multiply(*values: Any) -> Any:
    return layers.Multiply()(list(values))


def _join(*values: Any) -> Any:
    return layers.Concatenate()(list(values))


def _relu(x: Any) -> Any:
    return layers.ReLU()(x)


MERGES = {
    "add": _add,
    "add_same_twice": lambda x, z: _add(x, x),
    "add_then_relu": lambda x, z: _relu(_add(x, z)),
    "add_then_relu6": lambda x, z: layers.ReLU(6.0)(_add(x, z)),
    "relu_then_add": lambda x, z: _add(_relu(x), _relu(z)),
    "add_vector": lambda x, z: _add(x, layers.GlobalMaxPooling2D(keepdims=True)(z)),
    "multiply": _multiply,
    "multiply_then_relu": lambda x, z: _relu(_multiply(x, z)),
    "multiply_vector": lambda x, z: _multiply(x, layers.GlobalMaxPooling2D(keepdims=True)(z)),
}
"""Merges of two inputs with different ranges."""

CONCATENATIONS = {
    "inputs": _join,
    "with_relu": lambda x, z: _join(_relu(x), z),
    "then_relu": lambda x, z: _relu(_join(x, z)),
    "rows": lambda x, z: layers.Concatenate(axis=1)([x, z]),
    "tree": lambda x, z: _join(_join(x, _relu(z)), layers.MaxPooling2D(1)(x), z),
}

FIXED_CONCATENATION = {"sigmoid_and_input": lambda x, z: _join(layers.Activation("sigmoid")(x), z)}
"""Kernels for concatenation support one range, so the sigmoid's fixed range is converted."""


def _conv(x: Any, filters: int = 4, **kwargs: Any) -> Any:
    return layers.Conv2D(filters, 3, padding="same", **kwargs)(x)


def _squeeze_and_excite(x: Any) -> Any:
    x = _conv(x, activation="relu")
    gate = layers.GlobalMaxPooling2D(keepdims=True)(x)
    gate = layers.Conv2D(4, 1, activation="sigmoid")(gate)
    return _multiply(x, gate)


def _bottleneck(x: Any) -> Any:
    y = _relu(_norm()(layers.Conv2D(8, 1, use_bias=False)(x)))
    y = layers.ReLU(6.0)(_norm()(layers.DepthwiseConv2D(3, padding="same", use_bias=False)(y)))
    return _add(x, _norm()(layers.Conv2D(4, 1, use_bias=False)(y)))


BLOCKS = {
    "add_before_relu": lambda x: _relu(_add(_conv(x), _conv(x))),
    "add_after_relu": lambda x: _add(_conv(x, activation="relu"), _conv(x, activation="relu")),
    "add_to_input": lambda x: _add(x, _conv(x)),
    "add_three": lambda x: _add(x, _conv(x), _conv(x, activation="relu")),
    "multiply_three": lambda x: _multiply(x, _conv(x), _conv(x, activation="relu")),
    "bottleneck": _bottleneck,
    "squeeze_and_excite": _squeeze_and_excite,
    "pool_read_twice": lambda x: (lambda y: _join(y, _conv(_relu(y))))(
        layers.MaxPooling2D()(_conv(x))
    ),
    "conv_max_relu": lambda x: _relu(layers.MaxPooling2D()(_conv(x))),
    "conv_average_relu": lambda x: _relu(layers.AveragePooling2D()(_conv(x))),
    "conv_pool_relu6": lambda x: layers.ReLU(6.0)(layers.AveragePooling2D()(_conv(x))),
    "conv_pool_relu_conv": lambda x: _conv(_relu(layers.AveragePooling2D()(_conv(x)))),
    "conv_tanh_conv": lambda x: _conv(_conv(x, activation="tanh")),
    "inception": lambda x: _conv(_join(_conv(x), _conv(x, activation="relu"))),
    "dense_net": lambda x: _conv(_join(x, _conv(x, 3, activation="relu")), activation="relu"),
}
"""Several quantized layers in sequence."""

POOLING = {
    "max": chain(layers.MaxPooling2D),
    "max_same_strides": chain(partial(layers.MaxPooling2D, 3, strides=2, padding="same")),
    "average": chain(layers.AveragePooling2D),
    "average_same": chain(partial(layers.AveragePooling2D, 3, strides=2, padding="same")),
    "conv_relu_average": chain(
        partial(layers.Conv2D, 4, 3, activation="relu"), layers.AveragePooling2D
    ),
    "global_average": chain(layers.GlobalAveragePooling2D),
    "global_average_keepdims": chain(partial(layers.GlobalAveragePooling2D, keepdims=True)),
    "conv_relu_global_average": chain(
        partial(layers.Conv2D, 4, 3, activation="relu"), layers.GlobalAveragePooling2D
    ),
    "global_max": chain(layers.GlobalMaxPooling2D),
    "flatten": chain(layers.Flatten),
    "flatten_dense": chain(partial(layers.Conv2D, 2, 3), layers.Flatten, partial(layers.Dense, 3)),
    "reshape": chain(partial(layers.Reshape, (4, -1))),
    "reshape_dense": chain(partial(layers.Reshape, (16, 16)), partial(layers.Dense, 3)),
    "zero_padding": chain(layers.ZeroPadding2D),
    "zero_padding_conv": chain(
        partial(layers.ZeroPadding2D, ((0, 1), (0, 1))), partial(layers.Conv2D, 4, 3, strides=2)
    ),
    "relu_zero_padding": chain(
        partial(layers.Conv2D, 4, 3, activation="relu"), layers.ZeroPadding2D
    ),
    "cropping": chain(layers.Cropping2D),
    "permute": chain(partial(layers.Permute, (3, 1, 2))),
    "dropout": chain(partial(layers.Conv2D, 4, 3), partial(layers.Dropout, 0.5)),
    "relu_alone": chain(layers.ReLU),
    "softmax_alone": chain(layers.GlobalAveragePooling2D, layers.Softmax),
    "sigmoid_alone": chain(partial(layers.Activation, "sigmoid")),
    "tanh_alone": chain(partial(layers.Activation, "tanh")),
}

_IMAGE = [(8, 8, 4)]

FAMILIES: dict[str, Family] = {
    "conv": Family(_IMAGE, CONV),
    "depthwise": Family(_IMAGE, DEPTHWISE),
    "separable": Family(_IMAGE, SEPARABLE),
    "dense": Family([(9,)], DENSE),
    "dense_3d": Family([(5, 9)], DENSE),
    "heads": Family([(9,)], HEADS),
    **each_alone(_IMAGE * 2, MERGES),
    **each_alone(_IMAGE, POOLING_THEN_RELU),
    "concatenations": Family(_IMAGE * 2, CONCATENATIONS),
    "fixed_concatenation": Family(_IMAGE * 2, FIXED_CONCATENATION),
    "pooling": Family(_IMAGE, POOLING),
    "blocks": Family(_IMAGE, BLOCKS),
}
