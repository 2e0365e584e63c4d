"""Models with tensors of integers, which no int8 kernel computes with: inputs, indices, outputs."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import keras_qat
from tests.end_to_end.exact import assert_agreement, model_of
from tests.networks.small import layers


def real(x: Any) -> Any:
    return layers.Dense(3)(tf.cast(x, tf.float32))


OF_INTEGERS = {
    "rescaling": ("uint8", lambda x: layers.Conv2D(3, 3)(layers.Rescaling(1 / 255)(x))),
    "normalization": ("int32", lambda x: real(layers.Normalization(mean=3.0, variance=2.0)(x))),
    "resizing": ("uint8", lambda x: real(layers.Resizing(3, 3)(x))),
    "pooling": ("uint8", lambda x: real(layers.MaxPooling2D()(x))),
    "pixels": ("uint8", lambda x: real(layers.UpSampling2D()(x))),
    "sum": ("int32", lambda x: real(tf.reduce_sum(x, 1))),
    "largest": ("int32", lambda x: real(tf.reduce_max(x, 1))),
    "argmax": ("int32", lambda x: real(tf.argmax(x, 1))),
    "negative": ("int32", lambda x: real(tf.where(x > 3, x, -x))),
    "clipped": ("int32", lambda x: real(tf.clip_by_value(x, 1, 4))),
    "arithmetic": ("int32", lambda x: [real(2 * x + 1), x]),
    "movement": ("int64", lambda x: real(layers.Permute((2, 1, 3))(x[:, 1:3]))),
    "dense": ("int64", lambda x: layers.Dense(4)(layers.Dense(3)(x))),
    "one_hot": ("int32", lambda x: layers.Dense(3)(tf.one_hot(x, 9))),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", OF_INTEGERS)
def test_what_reads_integers(kind):
    """Arithmetic on them is no int8 kernel's."""
    dtype, build = OF_INTEGERS[kind]
    assert_agreement(model_of(build, dtype=dtype))


def test_a_layer_that_reads_integers_says_so():
    model = model_of(layers.Rescaling(1 / 255), dtype="uint8")
    (reason,) = keras_qat.plan(model).float_layers.values()
    assert reason == "no int8 rule for Rescaling: reads uint8"


def test_outputs_that_are_integers():
    """`verify` divided them by a share of their range."""
    assert_agreement(model_of(lambda x: [tf.argmax(x, -1), tf.argmin(x, -1)]))


def test_complex_numbers():
    """A spectrogram computes in float. |x| of complex numbers was taken for that of real ones."""

    def build(x: Any) -> Any:
        spectrum = tf.signal.stft(tf.reshape(x, [-1, 144]), 32, 16)
        return layers.Dense(3)(tf.math.log(tf.abs(spectrum) + 0.1))

    assert_agreement(model_of(build))
