"""Tests models with integer inputs, indices and outputs, which int8 kernels do not compute."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.end_to_end.exact import assert_agreement, inputs_of, model_of
from tests.helpers import build_model, export_exact, keras, layers, observe, quantize_on
from tests.networks.forms.indices import TOKENS, pooled


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


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", OF_INTEGERS)
def test_what_reads_integers(kind):
    """No int8 kernel computes arithmetic on integers."""
    dtype, build = OF_INTEGERS[kind]
    assert_agreement(model_of(build, dtype=dtype))


def test_a_layer_that_reads_integers_says_so():
    model = model_of(layers.Resizing(3, 3), dtype="uint8")
    (reason,) = keras_qat.plan(model).float_layers.values()
    assert reason == "no int8 rule for Resizing: reads uint8"


def test_outputs_that_are_integers():
    """`verify` divided them by a share of their range."""
    assert_agreement(model_of(lambda x: [tf.argmax(x, -1), tf.argmin(x, -1)]))


@pytest.mark.slow
def test_complex_numbers():
    """A spectrogram stays in float. |x| of complex values was mistaken for |x| of float values."""

    def build(x: Any) -> Any:
        spectrum = tf.signal.stft(tf.reshape(x, [-1, 144]), 32, 16)
        moved = tf.transpose(spectrum, [0, 2, 1])
        return layers.Dense(3)(tf.math.log(tf.abs(spectrum) + 0.1)) + tf.abs(moved)[:, :8, :3]

    assert_agreement(model_of(build))


@pytest.mark.slow
def test_complex_numbers_that_tflite_does_not_move_say_what_to_do():
    """The lookup of the file's type raised a KeyError."""

    def build(x: Any) -> Any:
        spectrum = tf.signal.stft(tf.reshape(x, [-1, 144]), 32, 16)
        return layers.Dense(3)(tf.abs(tf.where(tf.abs(spectrum) > 1, spectrum, 0 * spectrum)))

    model = model_of(build)
    qat = observe(keras_qat.quantize_model(model), inputs_of(model))
    with pytest.raises(ValueError, match=r"TFLite has no operation for tf\.SelectV2"):
        keras_qat.export_tflite(qat)


INDICES = {
    "looked up": lambda index: layers.Embedding(16, 3)(tf.cast(index, tf.int32)),
    "one hot": lambda index: tf.one_hot(tf.cast(index, tf.int32), 16),
    "read as they are": layers.Embedding(16, 3),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", INDICES)
def test_indices_are_no_signals(kind):
    """With 8 bits, 3 to 5 % of the indices changed."""
    model = model_of(lambda x: layers.Dense(3)(INDICES[kind](tf.floor(8.0 * tf.sin(x) + 8.0))))
    x = inputs_of(model)
    qat = observe(keras_qat.quantize_model(model), x)
    reasons = keras_qat.plan(model).reasons
    assert [why for value, why in reasons.items() if value.producer is None] == ["indices"]
    export_exact(qat, x)
    largest = abs(model.predict(x, verbose=0)).max()
    assert abs(qat.predict(x, verbose=0) - model.predict(x, verbose=0)).max() < largest / 32


def test_what_is_a_signal_too_is_quantized():
    """The distance to a cell's border, as in interpolation on grids, and an output of the model."""

    def build(x: Any) -> Any:
        cell = tf.floor(x)
        entries = layers.Embedding(16, 4)(tf.cast(cell + 8.0, tf.int32))
        return [layers.Dense(3)((x - cell)[..., None] * entries), 2.0 * x]

    plan = keras_qat.plan(model_of(build))
    in_float = [name.split(".")[-1] for name in plan.float_layers]
    assert len(in_float) == 2 and in_float[0].startswith("add") and in_float[1].startswith("cast")


PIXELS = {
    "converted": lambda x: tf.image.convert_image_dtype(x, tf.float32),
    "rescaled": layers.Rescaling(1 / 255, -0.5),
    "normalized": layers.Normalization(mean=[120.0, 110.0, 100.0], variance=[900.0] * 3),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("target", [None, "ethos_u55"])
@pytest.mark.parametrize("name", PIXELS)
def test_pixels_become_real_numbers(name, target):
    pixels = layers.Input((4, 4, 3), dtype="uint8")
    x = np.random.default_rng(0).integers(0, 256, (8, 4, 4, 3)).astype(np.uint8)
    model = keras.Model(pixels, layers.Conv2D(2, 3)(PIXELS[name](pixels)))
    qat = quantize_on(model, x, target=target, strict=True)
    assert np.mean(np.abs(qat(x) - model(x))) < 0.01 * np.ptp(model(x))
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat, target=target), x).identical == 1


@pytest.mark.slow
def test_files_take_tokens_as_the_model_does_unless_the_target_has_no_float():
    model = build_model((5,), pooled)
    for target, dtype in ((None, "float32"), ("ethos_u55", "int32")):
        qat = quantize_on(model, TOKENS, target=target)
        (details,) = keras_qat.TFLiteModel(keras_qat.export_tflite(qat)).inputs.values()
        assert details.dtype == dtype
    assert keras_qat.export_tflite(qat, input_dtype="float32") != keras_qat.export_tflite(qat)


def test_what_computes_with_tokens_keeps_float_values():
    model = build_model((5,), lambda x: layers.Embedding(9, 4)(x) * x[..., None])
    assert "Indices" not in str(keras_qat.plan(model))
