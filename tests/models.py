"""Small models that the tests quantize, and what they do with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

import keras_qat
from keras_qat.keras2.backend import keras

layers = keras.layers


def rng(seed: int = 0) -> np.random.Generator:
    """Random numbers that are the same in every run."""
    return np.random.default_rng(seed)


def images(count: int = 32, shape: tuple[int, ...] = (8, 8, 4), seed: int = 1) -> np.ndarray:
    """Normally distributed inputs."""
    return rng(seed).normal(size=(count, *shape)).astype(np.float32)


def scramble(model: Any, seed: int = 2) -> Any:
    """Gives a model weights as training leaves them.

    Biases are not zero, BatchNormalization has moving statistics, and its gammas are positive,
    negative and, for one channel, zero.
    """
    numbers = rng(seed)
    for layer in model._flatten_layers():
        for weight in layer._trainable_weights + layer._non_trainable_weights:
            kind, shape = weight.name.split("/")[-1].split(":")[0], weight.shape
            if kind == "moving_variance":
                value = numbers.uniform(0.3, 3.0, shape)
            elif kind == "gamma":
                value = numbers.uniform(0.3, 2.0, shape) * numbers.choice([-1, 1], shape)
                value[0], value[1], value[2] = 0.0, -1.5, 1.5
            elif "kernel" in kind:
                continue
            else:
                value = numbers.normal(size=shape)
            weight.assign(value)
    return model


def functional(*shapes: tuple[int, ...], build: Callable[..., Any], **kwargs: Any) -> Any:
    """A functional model: `build` gets one tensor for each input shape."""
    inputs = [keras.Input(shape) for shape in shapes]
    keras.utils.set_random_seed(3)
    return keras.Model(inputs if len(inputs) > 1 else inputs[0], build(*inputs), **kwargs)


def residual_net(seed: int = 3) -> Any:
    """A bit of everything on 8x8 images: what most tests use."""
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
    """Convolution, BatchNormalization, ReLU, dense: for tests that train a lot."""
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


def observe(qat: Any, *inputs: np.ndarray, batches: int = 3) -> Any:
    """Lets a quantized model observe ranges on parts of the inputs, without training it.

    BatchNormalization keeps its moving statistics.
    """
    keras_qat.freeze_batch_norm(qat)
    for batch in range(batches):
        parts = [each[batch::batches] for each in inputs]
        qat(parts[0] if len(parts) == 1 else parts, training=True)
    return qat


def out_of_order() -> Any:
    """Two inputs and two outputs, neither of them in alphabetical order."""
    left, right = keras.Input((4,), name="left"), keras.Input((6,), name="right")
    outputs = [
        layers.Dense(2, name="zebra")(right),
        layers.Dense(3, name="apple")(layers.Concatenate()([left, right])),
    ]
    return keras.Model([right, left], outputs)


def train(
    qat: Any, x: np.ndarray, steps: int = 4, rate: float = 0.01, outputs: int = 3, **kwargs: Any
) -> Any:
    """Compiles and fits a classifier for some steps of 8 examples, on random labels."""
    labels = rng(5).integers(0, outputs, steps * 8)
    compile_args = {key: kwargs.pop(key) for key in ("steps_per_execution",) if key in kwargs}
    qat.compile(
        keras.optimizers.SGD(rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **compile_args,
    )
    data = np.resize(x, (steps * 8, *x.shape[1:]))
    qat.fit(data, labels, batch_size=8, verbose=0, shuffle=False, **kwargs)
    return qat


def values(weights: Iterable[Any]) -> list[np.ndarray]:
    """Weights as arrays."""
    return [np.array(weight) for weight in weights]
