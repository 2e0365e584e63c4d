"""What a model adds to its loss and its metrics, besides what it is compiled with."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.backend import keras
from keras_qat.interpreter import TFLiteModel
from tests.models import images, layers, observe, rng


def measured(model, x):
    """The loss on targets of zero, without and with the compiled one."""
    model.compile("sgd", "mse")
    whole = model.evaluate(x, np.zeros((len(x), *model.output_shape[1:])), verbose=0)
    return whole - np.mean(model.predict(x, verbose=0) ** 2), whole


def kernels(contents):
    return [name for name, *_ in TFLiteModel(contents).operations()]


def with_loss():
    """A model that adds a loss to what a layer inside it computes."""
    keras.utils.set_random_seed(3)
    x = keras.Input((6, 6, 4))
    hidden = layers.Conv2D(6, 3, activation="relu", name="hidden")(x)
    pooled = layers.GlobalAveragePooling2D()(hidden)
    model = keras.Model(x, layers.Dense(2, name="head")(pooled))
    model.add_loss(10.0 * tf.reduce_mean(hidden))
    model.add_loss(tf.reduce_sum(layers.Dense(1, name="critic")(pooled) ** 2))
    return model


def test_an_added_loss_stays_in_float():
    model, x = with_loss(), images(32, (6, 6, 4))
    assert not keras_qat.plan(model).float_layers
    qat = observe(keras_qat.quantize_model(model, strict=True), x)
    assert measured(qat, x)[0] == pytest.approx(measured(model, x)[0], rel=0.02)
    contents = keras_qat.export_tflite(qat)
    plain = keras_qat.quantize_model(keras.Model(model.input, model.output))
    assert kernels(contents) == kernels(keras_qat.export_tflite(observe(plain, x)))
    assert keras_qat.verify(qat, contents, x).identical == 1


def test_an_added_loss_trains():
    model, x = with_loss(), images(32, (6, 6, 4))
    qat = keras_qat.quantize_model(model)
    before, _ = measured(qat, x)
    qat.compile(keras.optimizers.SGD(0.01), loss=None)
    qat.fit(x, epochs=3, verbose=0)
    assert measured(qat, x)[0] < 0.7 * before


def test_an_added_loss_is_saved_and_stripped(tmp_path):
    model, x = with_loss(), images(32, (6, 6, 4))
    qat = observe(keras_qat.quantize_model(model), x)
    expected = measured(qat, x)
    qat.save(tmp_path / "qat.keras")
    assert measured(keras.models.load_model(tmp_path / "qat.keras"), x) == pytest.approx(expected)
    assert measured(keras_qat.strip_quantization(qat), x) == pytest.approx(measured(model, x))


def test_an_added_metric_is_measured():
    keras.utils.set_random_seed(3)
    x = keras.Input((4,))
    hidden = layers.Dense(6)(x)
    model = keras.Model(x, layers.Dense(2)(hidden))
    model.add_metric(tf.reduce_mean(hidden), "activity", aggregation="mean")
    data = rng().normal(size=(32, 4)).astype(np.float32)
    qat = observe(keras_qat.quantize_model(model), data)
    found = []
    for each in (model, qat):
        each.compile("sgd", "mse")
        measures = each.evaluate(data, np.zeros((32, 2)), verbose=0, return_dict=True)
        found.append(measures["activity"])
    assert found[1] == pytest.approx(found[0], abs=0.02)
