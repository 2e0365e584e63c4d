"""Spectra. For files without float, Fourier transforms become products of float values."""

import tensorflow as tf

from tests.helpers import images, layers
from tests.networks.forms.form import forms

SHAPE = (48,)


def magnitudes(x, **options):
    return tf.abs(tf.signal.stft(x, 16, 6, **options))


def of_complex(x):
    """Computes a spectrum like keras.io's example of speaker recognition."""
    x = tf.squeeze(x[..., None], axis=-1)
    spectra = tf.signal.fft(tf.cast(tf.complex(real=x, imag=tf.zeros_like(x)), tf.complex64))
    return tf.math.abs(tf.expand_dims(spectra, axis=-1)[:, :24, :])


def with_power(x):
    spectra = tf.signal.stft(x, 16, 8)
    return tf.math.real(spectra * tf.math.conj(spectra))


SPECTRA = {
    "with their power": with_power,
    "as usual": magnitudes,
    "padded": lambda x: magnitudes(x, pad_end=True),
    "other sizes": lambda x: magnitudes(x, fft_length=20, window_fn=tf.signal.hamming_window),
    "shorter": lambda x: magnitudes(x, fft_length=8, window_fn=None),
    "channels last": lambda x: tf.abs(
        tf.transpose(tf.signal.stft(tf.reshape(x, [-1, 2, 24]), 8, 6), perm=(0, 2, 3, 1))
    ),
    "imaginary part": lambda x: tf.math.imag(tf.signal.stft(x, 16, 16)),
    "of complex numbers": of_complex,
    "of both parts": lambda x: tf.math.real(tf.signal.fft(tf.complex(x, x[:, ::-1]))),
}


FORMS = {
    "spectra": forms(
        {name: lambda x, f=f: layers.Lambda(f)(x) for name, f in SPECTRA.items()}, images(32, SHAPE)
    )
}
