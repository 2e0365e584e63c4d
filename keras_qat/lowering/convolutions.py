"""Lowers separable convolutions to the convolutions that have int8 operators."""

from __future__ import annotations

from keras_qat.graph.calls import Call
from keras_qat.keras2.backend import keras, layers
from keras_qat.lowering.activations import activation_of, weights_without_activation
from keras_qat.lowering.builder import LoweringContext, PartsBuilder


def split_separable(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers SeparableConv2D to DepthwiseConv2D, a 1x1 Conv2D, and its activation if it has one."""
    layer, parts = call.layer, PartsBuilder(call, context)
    kinds = layers.DepthwiseConv2D, layers.Conv2D
    if isinstance(layer, layers.SeparableConv1D):
        kinds = layers.DepthwiseConv1D, layers.Conv1D
    shared = {name: getattr(layer, name) for name in ("data_format", "trainable")}
    options, padding = {name: getattr(layer, name) for name in OF_DEPTHWISE}, []
    if layer.padding == "causal":  # Which a DepthwiseConv1D does not take.
        before = (layer.kernel_size[0] - 1) * layer.dilation_rate[0]
        padding = [parts.new("pad", layers.ZeroPadding1D, (before, 0))]
        options["padding"] = "valid"
    depthwise_kernel, *pointwise_weights = weights_without_activation(layer, context)
    depthwise = parts.new(
        "depthwise",
        kinds[0],
        layer.kernel_size,
        **options,
        use_bias=False,
        dtype=layer.dtype_policy,
        weights=[depthwise_kernel],
        **shared,
    )
    pointwise = parts.new(
        "",
        kinds[1],
        layer.filters,
        1,
        **{name: getattr(layer, name) for name in OF_POINTWISE},
        kernel_regularizer=layer.pointwise_regularizer,
        kernel_constraint=layer.pointwise_constraint,
        dtype=layer.dtype_policy,
        weights=pointwise_weights,
        **shared,
    )
    is_linear = layer.activation in (None, keras.activations.linear)
    return parts.chain(
        *padding, depthwise, pointwise, *([] if is_linear else [activation_of(parts)])
    )


OF_DEPTHWISE = (
    *("strides", "padding", "dilation_rate", "depth_multiplier"),
    *("depthwise_regularizer", "depthwise_constraint"),
)
OF_POINTWISE = ("use_bias", "bias_regularizer", "bias_constraint", "activity_regularizer")
"""Options that the parts copy from the layer under the same names."""
