"""Small models for tests of quantization."""

from collections.abc import Callable
from typing import Any

from tests.helpers import keras, layers


def functional(*shapes: tuple[int, ...], build: Callable[..., Any], **kwargs: Any) -> Any:
    """Returns a functional model. `build` receives one tensor for each input shape."""
    inputs = [keras.Input(shape) for shape in shapes]
    keras.utils.set_random_seed(3)
    return keras.Model(inputs if len(inputs) > 1 else inputs[0], build(*inputs), **kwargs)


def residual_net(seed: int = 3) -> Any:
    """Returns a network of many kinds of layers on 8x8 images, which most tests use."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((8, 8, 1), name="image")
    x = layers.Conv2D(6, 3, padding="same", use_bias=False, name="stem")(inputs)
    x = layers.BatchNormalization(momentum=0.8, name="stem_bn")(x)
    x = skip = layers.ReLU(name="stem_relu")(x)
    x = layers.DepthwiseConv2D(3, padding="same", use_bias=False, name="depthwise")(x)
    x = layers.BatchNormalization(momentum=0.8, name="depthwise_bn")(x)
    x = layers.ReLU(6.0, name="depthwise_relu")(x)
    x = layers.Conv2D(6, 1, name="project")(x)
    x = layers.BatchNormalization(momentum=0.8, name="project_bn")(x)
    x = layers.Add(name="merge")([x, skip])
    x = layers.ReLU(name="merge_relu")(x)
    x = layers.MaxPooling2D(name="pool")(x)
    x = layers.Flatten(name="flatten")(x)
    return keras.Model(inputs, layers.Dense(3, name="logits")(x), name="residual")


def tiny_net(units: int = 3) -> Any:
    """Returns convolution, BatchNormalization, ReLU and dense, for tests that train a lot."""
    keras.utils.set_random_seed(4)
    return keras.Sequential(
        [
            keras.Input((6, 6, 2), name="image"),
            layers.Conv2D(4, 3, name="conv"),
            layers.BatchNormalization(momentum=0.9, name="bn"),
            layers.ReLU(name="relu"),
            layers.Flatten(name="flatten"),
            layers.Dense(units, name="logits"),
        ],
        name="tiny",
    )


def out_of_order() -> Any:
    """Returns a model of two inputs and two outputs, both not in alphabetical order."""
    left, right = keras.Input((4,), name="left"), keras.Input((6,), name="right")
    outputs = [
        layers.Dense(2, name="zebra")(right),
        layers.Dense(3, name="apple")(layers.Concatenate()([left, right])),
    ]
    return keras.Model([right, left], outputs)
