"""Four small networks of the kinds that people ship, for the table of `benchmarks.accuracy`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_qat.keras2.backend import keras

__all__ = ["NETWORKS"]

layers = keras.layers
Shape = tuple[int, ...]


def _normalized(x: Any, end: float | None = None, relu: bool = True) -> Any:
    x = layers.BatchNormalization(momentum=0.9)(x)
    return layers.ReLU(end)(x) if relu else x


def _conv(x: Any, filters: int, size: int, strides: int = 1) -> Any:
    return layers.Conv2D(filters, size, strides, padding="same", use_bias=False)(x)


def _depthwise(x: Any, strides: int = 1) -> Any:
    return layers.DepthwiseConv2D(3, strides, padding="same", use_bias=False)(x)


def _classifier(image: Any, x: Any) -> Any:
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, layers.Dense(10, name="logits")(x))


def resnet_20(shape: Shape) -> Any:
    """Three stages of three residual blocks: 20 layers with weights in the longest path."""
    image = keras.Input(shape, name="image")
    x = _normalized(_conv(image, 8, 3, 2))
    for filters, strides in (
        (8, 1),
        (8, 1),
        (8, 1),
        (16, 2),
        (16, 1),
        (16, 1),
        (32, 2),
        (32, 1),
        (32, 1),
    ):
        y = _normalized(_conv(x, filters, 3, strides))
        y = _normalized(_conv(y, filters, 3), relu=False)
        if x.shape != y.shape:
            x = _normalized(_conv(x, filters, 1, strides), relu=False)
        x = layers.ReLU()(layers.Add()([x, y]))
    return _classifier(image, x)


def mobilenet_v2(shape: Shape) -> Any:
    """Inverted residual blocks with ReLU6 and linear bottlenecks."""
    image = keras.Input(shape, name="image")
    x = _normalized(_conv(image, 8, 3, 2), 6.0)
    for filters, strides in ((12, 2), (12, 1), (12, 1), (24, 2), (24, 1)):
        y = _normalized(_conv(x, 4 * x.shape[-1], 1), 6.0)
        y = _normalized(_depthwise(y, strides), 6.0)
        y = _normalized(_conv(y, filters, 1), relu=False)
        x = layers.Add()([x, y]) if x.shape == y.shape else y
    return _classifier(image, _normalized(_conv(x, 96, 1), 6.0))


def ds_cnn(shape: Shape) -> Any:
    """A convolution and four depthwise-separable ones, as networks for keyword spotting have."""
    image = keras.Input(shape, name="image")
    x = _normalized(_conv(image, 48, 5, 4))
    for _ in range(4):
        x = _normalized(_depthwise(x))
        x = _normalized(_conv(x, 48, 1))
    return _classifier(image, x)


def lenet(shape: Shape) -> Any:
    """Two convolutions with pooling and three dense layers, no BatchNormalization."""
    image = keras.Input(shape, name="image")
    x = layers.Conv2D(6, 5, padding="same", activation="relu")(image)
    x = layers.Conv2D(16, 5, padding="same", activation="relu")(layers.MaxPooling2D()(x))
    x = layers.Flatten()(layers.MaxPooling2D()(x))
    for units in (120, 84):
        x = layers.Dense(units, activation="relu")(x)
    return keras.Model(image, layers.Dense(10, name="logits")(x))


NETWORKS: dict[str, Callable[[Shape], Any]] = {
    "ResNet-20": resnet_20,
    "MobileNetV2": mobilenet_v2,
    "DS-CNN": ds_cnn,
    "LeNet": lenet,
}
"""Name -> network of 10 classes for images of a shape, with logits."""
