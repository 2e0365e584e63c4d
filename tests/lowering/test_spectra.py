"""Spectra: Fourier transforms are products of real numbers, where files are to have no float."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from tests.comparison import assert_kept
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


def tokens(x):
    return tf.cast(tf.reshape(x, [-1, 8, 6]), tf.complex64)


def mixed_tokens(x):
    """As FNet."""
    return tf.cast(tf.signal.fft2d(tokens(x)), tf.float32)


def filtered(x, kernel=None):
    """As a Fourier neural operator, whose kernel is in the frequencies."""
    spectra = tf.signal.rfft(x)[:, :9]
    kernel = np.exp(0.3j * np.arange(9)) if kernel is None else kernel
    kept = spectra * tf.constant(kernel, tf.complex64)
    zeros = tf.zeros([tf.shape(x)[0], 16], tf.complex64)
    return tf.signal.irfft(tf.concat([kept, zeros], -1), [48])


def correlated(x):
    """As Autoformer."""
    spectra = tf.signal.rfft(tf.reshape(x, [-1, 3, 16]), [16])
    return tf.signal.irfft(spectra * tf.math.conj(spectra[:, ::-1]), fft_length=[16])


def contracted(x):
    spectra = tf.signal.fft2d(tf.cast(tf.reshape(x, [-1, 8, 6]), tf.complex64))
    kernel = tf.constant(np.exp(1j * np.arange(24).reshape(6, 4)), tf.complex64)
    y = tf.signal.ifft(tf.einsum("bij,jk->bik", spectra, kernel) - 2.0)
    return tf.math.real(tf.reduce_mean(y / (1.0 + 1.0j), 1))


def by_matrices(x):
    """As FNet of TensorFlow's model garden."""
    rows, columns = (tf.constant(np.fft.fft(np.eye(size)), tf.complex64) for size in (8, 6))
    return tf.math.real(tf.einsum("...ij,jk,ni->...nk", tokens(x), columns, rows))


def turned(x):
    angle = tf.complex(tf.zeros_like(x), x)
    return tf.matmul(tokens(x), tf.exp(-tf.reshape(angle, [-1, 8, 6])), transpose_b=True)


SPECTRA = {
    "filtered": filtered,
    "correlated": correlated,
    "contracted": contracted,
    "of images": lambda x: tf.signal.irfft2d(tf.signal.rfft2d(tf.reshape(x, [-1, 8, 6]))),
    "back": lambda x: tf.signal.inverse_stft(tf.signal.stft(x, 16, 8), 16, 8),
    "both ways": lambda x: tf.math.real(tf.signal.ifft2d(tf.signal.fft2d(tokens(x)))),
    "shifted": lambda x: tf.abs(tf.signal.fftshift(tf.signal.fft(tokens(x)), axes=[-1])),
    "squared": lambda x: tf.abs(tf.square(tf.signal.fft(tokens(x)))),
    "multiplied": lambda x: tf.math.imag(turned(x)),
    "as usual": magnitudes,
    "padded": lambda x: magnitudes(x, pad_end=True),
    "other sizes": lambda x: magnitudes(x, fft_length=20, window_fn=tf.signal.hamming_window),
    "shorter": lambda x: magnitudes(x, fft_length=8, window_fn=None),
    "channels last": lambda x: tf.abs(
        tf.transpose(tf.signal.stft(tf.reshape(x, [-1, 2, 24]), 8, 6), perm=(0, 2, 3, 1))
    ),
    "imaginary part": lambda x: tf.math.imag(tf.signal.stft(x, 16, 16)),
    "of complex numbers": of_complex,
    "of both parts": of_both_parts,
    "in two directions": mixed_tokens,
    "by matrices": by_matrices,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SPECTRA)
def test_in_integers_as_in_float(name, tmp_path):
    inputs = keras.Input(SHAPE)
    model = keras.Model(inputs, layers.Lambda(SPECTRA[name])(inputs))
    x = images(32, SHAPE)
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    ours, real = (np.asarray(m(x)) for m in (qat, model))
    assert np.abs(ours - real).mean() < 0.01 * np.abs(real).max()
    assert_kept(qat, x, tmp_path)


def calibrated(model, x, share):
    """A quantized model, on average so near to the float one, as a share of its largest number."""
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    ours, real = (np.asarray(m(x)) for m in (qat, model))
    assert np.abs(ours - real).mean() < share * np.abs(real).max()
    return qat


