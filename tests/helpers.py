"""Helpers for tests of models: inputs, random weights, and a few training steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras

layers = keras.layers


def rng(seed: int = 0) -> np.random.Generator:
    """Returns random numbers that are the same in every run."""
    return np.random.default_rng(seed)


def images(count: int = 32, shape: tuple[int, ...] = (8, 8, 4), seed: int = 1) -> np.ndarray:
    """Returns normally distributed images."""
    return rng(seed).normal(size=(count, *shape)).astype(np.float32)


def scramble(model: Any, seed: int = 2) -> Any:
    """Gives a model weights like after training.

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
                value.flat[:3] = 0.0, -1.5, 1.5
            elif "kernel" in kind or not weight.dtype.is_floating:
                continue
            else:
                value = numbers.normal(size=shape)
            weight.assign(value)
    return model


def build_model(shape: tuple[int | None, ...], build: Callable[[Any], Any]) -> Any:
    """Returns a model of a layer, or of a function of one input."""
    x = keras.Input(shape)
    return keras.Model(x, build(x))


def quantize_on(model: Any, data: Any, recipe: Any = "int8", **options: Any) -> Any:
    qat = keras_qat.quantize_model(model, recipe, **options)
    keras_qat.calibrate(qat, data)
    return qat


def observe(qat: Any, *inputs: np.ndarray, batches: int = 3) -> Any:
    """Lets a quantized model observe ranges on batches of the inputs, without training it.

    BatchNormalization keeps its moving statistics.
    """
    keras_qat.freeze_batch_norm(qat)
    for batch in range(batches):
        parts = [array[batch::batches] for array in inputs]
        qat(parts[0] if len(parts) == 1 else parts, training=True)
    return qat


def train(
    qat: Any, x: np.ndarray, steps: int = 4, rate: float = 0.01, outputs: int = 3, **kwargs: Any
) -> Any:
    """Compiles and fits a classifier for some steps of 8 examples, with random labels."""
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


def save_and_load(model: Any, path: Any) -> Any:
    model.save(path)
    return keras.models.load_model(path)


def export_exact(qat: Any, x: Any, **options: Any) -> bytes:
    """Exports a model, asserts that its file computes exactly the same, and returns the file."""
    contents = keras_qat.export_tflite(qat, **options)
    assert keras_qat.verify(qat, contents, x).identical == 1
    return contents


def assert_all_equal(arrays: Iterable[Any], others: Iterable[Any]) -> None:
    for one, other in zip(arrays, others, strict=True):
        np.testing.assert_array_equal(one, other)


def assert_all_close(
    arrays: Iterable[Any], others: Iterable[Any], rtol: float = 1e-7, atol: float = 0.0
) -> None:
    for one, other in zip(arrays, others, strict=True):
        np.testing.assert_allclose(one, other, rtol, atol)


def moved(model: Any) -> Any:
    """Changes the values of trainable weights, as training does."""
    for weight in model.trainable_weights:
        weight.assign(1.1 * weight)
    return model


class Trainer(keras.Model):
    """Trains a model that it calls, with Keras' training step."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def call(self, x: Any, training: Any = None) -> Any:
        return self.inner(x, training=training)


@functools.cache
def runs_channels_first() -> bool:
    """Returns whether TensorFlow computes convolutions with channels first, which needs oneDNN."""
    try:
        tf.nn.conv2d(tf.zeros((1, 1, 2, 2)), tf.zeros((1, 1, 1, 1)), 1, "VALID", "NCHW")
    except tf.errors.UnimplementedError:
        return False
    return True


def values(weights: Iterable[Any]) -> list[np.ndarray]:
    return [weight.numpy() for weight in weights]
