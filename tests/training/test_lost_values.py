"""Tests warnings of features and concatenated tensors that share a range with far larger ones."""

import re
import warnings

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import build_model, keras, layers, rng

SCALES = np.float32([4e4, 0.4, 7e3])
ROWS = (rng(0).uniform(0, 1, (256, 3)) * SCALES).astype(np.float32)
SMALL_DECIDES = (ROWS[:, 1:2] > 0.2).astype(np.float32)
FEATURE = r"Input '{}': feature 1 \(of 0 to 2\) spans less than 4 quantized values and is lost, "


def normalizing(name="norm"):
    return layers.Normalization(mean=ROWS.mean(0), variance=ROWS.var(0), name=name)


def with_norm(norm, shape=(3,)):
    """Returns a model that decides by the smallest feature, which it normalizes first."""
    x = keras.Input(shape, name="row")
    answer = layers.Dense(1, "sigmoid", name="answer")
    model = keras.Model(x, answer(norm(x)))
    answer.set_weights([np.float32([[0], [8], [0]]), np.zeros(1)])
    return model


def trained(model, data, x=None):
    qat = keras_qat.quantize_model(model)
    qat.compile(keras.optimizers.SGD(1e-9), "mse")
    qat.fit(data, x, verbose=0)
    return qat


def test_features_that_only_statistics_tell():
    """For example, `fit` warns after training on a dataset, which is not inspected."""
    norm = layers.BatchNormalization(momentum=1.0, name="norm")
    model = with_norm(norm)
    norm.set_weights([np.ones(3), np.zeros(3), ROWS.mean(0), ROWS.var(0)])
    data = tf.data.Dataset.from_tensor_slices((ROWS, SMALL_DECIDES)).batch(64)
    message = FEATURE.format("row")
    assert re.search(message, str(keras_qat.plan(model)))
    with pytest.warns(UserWarning, match=message):
        qat = trained(model, data)
    with pytest.warns(UserWarning, match=message):
        file = keras_qat.export_tflite(qat)
    verdict = keras_qat.verify(qat, file, ROWS).verdict
    assert verdict.words == "same but poor"
    assert re.match(message, verdict.likely_cause)


@pytest.mark.parametrize("shape", [pytest.param((3,), marks=pytest.mark.slow), (8, 3)])
def test_features_in_arrays_for_training(shape):
    x = np.resize(ROWS, (64, *shape))
    y = np.zeros((64, *shape[:-1], 1))
    with pytest.warns(UserWarning, match=FEATURE.format("row")):
        trained(with_norm(normalizing(), shape), x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(with_norm(layers.Activation("linear"), shape), x / SCALES, y)


def test_a_normalization_in_float_keeps_features():
    """The message advises this."""
    model = with_norm(normalizing())
    with pytest.warns(UserWarning, match=FEATURE.format("row")) as told:
        keras_qat.calibrate(keras_qat.quantize_model(model), ROWS)
    code = re.search(r"quantize_model\(.*\)(?=\.$)", str(told[0].message))
    assert code and "int16x8" not in str(told[0].message)  # The feature spans 0.3 steps of it.
    assert code[0] in str(keras_qat.plan(model))
    qat = eval(f"keras_qat.{code[0]}")
    keras_qat.calibrate(qat, ROWS)
    file = keras_qat.TFLiteModel(keras_qat.export_tflite(qat))
    assert ((file.predict(ROWS) > 0.5) == SMALL_DECIDES).mean() > 0.95


JOINS = {
    "Concatenate": lambda a, b: layers.Concatenate(name="both")([a, b]),
    "tf.concat": lambda a, b: tf.concat([b, a], -1),
    "tf.maximum": tf.maximum,
}


def joined(join, part=None):
    """Returns a model that concatenates image features and an income."""
    image, income = keras.Input((8,), name="image"), keras.Input((1,), name="income")
    part = part or layers.Dense(4, "tanh", name="part")
    both = join(part(image), income)
    return keras.Model([image, income], layers.Dense(2, name="answer")(both), name="net")


PEOPLE = {
    "image": rng(1).normal(size=(64, 8)).astype(np.float32),
    "income": rng(2).uniform(0, 1e5, (64, 1)).astype(np.float32),
}
TENSOR = r"The output of 'part', -\S+ to \S+, shares one range, .*, with 'income'. It spans less"


@pytest.mark.parametrize("join", JOINS)
def test_joined_tensors(join):
    qat = keras_qat.quantize_model(joined(JOINS[join]))
    with pytest.warns(UserWarning, match=TENSOR):
        keras_qat.calibrate(qat, PEOPLE)


def test_joined_tensors_after_training():
    part = layers.Dense(4, name="part")
    model = joined(JOINS["Concatenate"], part)
    model.get_layer("answer").set_weights([np.eye(5, 2), np.zeros(2)])  # The income adds nothing.
    data = tf.data.Dataset.from_tensors((PEOPLE, np.zeros((64, 2)))).repeat(3)
    with pytest.warns(UserWarning, match=TENSOR):
        qat = trained(model, data)
    with pytest.warns(UserWarning, match=TENSOR):
        file = keras_qat.export_tflite(qat)
    verdict = keras_qat.verify(qat, file, PEOPLE).verdict
    assert verdict.words == "same but poor" and re.match(TENSOR, verdict.likely_cause)


class WithToken(layers.Layer):
    """Prepends a token to others, like vision transformers."""

    def build(self, shape):
        small = keras.initializers.RandomUniform(-1e-3, 1e-3)
        self.token = self.add_weight("token", (1, 1, shape[-1]), initializer=small)

    def call(self, x):
        return tf.concat([tf.tile(self.token, (tf.shape(x)[0], 1, 1)), x], 1)


@pytest.mark.filterwarnings("error:.*(lost|range)")  # pyproject.toml ignores these warnings.
def test_what_is_not_lost():
    """Pixels that are mostly 0, constant features, and concatenated weights or constants."""
    pixels = np.round(255 * rng(0).uniform(size=(64, 3)))
    pixels[:, 1] = rng(0).integers(0, 3, 64)
    pixels[:, 2] = 7
    model = with_norm(layers.Activation("linear"))
    keras_qat.calibrate(keras_qat.quantize_model(model), pixels)
    model = build_model((4, 8), lambda x: layers.Dense(2)(WithToken()(x)))
    keras_qat.calibrate(keras_qat.quantize_model(model), np.resize(PEOPLE["image"], (16, 4, 8)))
    x = keras.Input((4, 8))
    distance = tf.sqrt(tf.maximum(tf.reduce_sum(x * x, axis=-1), keras.backend.epsilon()))
    qat = keras_qat.quantize_model(keras.Model(x, layers.Dense(2)(distance)))
    keras_qat.calibrate(qat, np.resize(PEOPLE["image"], (16, 4, 8)))
    keras_qat.export_tflite(qat)
