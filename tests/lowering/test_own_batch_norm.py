"""Other classes of BatchNormalization, whose `call` ends in Keras' own."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from tests.helpers import images

layers = keras.layers

pytestmark = pytest.mark.legacy


class Freezable(layers.BatchNormalization):
    """As YOLO's code has it: frozen where the layer is."""

    def call(self, x, training=False):
        if not training:
            training = tf.constant(False)
        return super().call(x, tf.logical_and(training, self.trainable))


class Frozen(layers.BatchNormalization):
    """As detectors have it: the moving statistics in training, too."""

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
    [(Freezable, True), (Frozen, False), (Synchronized, True), (OfTensorFlow1, True)],
)
def test_it_is_folded_and_learns_like_keras_own(kind, moves, tmp_path):
    _, qat = quantized(kind, momentum=0.5, epsilon=0.01)
    data = images(16, (8, 8, 3))
    assert [layer.epsilon for layer in qat.submodules if hasattr(layer, "epsilon")] == [0.01]
    moving = [weight for weight in qat.weights if "moving" in weight.name and "norm" in weight.name]
    before = [np.array(weight) for weight in moving]
    qat.compile("sgd", "mse")
    qat.fit(data, np.zeros((16, 6, 6, 4)), verbose=0)
    assert any(np.any(b != w) for b, w in zip(before, moving, strict=True)) == moves
    contents = keras_qat.export_tflite(qat)
    assert keras_qat.verify(qat, contents, data).identical == 1
    qat.save(tmp_path / "qat.keras")
    assert keras_qat.export_tflite(keras.models.load_model(tmp_path / "qat.keras")) == contents
    stripped = keras_qat.strip_quantization(qat)
    norm = stripped.get_layer("norm")
    assert type(norm).__name__ == kind.__name__  # Keras loads that of TensorFlow 1 as its own.
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
    """Keras 2 has it use the moving statistics, so it is not the same."""
    x = keras.Input((8, 8, 3))
    norm = OfTensorFlow1(name="norm", trainable=False)
    plan = keras_qat.plan(keras.Model(x, norm(layers.Conv2D(4, 3)(x))))
    assert list(plan.float_layers) == ["norm"]


def test_one_that_computes_something_else_stays_in_float():
    x = keras.Input((8, 8, 3))
    plan = keras_qat.plan(keras.Model(x, Shifted(name="norm")(layers.Conv2D(4, 3)(x))))
    assert list(plan.float_layers) == ["norm"]
