"""Small networks of the kinds that people ship, for images of any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_qat.keras2.backend import keras

__all__ = ["MODELS"]

layers = keras.layers
Activation = Callable[[], Any]


def _conv(x: Any, filters: int, size: int = 3, strides: int = 1, relu: Any = layers.ReLU) -> Any:
    x = layers.Conv2D(filters, size, strides, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    return x if relu is None else relu()(x)


def _depthwise(x: Any, strides: int = 1, relu: Any = layers.ReLU) -> Any:
    x = layers.DepthwiseConv2D(3, strides, padding="same", use_bias=False)(x)
    return relu()(layers.BatchNormalization(momentum=0.9)(x))


def _relu6() -> Any:
    return layers.ReLU(6.0)


def _hard_swish() -> Any:
    """Hard swish as people spell it without a layer of that name."""
    return lambda x: layers.Multiply()([x, layers.ReLU(6.0)(x + 3.0) * (1.0 / 6.0)])


def _classifier(image: Any, x: Any) -> Any:
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, layers.Dense(10, name="logits")(x))


def resnet(shape: tuple[int, ...]) -> Any:
    """Residual blocks, one of them with a convolution in the shortcut."""
    image = keras.Input(shape, name="image")
    x = _conv(image, 16)
    for filters, strides in ((16, 1), (32, 2), (32, 1)):
        y = _conv(_conv(x, filters, 3, strides), filters, relu=None)
        shortcut = x if strides == 1 else _conv(x, filters, 1, strides, relu=None)
        x = layers.ReLU()(layers.Add()([y, shortcut]))
    return _classifier(image, x)


def mobilenet_v2(shape: tuple[int, ...]) -> Any:
    """Inverted residual blocks with ReLU6 and linear bottlenecks."""
    image = keras.Input(shape, name="image")
    x = _conv(image, 16, relu=_relu6)
    for filters, strides in ((16, 1), (24, 2), (24, 1)):
        y = _conv(x, 4 * x.shape[-1], 1, relu=_relu6)
        y = _conv(_depthwise(y, strides, _relu6), filters, 1, relu=None)
        x = layers.Add()([x, y]) if y.shape[1:] == x.shape[1:] else y
    return _classifier(image, _conv(x, 64, 1, relu=_relu6))


def inception(shape: tuple[int, ...]) -> Any:
    """Branches that are concatenated, average and max pooling."""
    image = keras.Input(shape, name="image")
    x = _conv(image, 16)
    for _ in range(2):
        branches = [
            _conv(x, 8, 1),
            _conv(_conv(x, 8, 1), 16),
            _conv(layers.AveragePooling2D(3, 1, padding="same")(x), 8, 1),
        ]
        x = layers.Concatenate()(branches)
        x = layers.Concatenate()([layers.MaxPooling2D()(x), layers.AveragePooling2D()(x)])
    return _classifier(image, x)


def mobilenet_v3(shape: tuple[int, ...]) -> Any:
    """Hard swish, and squeeze-and-excite with a hard sigmoid."""
    image = keras.Input(shape, name="image")
    x = _conv(image, 16, relu=_hard_swish)
    for filters, strides in ((16, 1), (24, 2), (24, 1)):
        y = _depthwise(_conv(x, 3 * x.shape[-1], 1, relu=_hard_swish), strides, _hard_swish)
        gate = layers.GlobalAveragePooling2D(keepdims=True)(y)
        gate = layers.Conv2D(8, 1, activation="relu")(gate)
        gate = layers.ReLU(6.0)(layers.Conv2D(y.shape[-1], 1)(gate) + 3.0) * (1.0 / 6.0)
        y = _conv(layers.Multiply()([y, gate]), filters, 1, relu=None)
        x = layers.Add()([x, y]) if y.shape[1:] == x.shape[1:] else y
    return _classifier(image, _conv(x, 64, 1, relu=_hard_swish))


MODELS: dict[str, Callable[[tuple[int, ...]], Any]] = {
    "resnet": resnet,
    "mobilenet_v2": mobilenet_v2,
    "inception": inception,
    "mobilenet_v3": mobilenet_v3,
}
"""Name -> what builds the network for images of a shape."""
