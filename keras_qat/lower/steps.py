"""Lowering of layers that work along one more axis than int8 kernels have."""

from __future__ import annotations

from typing import Any

from keras_qat import graph as graph_lib
from keras_qat.backend import keras
from keras_qat.graph import Call
from keras_qat.inner_layers import FoldSteps, UnfoldSteps
from keras_qat.kernels import KERNELS
from keras_qat.lower.parts import Made, chain
from keras_qat.patterns import KINDS

__all__ = ["split_pooling_3d", "split_time_distributed"]

_layers = keras.layers

_TOLD_BY_SETTINGS = (
    _layers.Activation,
    _layers.ReLU,
    _layers.SeparableConv1D,
    _layers.SeparableConv2D,
    _layers.UpSampling2D,
)
"""Layers with rules that no table lists."""


def split_time_distributed(call: Call, made: Made) -> list[Call]:
    """TimeDistributed(layer) -> FoldSteps, layer, UnfoldSteps; for Dense just that.

    A layer without a rule, or a number of steps that is not known, is left as it is.
    """
    inner, name, steps = call.layer.layer, call.layer.name, call.inputs[0].shape[1]
    trainable = call.layer.trainable and inner.trainable

    def make() -> Any:
        return graph_lib.clone(inner, name=name, trainable=trainable)

    layer = made.layer(call.layer, "layer", make, inner.weights)
    if type(inner) is _layers.Dense:
        return chain(call, layer)
    is_known = type(inner) in (*KERNELS, *KINDS, *_TOLD_BY_SETTINGS)
    is_first = getattr(inner, "data_format", None) == "channels_first"
    if not is_known or is_first or steps is None or call.inputs[0].masked:
        return []
    return chain(
        call,
        made.layer(call.layer, "fold", lambda: FoldSteps(name=f"{name}_fold")),
        layer,
        made.layer(call.layer, "unfold", lambda: UnfoldSteps(steps, name=f"{name}_unfold")),
    )


def split_pooling_3d(call: Call, made: Made) -> list[Call]:
    """Pooling of volumes -> pooling of images, of every slice and then along the slices."""
    layer, (_, depth, _, _, channels) = call.layer, call.inputs[0].shape
    _, new_depth, new_height, new_width, _ = call.output.shape
    if new_depth is None or new_height is None or new_width is None:
        return []
    is_max = isinstance(layer, _layers.MaxPooling3D)
    pooling = _layers.MaxPooling2D if is_max else _layers.AveragePooling2D
    (pool_depth, *pool), (stride_depth, *strides) = layer.pool_size, layer.strides
    name, padding = layer.name, layer.padding

    def part(name: str, make: Any, *args: Any, **kwargs: Any) -> Any:
        return made.layer(layer, name, lambda: make(*args, **kwargs, name=name))

    return chain(
        call,
        part(f"{name}_fold", FoldSteps),
        part(f"{name}_slices", pooling, pool, strides, padding),
        part(f"{name}_unfold", UnfoldSteps, depth),
        part(f"{name}_flat", _layers.Reshape, (depth, new_height * new_width, channels)),
        part(f"{name}_depth", pooling, (pool_depth, 1), (stride_depth, 1), padding),
        part(name, _layers.Reshape, (new_depth, new_height, new_width, channels)),
    )
