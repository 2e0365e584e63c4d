"""Lowering of convolutions and pooling into the forms that have int8 kernels."""

from __future__ import annotations

from typing import Any

from keras_qat.keras2.backend import keras
from keras_qat.keras2.graph import Call
from keras_qat.lower.activations import activation_of, weights_without_activation
from keras_qat.lower.parts import Made, chain

__all__ = ["split_separable"]

_layers = keras.layers


def split_separable(call: Call, made: Made) -> list[Call]:
    """SeparableConv2D -> DepthwiseConv2D, Conv2D 1x1, and its activation if it has one."""
    layer = call.layer
    one_dimension = isinstance(layer, _layers.SeparableConv1D)
    depthwise_class = _layers.DepthwiseConv1D if one_dimension else _layers.DepthwiseConv2D
    pointwise_class = _layers.Conv1D if one_dimension else _layers.Conv2D
    shared: dict[str, Any] = {
        "data_format": layer.data_format,
        "dtype": layer.dtype_policy,
        "trainable": layer.trainable,
    }

    def depthwise() -> Any:
        return depthwise_class(
            layer.kernel_size,
            strides=layer.strides,
            padding=layer.padding,
            dilation_rate=layer.dilation_rate,
            depth_multiplier=layer.depth_multiplier,
            use_bias=False,
            depthwise_regularizer=layer.depthwise_regularizer,
            depthwise_constraint=layer.depthwise_constraint,
            name=f"{layer.name}_depthwise",
            **shared,
        )

    def pointwise() -> Any:
        return pointwise_class(
            layer.filters,
            1,
            use_bias=layer.use_bias,
            kernel_regularizer=layer.pointwise_regularizer,
            kernel_constraint=layer.pointwise_constraint,
            bias_regularizer=layer.bias_regularizer,
            bias_constraint=layer.bias_constraint,
            activity_regularizer=layer.activity_regularizer,
            name=layer.name,
            **shared,
        )

    depthwise_kernel, *pointwise_weights = weights_without_activation(layer, made)
    parts = [
        made.layer(layer, "depthwise", depthwise, [depthwise_kernel]),
        made.layer(layer, "pointwise", pointwise, pointwise_weights),
    ]
    if layer.activation not in (None, keras.activations.linear):
        parts.append(activation_of(layer, made))
    return chain(call, *parts)
