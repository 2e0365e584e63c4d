"""Tests Masking of other values than 0, between quantized values or far outside of the range."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.end_to_end.exact import assert_exact_everywhere
from tests.helpers import build_model, keras, layers, quantize_on, rng

pytestmark = pytest.mark.legacy

STEPS, MISSING = 4, -1.0


def model_of(features, build=lambda x: layers.GRU(4)(layers.Masking(MISSING)(x))):
    keras.utils.set_random_seed(1)
    return build_model((STEPS, features), lambda x: layers.Dense(3)(build(x)))


def data_of(features, missing=MISSING, far=False):
    """Returns sequences with missing steps inside and at the end. Other values are near 0."""
    numbers = rng(5)
    x = numbers.normal(size=(48, STEPS, features)).astype(np.float32)
    x = np.abs(x) if far else x
    gone = np.arange(STEPS) >= numbers.integers(1, STEPS + 1, (48, 1))
    x[gone | (numbers.random((48, STEPS)) < 0.2)] = missing
    return x


def noise(model, qat, data, **options):
    """Returns the mean square of quantization errors, relative to the outputs'."""
    expected = model(data).numpy()
    return np.mean(np.square(qat(data, **options).numpy() - expected)) / np.var(expected)


@pytest.mark.slow
@pytest.mark.parametrize("missing", [MISSING, -99.0])
def test_steps_are_found_in_front_of_the_quantizer(missing):
    """One feature comes near the mask value. A far mask value must not widen the range."""
    model = model_of(1, lambda x: layers.GRU(4)(layers.Masking(missing, name="marks")(x)))
    data = data_of(1, missing)
    qat = quantize_on(model, data)
    assert noise(model, qat, data) < 0.005
    assert noise(model, qat, data, training=True) < 0.005
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), data)
    assert report.identical == 1
    assert list(report.float_operations) == ["marks"]
    floats = keras_qat.plan(model).float_layers
    assert "override('Masking', open=True)" in floats["marks"]
    assert not any("gru" in name for name in floats)


@pytest.mark.parametrize("kernels", ["xnnpack", pytest.param("tflm", marks=pytest.mark.slow)])
def test_integers_are_compared_with_the_number_on_their_grid(kernels):
    """With an override, and for a target without float."""
    model, data = model_of(3), data_of(3)
    recipe = keras_qat.recipes.int8().override("Masking", open=True)
    assert not keras_qat.plan(model, target="ethos_u55").float_layers
    qat = quantize_on(model, data, recipe, strict=True)
    assert noise(model, qat, data) < 0.005
    assert noise(model, qat, data, training=True) < 0.005
    assert_exact_everywhere(qat, data, kernels)


class Own(layers.Layer):
    """A layer that masks steps inside."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.masking, self.steps = layers.Masking(MISSING), layers.GRU(4)

    def call(self, inputs):
        return self.steps(self.masking(inputs))


OTHERS = {
    "read by others": lambda x: layers.Concatenate()(
        [layers.GlobalMaxPooling1D()(x), layers.GRU(4)(layers.Masking(MISSING)(x))]
    ),
    "behind weights": lambda x: layers.LSTM(4)(
        layers.Masking(MISSING)(layers.Dense(3, activation="relu")(x))
    ),
    "inside": lambda x: Own()(x),
    "scaled": lambda x: layers.GRU(4)(layers.Masking(2 * MISSING)(2.0 * x)),
}


def test_a_number_outside_of_the_range_is_not_found():
    """The model was calibrated with complete data, and its range begins with 0."""
    x = keras.Input((4,))
    marks = layers.Lambda(lambda t: tf.cast(tf.equal(t, MISSING), tf.float32))(layers.ReLU()(x))
    qat = keras_qat.quantize_model(keras.Model(x, marks), strict=True)
    data = np.abs(rng().normal(size=(32, 4))).astype(np.float32)
    data[:8] = 0
    keras_qat.calibrate(qat, data)
    assert not qat(data).numpy().any()
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), data).identical == 1
