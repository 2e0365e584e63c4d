"""Tests that a model without references is freed, whatever was done with it."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from tests.helpers import quantize_on

X = np.random.default_rng(0).random((8, 8, 8, 1), np.float32)
Y = np.zeros((8, 6, 6, 2), np.float32)


def made() -> Any:
    inputs = keras.Input((8, 8, 1))
    x = keras.layers.Conv2D(2, 3, use_bias=False)(inputs)
    return keras.Model(inputs, keras.layers.ReLU()(keras.layers.BatchNormalization()(x)))


def fit(qat: Any) -> None:
    qat.compile("adam", "mse")
    qat.fit(X, Y, 4, verbose=0)
    qat.evaluate(X, Y, verbose=0)


def gradients(qat: Any) -> None:
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.function(lambda x: qat(x, training=False))(x)
    assert tape.gradient(y, x) is not None


def simulate(qat: Any) -> None:
    keras_qat.simulate(qat, X)


def verify(qat: Any) -> None:
    keras_qat.verify(qat, keras_qat.export_tflite(qat), X)


@pytest.mark.sample(1)
@pytest.mark.legacy
@pytest.mark.parametrize(
    "use",
    [
        lambda qat: qat(X),
        lambda qat: qat.predict(X, verbose=0),
        *(fit, gradients, simulate, verify),
        lambda qat: keras_qat.learn_rounding(qat, X, iterations=2),
        lambda qat: keras_qat.strip_quantization(qat),
    ],
)
def test_a_model_is_freed(use: Callable[[Any], Any]) -> None:
    def refer_to_used_models() -> list[weakref.ref[Any]]:
        model = made()
        qat = quantize_on(model, X)
        use(qat)
        return [weakref.ref(variant) for variant in (model, qat)]

    held = refer_to_used_models()  # AutoGraph keeps copies of local variables while a call runs.
    keras.backend.clear_session()
    gc.collect()
    assert [reference() for reference in held] == [None, None]
