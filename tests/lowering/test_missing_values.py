"""Tests NaN as missing values: models that replace it compute the same in training and files."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.graph.missing_values import REPLACES_NAN, find_nan_handling
from keras_qat.graph.read_model import read_model
from tests.helpers import build_model, keras, layers, quantize_on

RNG = np.random.default_rng(3)
X = RNG.normal(size=(64, 6)).astype("float32")
X_WITH_NAN = np.where(RNG.random(X.shape) < 0.2, np.nan, X).astype("float32")


class Imputation(layers.Layer):
    """Replaces NaN by a trained value per feature, and returns where it did."""

    def build(self, shape):
        self.value = self.add_weight("value", (shape[-1],), initializer="ones")

    def call(self, x):
        missing = tf.math.is_nan(x)
        return tf.concat([tf.where(missing, self.value, x), tf.cast(missing, x.dtype)], -1)


def zeros_like(x):
    return tf.where(tf.math.is_nan(x), tf.zeros_like(x), x)


def known(x):
    return tf.cast(tf.logical_not(tf.math.is_nan(x)), tf.float32)


def finite(x):
    return tf.where(tf.math.is_finite(x), x, -1.0)


def model_of(function):
    return build_model((6,), lambda x: layers.Dense(3)(layers.Dense(8, "relu")(function(x))))


NORM = layers.Normalization(mean=[0.1] * 6, variance=[1.3] * 6)
FORMS = {
    "zeros_like": zeros_like,
    "finite": finite,
    "infinite_too": lambda x: tf.where(tf.math.is_inf(x) | tf.math.is_nan(x), 0.5, x),
    "not_itself": lambda x: tf.where(x != x, tf.ones_like(x), x),
    "product": lambda x: tf.concat([tf.math.multiply_no_nan(x, known(x)), known(x)], -1),
    "normalized": lambda x: zeros_like(NORM(x)),
    "moved": lambda x: layers.Flatten()(zeros_like(tf.reshape((x - 0.5) / 2.0, [-1, 2, 3]))),
    "in_lambda": layers.Lambda(zeros_like),
    "own_layer": lambda x: Imputation()(x),
    "reshaped": lambda x: layers.Flatten()(zeros_like(layers.Reshape((2, 3))(x))),
    "only_asked": known,
}


def test_nan_is_replaced_alike_in_training_and_in_the_file():
    inputs = [keras.Input((6,), name=name) for name in FORMS]
    outputs = [layers.Dense(3)(f(x)) for f, x in zip(FORMS.values(), inputs, strict=True)]
    model, x = keras.Model(inputs, outputs), [X_WITH_NAN] * len(FORMS)
    qat = quantize_on(model, x)
    trained = qat(x, training=True)
    expected, predicted = (m.predict(x, verbose=0) for m in (model, qat))
    file = keras_qat.TFLiteModel(keras_qat.export_tflite(qat))
    assert {info.dtype.name for info in file.inputs.values()} == {"float32"}
    for name, y, *others, z in zip(
        file.inputs, expected, predicted, trained, file.predict(x), strict=True
    ):
        for computed in others:
            assert np.abs(computed - y).max() < 0.1 * np.abs(y).max(), name
        np.testing.assert_array_equal(z, others[0])
    assert not any("dense" in name for name in keras_qat.plan(model).float_layers)


def test_fit_evaluate_and_verify_report_the_same():
    qat = quantize_on(model_of(zeros_like), X_WITH_NAN)
    qat.compile(keras.optimizers.SGD(0.0), "mse")
    y = np.nan_to_num(X_WITH_NAN[:, :3])
    (trained,) = qat.fit(X_WITH_NAN, y, verbose=0, batch_size=64).history["loss"]
    evaluated = qat.evaluate(X_WITH_NAN, y, verbose=0)
    file = keras_qat.export_tflite(qat)
    of_file = np.mean((keras_qat.TFLiteModel(file).predict(X_WITH_NAN) - y) ** 2)
    assert trained == pytest.approx(evaluated, rel=0.05)
    assert of_file == pytest.approx(evaluated, rel=1e-5)
    assert keras_qat.verify(qat, file, X_WITH_NAN).identical == 1


@pytest.mark.slow
def test_infinity_is_replaced_too():
    qat = keras_qat.quantize_model(model_of(finite))
    x = np.where(np.isnan(X_WITH_NAN), -np.inf, X).astype("float32")
    keras_qat.calibrate(qat, x)
    file = keras_qat.TFLiteModel(keras_qat.export_tflite(qat))
    np.testing.assert_array_equal(file.predict(x), qat.predict(x, verbose=0))


def test_of_two_inputs_only_the_one_with_missing_values_is_in_float():
    a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
    joined = layers.Concatenate()([zeros_like(a), b])
    qat = quantize_on(keras.Model([a, b], layers.Dense(2)(joined)), [X_WITH_NAN, X])
    with pytest.raises(ValueError, match=r"'b' of .* contains NaN"):
        keras_qat.calibrate(qat, [X, X_WITH_NAN])
    inputs = keras_qat.TFLiteModel(keras_qat.export_tflite(qat)).inputs
    assert [inputs[name].dtype.name for name in "ab"] == ["float32", "int8"]


REACHED = {
    "a_dense_too": lambda x: zeros_like(x) + layers.Dense(6)(x),
    "after_a_dense": lambda x: zeros_like(layers.Dense(6)(x)),
    "summed_too": lambda x: zeros_like(x) + tf.reduce_sum(x, -1, keepdims=True),
    "compared_with_another": lambda x: tf.where(tf.not_equal(x, 2.0 * x), 0.0, x),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", REACHED)
def test_nan_that_would_reach_a_kernel_is_refused(name):
    """The float model would return NaN, which int8 cannot represent."""
    model = model_of(REACHED[name])
    assert not keras_qat.plan(model).float_layers
    qat = quantize_on(model, X)
    with pytest.raises(ValueError, match="contains NaN, first in example"):
        keras_qat.calibrate(qat, X_WITH_NAN)
    with pytest.raises(tf.errors.InvalidArgumentError, match="holds NaN"):
        qat.predict(X_WITH_NAN, verbose=0)


def test_products_without_nan_are_in_integers_between_layers():
    x = keras.Input((6,))
    y, gate = layers.Dense(4)(x), layers.Dense(4, "relu")(x)
    model = keras.Model(x, layers.Dense(2)(tf.math.multiply_no_nan(y, gate)))
    assert not keras_qat.plan(model).float_layers
    assert keras_qat.plan(model).to_dict()["tensors"][-3]["reason"] == "output of multiply"


def test_the_plan_says_why():
    plan = keras_qat.plan(model_of(zeros_like))
    assert set(plan.float_layers.values()) == {REPLACES_NAN}
    assert not keras_qat.plan(model_of(zeros_like), target="edgetpu").float_layers


def test_where_nan_of_an_input_is_replaced():
    replaced = lambda x: tf.where(x != x, 0.0, x)  # noqa: E731
    sliced = lambda x: replaced(tf.concat([x, 2.0 * x - 1.0], -1)[:, :6])  # noqa: E731
    assert find_nan_handling(read_model(build_model((6,), sliced)))
    returned_too = build_model((6,), lambda x: [x, replaced(x)])
    assert not find_nan_handling(read_model(returned_too))
