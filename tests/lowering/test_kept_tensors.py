"""Layers that keep a tensor of one call in an attribute, which a later call reads."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.ops.composed import NO_WIDE
from tests.comparison import assert_kept
from tests.helpers import images, keras, layers

pytestmark = pytest.mark.legacy


class Centered(layers.Layer):
    """Subtracts the mean of its input, and adds it again, as forecasting networks do."""

    def call(self, x, undo=False):
        if undo:
            return x + self.mean
        self.mean = tf.reduce_mean(x)
        return x - self.mean


class Scaled(Centered):
    """The same with a weight."""

    def build(self, shape):
        self.scale = self.add_weight("scale", shape[-1:], initializer="ones")

    def call(self, x, undo=False):
        return super().call(x / self.scale, True) if undo else super().call(x) * self.scale


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "eagerly"), [(Centered, False), (Scaled, True)])
def test_a_tensor_of_another_call_is_a_tensor(kind, eagerly, tmp_path):
    keras.utils.set_random_seed(1)
    inputs, layer = keras.Input((6, 2)), kind()
    outputs = layer(layers.Dense(2, name="trend")(layer(inputs)), undo=True)
    model = keras.Model(inputs, [outputs, layers.Dense(1, name="head")(outputs)])
    data = images(16, (6, 2)) + 3.0
    if eagerly:
        model(data[:1])
    qat = keras_qat.quantize_model(model, strict=not NO_WIDE)  # Quotients have 16 bits inside.
    assert qat.output_names == model.output_names
    assert {"quant_trend", "quant_head"} <= {layer.name for layer in qat.layers}
    assert len(qat.trainable_weights) == len(model.trainable_weights)
    keras_qat.calibrate(qat, data)
    for computed, expected in zip(qat(data), model(data), strict=True):
        assert np.abs(computed - expected).max() < 0.03 * np.abs(expected).max()
    assert_kept(qat, data, tmp_path)


def test_beside_noise_it_is_no_constant():
    """What a model computes cannot be compared with what its trace computes, if both vary."""
    inputs, layer = keras.Input((6, 2)), Centered()
    noise = layers.Lambda(lambda x: x + tf.random.normal(tf.shape(x)))
    model = keras.Model(inputs, layer(layers.Dense(2)(noise(layer(inputs))), undo=True))
    with pytest.warns(UserWarning, match="reads a tensor that is none of its arguments"):
        qat = keras_qat.quantize_model(model)
    keras_qat.calibrate(qat, images(16, (6, 2)) + 3.0)
    with pytest.raises(ValueError, match="that an earlier call stored in an attribute: return"):
        keras_qat.export_tflite(qat)


class Forecast(keras.Model):
    def __init__(self, centered):
        super().__init__()
        self.centered, self.dense = centered, layers.Dense(2)

    def call(self, x):
        return self.centered(self.dense(self.centered(x)), undo=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [Centered, Scaled])
def test_inside_of_a_model_of_ones_own_it_is_a_tensor(kind):
    model, data = Forecast(kind()), images(16, (6, 2)) + 3.0
    expected = model(data)
    qat = keras_qat.quantize_model(model, strict=not NO_WIDE)  # Quotients have 16 bits inside.
    assert len(qat.trainable_weights) == len(model.trainable_weights)
    keras_qat.calibrate(qat, data)
    assert np.abs(qat(data) - expected).max() < 0.1
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), data).identical == 1
