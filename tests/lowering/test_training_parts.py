"""Tests custom layers with weights and operations that only run in training."""

import random

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.comparison import assert_kept
from tests.helpers import (
    build_model,
    export_exact,
    images,
    keras,
    layers,
    quantize_on,
    save_and_load,
    scramble,
)

SHAPE = (4, 4, 3)


@keras.utils.register_keras_serializable("tests")
class Block(layers.Layer):
    """Two branches with stochastic depth by hand, as in repositories of transformers."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first, self.second = layers.Conv2D(3, 1), layers.Conv2D(3, 1)
        self.dropout = layers.Dropout(0.1)

    def drop_path(self, x, training):
        if not training:
            return x
        mask = tf.floor(0.5 + tf.random.uniform((tf.shape(x)[0], 1, 1, 1)))
        return x / 0.5 * mask

    def call(self, inputs, training=None):
        y = self.dropout(self.first(inputs), training=training)
        x = inputs + self.drop_path(y, training)
        return x + self.drop_path(self.second(x), training)


def test_branches_are_dropped_in_training_only(tmp_path):
    inputs, x = keras.Input(SHAPE), images(64, SHAPE)
    qat = quantize_on(scramble(keras.Model(inputs, Block()(inputs))), x, strict=True)
    contents = export_exact(qat, x)
    loaded = save_and_load(qat, tmp_path / "qat.keras")
    assert keras_qat.export_tflite(loaded) == contents
    for trained in (qat, loaded):
        # In a quarter of the images both branches are dropped: the input remains, within a step.
        errors = np.abs(trained(x, training=True) - x).max((1, 2, 3))
        assert 0 < np.sum(errors < 0.1) < 48
    assert isinstance(keras_qat.strip_quantization(qat).layers[-1], Block)


class BySize(Block):
    """Draws as many values as the tensor has examples, which is unknown before training."""

    def drop_path(self, x, training):
        if not training:
            return x
        shape = (x.shape[0],) + (1,) * (tf.shape(x).shape[0] - 1)
        return x / 0.5 * tf.floor(0.5 + tf.random.uniform(shape, 0, 1))


def test_an_open_size_of_a_draw_is_that_of_the_batch():
    inputs, x = keras.Input(SHAPE), images(64, SHAPE)
    qat = quantize_on(scramble(keras.Model(inputs, BySize()(inputs))), x, strict=True)
    errors = np.abs(qat(x, training=True) - x).max((1, 2, 3))
    assert 0 < np.sum(errors < 0.1) < 48


class Sampled(layers.Layer):
    """Returns a sample in training, and the mean at inference, like variational encoders."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(6)

    def call(self, x, training=None):
        mean, variance = tf.split(self.dense(x), 2, axis=-1)
        if training:
            return mean + tf.exp(0.5 * variance) * tf.random.normal(tf.shape(mean))
        return mean


class Path(layers.Layer):
    """Stochastic depth with a mask of the size of the layer's input."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(3)

    def call(self, x, training=None):
        y = self.dense(x)
        if training:
            shape = (tf.shape(x)[0],) + (1,) * (len(x.shape) - 1)
            y = (y / 0.8) * tf.floor(0.8 + tf.random.uniform(shape, 0, 1))
        return x + y


class Scaled(Path):
    """Adds noise with a trained scale."""

    def build(self, shape):
        self.scale = self.add_weight("scale", (3,), initializer="ones")

    def call(self, x, training=None):
        y = self.dense(x)
        return y + self.scale * tf.random.normal(tf.shape(y)) if training else y


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("layer", [Sampled, Path, Scaled])
def test_parts_read_what_inference_computes_as_well(layer, tmp_path):
    inputs, x = keras.Input(SHAPE), np.repeat(images(8, SHAPE), 64, axis=0)
    model = scramble(keras.Model(inputs, layer()(inputs)))
    qat = quantize_on(model, x, strict=True)
    assert_kept(qat, x[::16], tmp_path)
    for trained in (qat, keras.models.load_model(tmp_path / "qat.keras")):
        ours, real = (
            np.reshape(each(x, training=True), (8, 64, -1)).std(1) for each in (trained, model)
        )
        np.testing.assert_allclose(ours.mean(), real.mean(), rtol=0.1)
        assert np.corrcoef(ours.ravel(), real.ravel())[0, 1] > 0.9


class LayerDrop(layers.Layer):
    """Drops layers by Python's random numbers, as in repositories of speech models."""

    def __init__(self, draw, **kwargs):
        super().__init__(**kwargs)
        self.draw, self.parts = draw, [layers.Dense(3) for _ in range(8)]

    def call(self, x, training=None):
        for part in self.parts:
            if training and self.draw() < 0.5:
                continue
            x = part(x)
        return x


DRAWS = {
    "random": lambda: random.random(),
    "random.uniform": lambda: random.uniform(0, 1),
    "numpy.random.uniform": lambda: np.random.uniform(0, 1),  # noqa: NPY002
    "numpy.random.rand": lambda: np.random.rand(),  # noqa: NPY002
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("draw", DRAWS)
def test_layers_dropped_by_python_are_opened(draw):
    model = build_model((4,), LayerDrop(lambda: DRAWS[draw]()))
    assert not keras_qat.plan(model).float_layers
    assert len(keras_qat.quantize_model(model).weights) >= 16


class WithoutNan(Path):
    """Creates a tensor of NaN, which is not equal to itself, in both phases, like sparsemax."""

    def call(self, x, training=None):
        y = layers.Dropout(0.5)(self.dense(x), training=training)
        return tf.where(tf.abs(y) < 1e6, y, tf.fill(tf.shape(y), tf.constant(np.nan)))


def test_nan_is_the_same_in_both_phases():
    assert not keras_qat.plan(build_model(SHAPE, WithoutNan())).float_layers


class NoisyWeights(layers.Layer):
    """Draws each weight around its mean in training, like NoisyNets."""

    def build(self, shape):
        self.mean = self.add_weight("mean", (shape[-1], 3))
        self.deviation = self.add_weight("deviation", (shape[-1], 3), initializer="ones")

    def call(self, x, training=None):
        kernel = self.mean
        if training:
            kernel += self.deviation * tf.random.normal(tf.shape(kernel))
        return tf.matmul(x, kernel)


class FactorizedNoise(NoisyWeights):
    """Draws a value for each row and each column, in another branch than inference."""

    def call(self, x, training=None):
        if training:
            rows, columns = tf.random.normal((4, 1)), keras.backend.random_normal([1, 3])
            return tf.matmul(x, self.mean + self.deviation * rows * columns)
        return tf.matmul(x, self.mean)


class Around(layers.Layer):
    """Draws in an inner layer, which Keras calls in a graph."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.noisy = FactorizedNoise()

    def call(self, x, training=None):
        return 2.0 * self.noisy(x, training=training)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("layer", [NoisyWeights, FactorizedNoise, Around])
def test_weights_are_drawn_in_training_only(layer, tmp_path):
    inputs, x = keras.Input((4,)), images(32, (4,))
    qat = quantize_on(keras.Model(inputs, layer()(inputs)), x, strict=True)
    assert_kept(qat, x, tmp_path)
    for trained in (qat, keras.models.load_model(tmp_path / "qat.keras")):
        with tf.GradientTape() as tape:
            first, second = trained(x, training=True), trained(x, training=True)
            loss = tf.reduce_sum(first**2)
        assert np.abs(first - second).max() > 0.5
        assert all(np.any(g) for g in tape.gradient(loss, trained.trainable_weights))
