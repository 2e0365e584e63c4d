"""Spectra: Fourier transforms are products of real numbers, where files are to have no float."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from keras_qat.keras2.backend import keras
from tests.helpers import images
from tests.networks.forms.form import Form, forms

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


class Circulant(layers.Layer):
    """A convolution around a circle: a product of spectra, one of them a weight's."""

    def build(self, shape):
        self.kernel = self.add_weight("kernel", shape[-1:], initializer="random_normal")

    def call(self, x):
        spectra = tf.signal.fft(tf.cast(x, tf.complex64))
        kernel = tf.signal.fft(tf.cast(self.kernel, tf.complex64))
        return tf.math.real(tf.signal.ifft(spectra * kernel))


FORMS = {
    "spectra": {
        **forms(
            {name: lambda x, f=f: layers.Lambda(f)(x) for name, f in SPECTRA.items()},
            images(32, SHAPE),
        ),
        "kernels of frequencies": Form(lambda x: SpectralConv()(x), (images(32, (16, 3)),)),
        "spectra of a vector of weights": Form(lambda x: Circulant()(x), (images(32, (3, 8)),)),
    }
}
