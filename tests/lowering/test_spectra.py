"""Spectra: Fourier transforms are products of real numbers, where files are to have no float."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.frontend.keras2.backend import keras
from tests.helpers import images

layers = keras.layers
SHAPE = (48,)


def magnitudes(x, **options):
    return tf.abs(tf.signal.stft(x, 16, 6, **options))


def of_complex(x):
    """As keras.io's example of speaker recognition."""
    x = tf.squeeze(x[..., None], axis=-1)
    spectra = tf.signal.fft(tf.cast(tf.complex(real=x, imag=tf.zeros_like(x)), tf.complex64))
    return tf.math.abs(tf.expand_dims(spectra, axis=-1)[:, :24, :])


def of_both_parts(x):
    return tf.math.real(tf.signal.fft(tf.complex(x, x[:, ::-1])))


def mixed_tokens(x):
    """As FNet."""
    tokens = tf.cast(tf.reshape(x, [-1, 8, 6]), tf.complex64)
    return tf.cast(tf.signal.fft2d(tokens), tf.float32)


SPECTRA = {
    "as usual": magnitudes,
    "padded": lambda x: magnitudes(x, pad_end=True),
    "other sizes": lambda x: magnitudes(x, fft_length=20, window_fn=tf.signal.hamming_window),
    "shorter": lambda x: magnitudes(x, fft_length=8, window_fn=None),
    "imaginary part": lambda x: tf.math.imag(tf.signal.stft(x, 16, 16)),
    "of complex numbers": of_complex,
    "of both parts": of_both_parts,
    "in two directions": mixed_tokens,
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SPECTRA)
def test_in_integers_as_in_float(name, tmp_path):
    inputs = keras.Input(SHAPE)
    model, x = keras.Model(inputs, SPECTRA[name](inputs)), images(32, SHAPE)
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    ours, real = (np.asarray(m(x)) for m in (qat, model))
    assert np.abs(ours - real).mean() < 0.01 * np.abs(real).max()
    contents = keras_qat.export_tflite(qat)
    assert keras_qat.verify(qat, contents, x).identical == 1
    qat.save(tmp_path / "qat.keras")
    assert keras_qat.export_tflite(keras.models.load_model(tmp_path / "qat.keras")) == contents


def test_angles():
    inputs = keras.Input(SHAPE)
    model = keras.Model(inputs, tf.math.angle(tf.signal.stft(inputs, 12, 12)))
    x = images(32, SHAPE)
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    around = np.abs(np.asarray(qat(x) - model(x)))
    assert np.minimum(around, 2 * np.pi - around).mean() < 0.1
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), x).identical == 1


@pytest.mark.parametrize(("name", "in_float"), [("as usual", True), ("in two directions", False)])
def test_what_tflite_computes_in_float_stays(name, in_float):
    """By default; it has no other transforms than of real numbers."""
    inputs = keras.Input(SHAPE)
    model = keras.Model(inputs, layers.Lambda(SPECTRA[name])(inputs))
    assert bool(keras_qat.plan(model).float_layers) == in_float
    assert not keras_qat.plan(model, target="ethos_u55").float_layers


def test_other_operations_on_complex_numbers_stay_in_float():
    inputs = keras.Input(SHAPE)
    spectra = tf.signal.stft(inputs, 12, 12)
    model = keras.Model(inputs, tf.abs(tf.square(spectra)))
    assert len(keras_qat.plan(model, target="ethos_u55").float_layers) == 3
