"""Tests quotients by zero, too large values, and constants that strip restores."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import build_model, export_exact, images, keras, observe, quantize_on


def test_large_integers_keep_their_value_and_larger_ones_the_end_of_the_range():
    x = keras.Input((6,), dtype="int32")
    qat = keras_qat.quantize_model(keras.Model(x, tf.cast(x, tf.float32)))
    data = np.array([[0, 1_000, -5_000, 40_000, -40_000, 9]] * 8, np.int32)
    keras_qat.calibrate(qat, data)
    data[:, 3:] = 2**31 - 1, -(2**31), 30_000
    contents = export_exact(qat, data)
    predicted = keras_qat.TFLiteModel(contents).predict(data)
    np.testing.assert_allclose(predicted, np.clip(data, -40_000, 40_000), atol=400)


@pytest.mark.legacy
def test_this_version_runs_files_with_comparisons_and_quotients():
    """Both operators use 16 bits, which runtimes before 2.17 cannot convert from int8."""
    x = keras.Input((6,))
    y = keras.layers.Dense(6)(x)
    qat = keras_qat.quantize_model(keras.Model(x, tf.where(y > x, x, y / (tf.abs(x) + 1.0))))
    data = images(32, (6,))
    observe(qat, data)
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), data).identical == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "function",
    [
        tf.math.log,
        lambda x: tf.math.log1p(x - 1.0),
        lambda x: x**0.3,
        lambda x: x**-2,
        lambda x: -2.0 / x,
        tf.math.reciprocal,
        tf.sqrt,
        lambda x: x * tf.math.rsqrt(tf.square(x) + 1e-6),
        lambda x: x / (tf.abs(x) + 1e-6),
    ],
)
def test_what_quantization_makes_zero_has_finite_values_and_slopes(function):
    """1e-6 is less than a step of the sum, so log(relu(x) + 1e-6) becomes log(0)."""
    x = keras.Input((6,))
    hidden = function(tf.nn.relu(keras.layers.Dense(6)(x)) + 1e-6)
    model = keras.Model(x, keras.layers.Dense(2)(hidden))
    qat = keras_qat.quantize_model(model, strict=True)
    data = images(32, (6,))
    qat.compile("sgd", lambda y, outputs: 1e-12 * outputs)
    qat.fit(data, model(data), verbose=0)
    assert all(np.all(np.isfinite(weight)) for weight in qat.get_weights())
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), data).identical == 1


class Scaled(keras.layers.Layer):
    """A trained weight beside a constant."""

    def build(self, input_shape):
        self.factor = self.add_weight("factor", (5,), initializer="ones")

    def call(self, x):
        return tf.cumsum(tf.matmul(x, np.eye(3, 5, dtype="float32")) * self.factor, axis=1)


@pytest.mark.parametrize(
    "build",
    [
        lambda x: np.float32([[0.5, -1.0, 2.0]]) + tf.einsum("bi,bj->bi", x, x),
        lambda x: keras.layers.Dense(3)(tf.matmul(x, np.ones((3, 5), np.float32))),
        lambda x: Scaled()(x),
    ],
)
def test_strip_puts_constants_back(build):
    model = build_model((3,), build)
    data = images(16, (3,))
    qat = observe(keras_qat.quantize_model(model), data)
    qat.set_weights([weight * 0.5 for weight in qat.get_weights()])
    stripped = keras_qat.strip_quantization(qat)
    assert len(stripped.trainable_weights) == len(model.trainable_weights)
    for before, after in zip(model.weights, stripped.weights, strict=True):
        np.testing.assert_allclose(after, 0.5 * before)


def test_indices_are_not_clipped_to_the_range_of_the_values_beside_them():
    model = build_model((9,), lambda x: list(tf.math.top_k(-tf.nn.relu(x), 3)))
    data = images(8, (9,))
    qat = observe(keras_qat.quantize_model(model), data)
    _, indices = qat.predict(data, verbose=0)
    assert indices.max() > 2
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), data)
    assert {output.identical for output in report.outputs} == {1.0}


@pytest.mark.sample(1)
@pytest.mark.parametrize("compare", [tf.equal, tf.not_equal])
def test_numbers_that_mark_what_is_missing_are_found(compare):
    """-1.0 and the constant lie between two steps of the range."""
    data = np.random.default_rng(0).uniform(0.1, 2.0, (16, 6)).astype(np.float32)
    data[:, 3:] = -1.0
    x = keras.Input((6,))
    marks = keras.layers.Lambda(lambda t: tf.cast(compare(t, -1.0), tf.float32))(x)
    model = keras.Model(x, marks)
    qat = quantize_on(model, data, strict=True)
    expected = model.predict(data, verbose=0)
    for passed in (qat.predict(data, verbose=0), qat(data, training=True).numpy()):
        np.testing.assert_allclose(passed, expected, atol=0.01)
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), data).identical == 1


def test_zeros_are_found_among_small_numbers():
    """The range of the 0 that they are compared with was 1, so all of them were 0."""
    drawn = np.random.default_rng(1)
    data = 1e-3 * np.where(drawn.random((64, 12)) < 0.3, 0.0, drawn.normal(size=(64, 12)))
    model = build_model((12,), lambda x: tf.cast(x == 0.0, tf.float32))
    qat = quantize_on(model, data.astype(np.float32))
    found = qat.predict(data.astype(np.float32), verbose=0)
    assert np.mean(found == (data == 0)) > 0.98
