"""Tests custom layers that store tensors for later calls, or return None."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.ops.composed import NO_WIDE
from tests.helpers import images, keras, layers, quantize_on

pytestmark = pytest.mark.legacy


class Centered(layers.Layer):
    """Subtracts the mean of its input, and adds it back later, as in forecasting networks."""

    def call(self, x, undo=False):
        if undo:
            return x + self.mean
        self.mean = tf.reduce_mean(x)
        return x - self.mean


class Scaled(Centered):
    """A `Centered` layer with a weight."""

    def build(self, shape):
        self.scale = self.add_weight("scale", shape[-1:], initializer="ones")

    def call(self, x, undo=False):
        return super().call(x / self.scale, True) if undo else super().call(x) * self.scale


def test_in_a_functional_model_it_is_refused():
    inputs, layer = keras.Input((6, 2)), Centered()
    model = keras.Model(inputs, layer(layers.Dense(2)(layer(inputs)), undo=True))
    with pytest.warns(UserWarning, match="reads a tensor that is not one of its arguments"):
        qat = quantize_on(model, images(16, (6, 2)) + 3.0)
    with pytest.raises(ValueError, match="that an earlier call stored in an attribute"):
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


class Closed(layers.Layer):
    """Computes with NumPy, and also returns None."""

    def call(self, x):
        return tf.ensure_shape(tf.numpy_function(abs, [x], tf.float32), x.shape), None


@pytest.mark.filterwarnings("ignore:These layers compute in float")
def test_none_beside_what_is_computed_in_float():
    inputs, x = keras.Input((3, 4)), images(16, (3, 4))
    hidden, _ = Closed()(layers.Dense(4)(inputs))
    qat = quantize_on(keras.Model(inputs, layers.Dense(2)(hidden)), x)
    assert qat(x).shape == (16, 3, 2)
