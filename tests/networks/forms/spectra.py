"""Spectra: Fourier transforms are products of real numbers, where files are to have no float."""

import numpy as np
import tensorflow as tf

from tests.helpers import images, layers
from tests.networks.forms.form import Form, forms

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


def correlated(x):
    """As Autoformer."""
    spectra = tf.signal.rfft(tf.reshape(x, [-1, 3, 16]), [16])
    return tf.signal.irfft(spectra * tf.math.conj(spectra[:, ::-1]), fft_length=[16])


def denoised(x):
    """As DTLN: the magnitude times a mask, with the phase of the noisy signal."""
    spectra = tf.signal.stft(x, 16, 8)
    phase = tf.exp(1j * tf.cast(tf.math.angle(spectra), tf.complex64))
    return tf.signal.inverse_stft(tf.cast(0.5 * tf.abs(spectra), tf.complex64) * phase, 16, 8)


def filtered(x):
    """A real filter of the frequencies."""
    kernel = tf.constant(np.linspace(1.0, 0.0, 25), tf.complex64)
    return tf.signal.irfft(tf.signal.rfft(x) * kernel, [48])


def with_power(x):
    spectra = tf.signal.stft(x, 16, 8)
    return tf.math.real(spectra * tf.math.conj(spectra))


SPECTRA = {
    "filtered": filtered,
    "denoised": denoised,
    "with their power": with_power,
    "correlated": correlated,
    "back": lambda x: tf.signal.inverse_stft(tf.signal.stft(x, 16, 8), 16, 8),
    "shifted": lambda x: tf.abs(tf.signal.fftshift(tf.signal.fft(tokens(x)), axes=[-1])),
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
}


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
        "spectra of a vector of weights": Form(lambda x: Circulant()(x), (images(32, (3, 8)),)),
    }
}
