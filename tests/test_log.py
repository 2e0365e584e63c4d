"""Tests what is logged once, and what is not logged."""

import logging
import re

import pytest
import tensorflow as tf

import keras_qat
from keras_qat import messages, recipes
from keras_qat.keras2.backend import keras, make_tf_function
from tests.helpers import images
from tests.networks.small import functional, layers, tiny_net

pytestmark = pytest.mark.legacy
X = images(16, (6, 6, 2))


def list_messages(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "keras_qat"]


def test_no_warnings_of_retracing(caplog):
    """`backend.traced` creates functions of models. TensorFlow would warn of the fifth."""
    with caplog.at_level(logging.WARNING, "tensorflow"):
        for number in range(7):
            make_tf_function(lambda x: x + 1)(tf.constant(number))
    assert not [message for message in caplog.messages if "retracing" in message]


def test_layers_in_float_are_told_once(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(messages, "_SHOWN", set())
    build = lambda: functional((4,), build=layers.LayerNormalization())  # noqa: E731
    asked = recipes.int8().override("LayerNormalization", quantize=False)
    keras_qat.quantize_model(build(), asked)
    assert not list_messages(caplog)
    qat = keras_qat.quantize_model(build())
    keras_qat.quantize_model(build())
    keras_qat.calibrate(qat, images(8, (4,)))
    keras_qat.export_tflite(qat)
    (line,) = list_messages(caplog)
    assert re.match(r"'\w+' keeps 1 layer in float: 1 LayerNormalization \(unless recipe", line)
    qat.save(tmp_path / "qat.keras")
    messages._SHOWN.clear()  # As in another process.
    caplog.clear()
    loaded = keras.models.load_model(tmp_path / "qat.keras")
    keras_qat.export_tflite(loaded)
    keras_qat.export_tflite(loaded)
    (line,) = list_messages(caplog)
    assert line.startswith(
        "The file computes 1 layer in float: 1 LayerNormalization (unless recipe"
    )


def test_parts_of_a_layer_in_float_are_one_layer(monkeypatch, caplog):
    class Spectrum(layers.Layer):
        def call(self, x):
            return tf.square(tf.abs(tf.signal.stft(x, 8, 4)))

    monkeypatch.setattr(messages, "_SHOWN", set())
    keras_qat.quantize_model(functional((16,), build=lambda x: layers.Dense(3)(Spectrum()(x))))
    (line,) = list_messages(caplog)
    assert "keeps 1 layer in float: 1 Spectrum (unless strict=True or recipe.override(" in line


def test_prediction_before_data_is_told_once(monkeypatch, caplog):
    monkeypatch.setattr(messages, "_SHOWN", set())
    qat = keras_qat.quantize_model(tiny_net())
    qat.predict(X, verbose=0)
    qat.predict(X, verbose=0)
    (line,) = list_messages(caplog)
    assert line.startswith("Quantizers of 'tiny' have seen no data yet, so they do not round.")
    messages._SHOWN.clear()
    caplog.clear()
    keras_qat.calibrate(qat, X)
    qat.predict(X, verbose=0)
    assert not list_messages(caplog)
