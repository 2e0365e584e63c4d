"""Tests BatchNormalization along any axes, and classes with a `call` that ends in Keras' `call`."""

import importlib

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.comparison import assert_kept
from tests.helpers import (
    assert_all_close,
    build_model,
    export_exact,
    images,
    keras,
    layers,
    quantize_on,
    scramble,
)

pytestmark = pytest.mark.legacy


class Freezable(layers.BatchNormalization):
    """Computes as frozen if it is not trainable, like code for YOLO."""

    def call(self, x, training=False):
        if not training:
            training = tf.constant(False)
        return super().call(x, tf.logical_and(training, self.trainable))


class Frozen(layers.BatchNormalization):
    """Uses the moving statistics in training, too, as in detectors."""

    def call(self, inputs, training=None):
        return super().call(inputs, training=False)


class Shifted(layers.BatchNormalization):
    """Computes something else."""

    def call(self, inputs, training=None):
        return super().call(inputs, training=training) + 1.0


OfTensorFlow1 = importlib.import_module(
    f"{layers.BatchNormalization.__module__}_v1"
).BatchNormalization
Synchronized = layers.experimental.SyncBatchNormalization


class Assigning(layers.Layer):
    """Assigns its moving statistics in training. It has Keras' weights in another order."""

    def __init__(self, momentum=0.99, epsilon=1e-3, **kwargs):
        super().__init__(**kwargs)
        self.momentum, self.epsilon = momentum, epsilon

    def build(self, shape):
        self.variance = self.add_weight("v", shape[-1:], initializer="ones", trainable=False)
        self.mean = self.add_weight("m", shape[-1:], initializer="zeros", trainable=False)
        self.beta = self.add_weight("b", shape[-1:], initializer="zeros")
        self.gamma = self.add_weight("gamma", shape[-1:], initializer="ones")

    def call(self, x, training=None):
        mean, variance = self.mean, self.variance
        if training:
            mean, variance = tf.nn.moments(x, list(range(len(x.shape) - 1)))
            self.mean.assign(self.momentum * self.mean + (1 - self.momentum) * mean)
            self.variance.assign_sub((1 - self.momentum) * (self.variance - variance))
        return (x - mean) * tf.math.rsqrt(variance + self.epsilon) * self.gamma + self.beta

    def get_config(self):
        return {**super().get_config(), "momentum": self.momentum, "epsilon": self.epsilon}


class Halved(Assigning):
    """Computes something else in training."""

    def call(self, x, training=None):
        y = super().call(x, training=training)
        return 0.5 * y if training else y


class WithoutWeights(layers.Layer):
    """Only has statistics."""

    def build(self, shape):
        self.mean = self.add_weight("m", shape[-1:], initializer="zeros", trainable=False)
        self.variance = self.add_weight("v", shape[-1:], initializer="ones", trainable=False)

    def call(self, x, training=None):
        if not training:
            return (x - self.mean) / tf.sqrt(self.variance + 1e-5)
        mean, variance = tf.nn.moments(x, [0])
        self.mean.assign(0.9 * self.mean + 0.1 * mean)
        self.variance.assign(0.9 * self.variance + 0.1 * variance)
        return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-5)


def quantized(kind, **options):
    x = keras.Input((8, 8, 3))
    y = kind(name="norm", **options)(layers.Conv2D(4, 3, use_bias=False)(x))
    model = keras.Model(x, layers.ReLU()(y))
    numbers = np.random.default_rng(1)
    model.layers[2].set_weights([numbers.uniform(0.5, 1.5, 4) for _ in range(4)])
    return model, keras_qat.quantize_model(model, strict=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "moves"),
    [
        *((kind, True) for kind in (Freezable, Synchronized, OfTensorFlow1, Assigning)),
        (Frozen, False),
    ],
)
def test_it_is_folded_and_learns_like_keras_own(kind, moves, tmp_path):
    _, qat = quantized(kind, momentum=0.5, epsilon=0.01)
    data = images(16, (8, 8, 3))
    assert [layer.epsilon for layer in qat.submodules if hasattr(layer, "epsilon")] == [0.01]
    moving = [weight for weight in qat.weights if "moving" in weight.name and "norm" in weight.name]
    assert len(moving) == 2
    before = [np.array(weight) for weight in moving]
    qat.compile("sgd", "mse")
    qat.fit(data, np.zeros((16, 6, 6, 4)), verbose=0)
    assert any(np.any(b != w) for b, w in zip(before, moving, strict=True)) == moves
    contents = export_exact(qat, data)
    qat.save(tmp_path / "qat.keras")
    assert keras_qat.export_tflite(keras.models.load_model(tmp_path / "qat.keras")) == contents
    stripped = keras_qat.strip_quantization(qat)
    norm = stripped.get_layer("norm")
    assert type(norm).__name__ == kind.__name__  # Keras loads the class of TensorFlow 1 as its own.
    gamma = next(weight for weight in qat.weights if "gamma" in weight.name)
    np.testing.assert_array_equal(norm.gamma, gamma)


