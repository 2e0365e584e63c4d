"""Tests spectra: Fourier transforms that train, that stay in float, and angles."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import build_model, images, keras, layers, quantize_on
from tests.networks.forms.spectra import SHAPE, SPECTRA


@pytest.mark.parametrize(
    "spectrum",
    [
        lambda x: tf.abs(tf.signal.fft(tf.complex(x, tf.zeros_like(x)))[:, :600]),
        lambda x: tf.math.real(tf.signal.fft(tf.cast(x, tf.complex64))),
    ],
)
@pytest.mark.parametrize("in_lambda", [True, False])
def test_transforms_that_are_too_large_say_so(spectrum, in_lambda):
    model = build_model((1200,), layers.Lambda(spectrum) if in_lambda else spectrum)
    (reason,) = {
        why for why in keras_qat.plan(model).float_layers.values() if "cannot be traced" in why
    }
    assert "Fourier transform of 1200 values needs a matrix of 1,440,000" in reason
    with pytest.warns(UserWarning, match=r"1,048,576. Use shorter frames"):
        keras_qat.quantize_model(model)


@pytest.mark.slow
def test_angles():
    model = build_model(SHAPE, lambda inputs: tf.math.angle(tf.signal.stft(inputs, 12, 12)))
    x = images(32, SHAPE)
    qat = quantize_on(model, x, strict=True)
    around = np.abs(np.asarray(qat(x) - model(x)))
    assert np.minimum(around, 2 * np.pi - around).mean() < 0.1
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), x).identical == 1


@pytest.mark.slow
def test_magnitude_and_angle_of_one_layer():
    inputs = keras.Input(SHAPE)

    def polar(x):
        spectra = tf.signal.rfft(tf.signal.frame(x, 12, 12))
        return [tf.abs(spectra), tf.math.angle(spectra)]

    model = keras.Model(inputs, layers.Lambda(polar)(inputs))
    assert not keras_qat.plan(model, target="ethos_u55").float_layers


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "in_float"), [("as usual", True), ("of complex numbers", False)])
def test_what_tflite_computes_in_float_stays(name, in_float):
    model = build_model(SHAPE, layers.Lambda(SPECTRA[name]))
    plan = keras_qat.plan(model)
    for target in ("ethos_u55", "ethos_u85", "tflm", "cmsis_nn"):
        assert not keras_qat.plan(model, target=target).float_layers
    recipe = keras_qat.recipes.int8().override("Lambda", open=True)
    assert not keras_qat.plan(model, recipe).float_layers
    asked = "in float, unless strict=True or recipe.override('Lambda', open=True) asks for integers"
    assert set(plan.float_layers.values()) == ({asked} if in_float else set())
    assert in_float == ("1 layer stays in float, as 2 operations: " in str(plan))
    assert in_float == (f"holds complex64; {asked}" in str(plan))


def test_spectra_of_unknown_sizes_name_no_request():
    model = build_model((None,), lambda x: tf.abs(tf.signal.stft(x, 16, 6)))
    assert "asks for integers" not in str(keras_qat.plan(model))


KERNEL = np.ones((25, 3), np.complex64)

OTHERS = {
    "signal.irfft": lambda x: tf.signal.irfft(tf.signal.rfft(x)),
    "math.sqrt": lambda x: tf.abs(tf.sqrt(tf.signal.stft(x, 12, 12))),
    "add": lambda x: tf.abs(tf.signal.stft(x, 12, 12) + 1.0),
    "einsum": lambda x: tf.math.real(tf.einsum("bi,io->bo", tf.signal.rfft(x), KERNEL)),
    "signal.irfft2d": lambda x: tf.signal.irfft2d(tf.signal.rfft2d(tf.reshape(x, [-1, 8, 6]))),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", OTHERS)
def test_other_operations_on_complex_numbers_stay_in_float(name):
    model = build_model(SHAPE, layers.Lambda(OTHERS[name]))
    reasons = keras_qat.plan(model).float_layers.values()
    assert any(f"{name}: reads complex numbers" in reason for reason in reasons)
    with pytest.raises(ValueError, match=rf"converter refuses 1 layer: .*{name}"):
        keras_qat.plan(model, target="ethos_u55")