class SpectralConv(layers.Layer):
    """As Fourier neural operators have it."""

    def build(self, shape):
        size = (shape[-1], 5, 6)
        self.real = self.add_weight("real", size, initializer="glorot_normal")
        self.imag = self.add_weight("imag", size, initializer="glorot_normal")

    def call(self, x):
        kernel = tf.complex(self.real, self.imag)
        spectra = tf.signal.rfft(tf.transpose(x, [0, 2, 1]))
        y = tf.einsum("bix,iox->box", spectra[:, :, :6], kernel)
        y = tf.pad(y, [[0, 0], [0, 0], [0, 3]])
        return tf.transpose(tf.signal.irfft(y, [16]), [0, 2, 1])


@pytest.mark.slow
def test_kernels_of_frequencies_train(tmp_path):
    inputs = keras.Input((16, 3))
    model, x = keras.Model(inputs, SpectralConv()(inputs)), images(32, (16, 3))
    qat = calibrated(model, x, 0.03)
    qat.compile(keras.optimizers.SGD(0.1), "mse")
    before = [weight.numpy() for weight in qat.trainable_weights]
    qat.fit(x, np.zeros((32, 16, 5)), verbose=0)
    changed = [(w.numpy() != b).any() for w, b in zip(qat.trainable_weights, before, strict=True)]
    assert changed == [True, True]
    assert_kept(qat, x, tmp_path)


class ComplexWeights(layers.Layer):
    def build(self, shape):
        self.factor = self.add_weight("factor", (48,), tf.complex64, "ones")

    def call(self, x):
        return tf.math.real(tf.cast(x, tf.complex64) * self.factor)


class Circulant(layers.Layer):
    """A convolution around a circle: a product of spectra, one of them a weight's."""

    def build(self, shape):
        self.kernel = self.add_weight("kernel", shape[-1:], initializer="random_normal")

    def call(self, x):
        spectra = tf.signal.fft(tf.cast(x, tf.complex64))
        kernel = tf.signal.fft(tf.cast(self.kernel, tf.complex64))
        return tf.math.real(tf.signal.ifft(spectra * kernel))


@pytest.mark.slow
def test_spectra_of_a_vector_of_weights(tmp_path):
    inputs = keras.Input((3, 8))
    model, x = keras.Model(inputs, Circulant()(inputs)), images(32, (3, 8))
    qat = calibrated(model, x, 0.02)
    assert_kept(qat, x, tmp_path)


def test_layers_with_complex_weights_stay():
    inputs = keras.Input(SHAPE)
    plan = keras_qat.plan(keras.Model(inputs, ComplexWeights(name="own")(inputs)))
    assert "its weights are complex numbers" in plan.float_layers["own"]


@pytest.mark.parametrize(
    "spectrum",
    [
        lambda x: tf.abs(tf.signal.fft(tf.complex(x, tf.zeros_like(x)))[:, :600]),
        lambda x: tf.math.real(tf.signal.ifft(tf.signal.fft(tf.cast(x, tf.complex64)))),
    ],
)
@pytest.mark.parametrize("in_lambda", [True, False])
def test_transforms_that_are_too_large_say_so(spectrum, in_lambda):
    """The reason was that there is no rule for the magnitude."""
    inputs = keras.Input((1200,))
    model = keras.Model(inputs, (layers.Lambda(spectrum) if in_lambda else spectrum)(inputs))
    (reason,) = {
        why for why in keras_qat.plan(model).float_layers.values() if "cannot be opened" in why
    }
    assert "Fourier transform of 1200 values is a product with a matrix of 1,440,000" in reason
    with pytest.warns(UserWarning, match=r"1,048,576 are written. Use shorter frames"):
        keras_qat.quantize_model(model)


def test_angles():
    inputs = keras.Input(SHAPE)
    model = keras.Model(inputs, tf.math.angle(tf.signal.stft(inputs, 12, 12)))
    x = images(32, SHAPE)
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    around = np.abs(np.asarray(qat(x) - model(x)))
    assert np.minimum(around, 2 * np.pi - around).mean() < 0.1
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), x).identical == 1


def test_magnitude_and_angle_of_one_layer():
    """As DTLN, whose names of parts were taken twice."""
    inputs = keras.Input(SHAPE)

    def polar(x):
        spectra = tf.signal.rfft(tf.signal.frame(x, 12, 12))
        return [tf.abs(spectra), tf.math.angle(spectra)]

    model = keras.Model(inputs, layers.Lambda(polar)(inputs))
    assert not keras_qat.plan(model, target="ethos_u55").float_layers


@pytest.mark.sample(1)
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
    model = keras.Model(inputs, tf.abs(tf.sqrt(spectra)))
    with pytest.raises(ValueError, match=r"math.sqrt"):
        keras_qat.plan(model, target="ethos_u55")