def test_one_that_is_frozen_stays_frozen():
    _, qat = quantized(Freezable, trainable=False)
    qat.compile("sgd", "mse")
    moving = [weight for weight in qat.weights if "moving" in weight.name and "norm" in weight.name]
    before = [np.array(weight) for weight in moving]
    qat.fit(images(16, (8, 8, 3)), np.zeros((16, 6, 6, 4)), verbose=0)
    np.testing.assert_array_equal(before, list(map(np.array, moving)))


def test_statistics_of_all_replicas_stay_so():
    _, qat = quantized(Synchronized)
    norms = [layer for layer in qat.submodules if isinstance(layer, layers.BatchNormalization)]
    assert [norm.synchronized for norm in norms] == [True]


def test_that_of_tensorflow_1_learns_where_it_is_frozen():
    """In Keras 2, this class uses moving statistics if frozen, so it computes differently."""
    x = keras.Input((8, 8, 3))
    norm = OfTensorFlow1(name="norm", trainable=False)
    plan = keras_qat.plan(keras.Model(x, norm(layers.Conv2D(4, 3)(x))))
    assert list(plan.float_layers) == ["norm"]


@pytest.mark.parametrize("kind", [Shifted, Halved])
def test_one_that_computes_something_else_stays_in_float(kind):
    x = keras.Input((8, 8, 3))
    plan = keras_qat.plan(keras.Model(x, kind(name="norm")(layers.Conv2D(4, 3)(x))))
    assert list(plan.float_layers) == ["norm"]


def test_statistics_alone_are_learned_as_by_the_layer():
    model = build_model((6,), lambda x: WithoutWeights(name="norm")(layers.Dense(4)(x)))
    data, targets = images(32, (6,)), images(32, (4,))
    qat = quantize_on(model, data, strict=True)
    for each in (model, qat):
        each.compile(keras.optimizers.SGD(0.0), "mse")
        each.fit(data, targets, batch_size=8, shuffle=False, verbose=0)
    stripped = keras_qat.strip_quantization(qat).get_layer("norm")
    assert_all_close(stripped.weights, model.get_layer("norm").weights, rtol=0.1, atol=0.02)


AXES = {"several": [-2, -1], "first and last": (1, 3), "second": 2, "all": [1, 2, 3]}


@pytest.mark.sample(1)
@pytest.mark.parametrize("axes", AXES)
def test_axes(axes, tmp_path):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((2, 3, 4))
    norm = layers.BatchNormalization(axis=AXES[axes], momentum=0.5)
    model = scramble(keras.Model(inputs, layers.Dense(3)(norm(inputs))))
    x = images(16, (2, 3, 4)) * 2 + 1
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.set_quantization(qat, False)
    for training in (False, True, False):  # The last output, because statistics have changed.
        np.testing.assert_allclose(
            qat(x, training=training), model(x, training=training), 1e-4, 1e-5
        )
    keras_qat.set_quantization(qat, True)
    keras_qat.calibrate(qat, x)
    assert np.abs(qat(x) - model(x)).mean() < 0.02 * np.abs(model(x)).max()
    assert_kept(qat, x, tmp_path)
    np.testing.assert_allclose(keras_qat.strip_quantization(qat)(x), model(x), 1e-4, 1e-5)
