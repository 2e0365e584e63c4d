"""Kernels that do not give the nearest code: the simulation has their codes at inference."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.backend import keras
from tests.layer_structures import INEXACT, family_inputs, family_model
from tests.models import functional, images, layers, observe, scramble

KERNELS = {"HARD_SWISH", "LEAKY_RELU", "PRELU", "RESIZE_BILINEAR"}


@pytest.mark.parametrize("family", INEXACT)
def test_each_kernel_gives_the_codes_of_the_simulation(family):
    inputs = family_inputs(family)
    qat = observe(keras_qat.quantize_model(scramble(family_model(family))), *inputs)
    file = keras_qat.export_tflite(qat)
    report = keras_qat.verify(qat, file, inputs if len(inputs) > 1 else inputs[0], per_layer=True)
    assert report.differing == ()
    assert KERNELS & {kernel for each in report.tensors for kernel in each.kernels}


def model_with(layer, shape=(6, 6, 4)):
    return scramble(
        functional(shape, build=lambda x: layers.Conv2D(3, 1)(layer(layers.Conv2D(4, 3)(x))))
    )


LAYERS = {
    "leaky": lambda: layers.LeakyReLU(0.23),
    "prelu": lambda: layers.PReLU(shared_axes=[1, 2]),
    "resize": lambda: layers.UpSampling2D(interpolation="bilinear"),
    "hard_swish": lambda: lambda x: x * tf.nn.relu6(x + 3.0) / 6.0,
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", LAYERS)
def test_whatever_the_ranges(kind, seed):
    """The kernels hold ratios of scales in few bits: each ratio is another case."""
    x = (0.3 + seed) * images(64, (6, 6, 4), seed=seed)
    qat = observe(keras_qat.quantize_model(model_with(LAYERS[kind]())), x)
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), x, per_layer=True)
    assert all(each.fed.identical >= 0.9999 for each in report.tensors[1:])


def test_training_does_without():
    """There the nearest code is as good, and costs less: the output lies on it."""
    x = images(64, (6, 6, 4))
    model = functional((6, 6, 4), build=layers.LeakyReLU(0.23, name="leaky"))
    qat = observe(keras_qat.quantize_model(model), x)
    rounded = qat.get_layer("leaky_quant")
    exact = keras.Model(qat.inputs, qat.get_layer("quant_leaky").output)
    for training in (True, False):
        y = qat(x, training=training)  # Which in training moves the range.
        minimum, maximum = rounded.quantizer.current_range()
        nearest = tf.quantization.fake_quant_with_min_max_vars(
            exact(x, training=False), minimum, maximum
        )
        differences = np.abs(y - nearest) / ((maximum - minimum) / 255)
        assert differences.max() < 1.5
        share = np.mean(differences > 0.5)
        assert share == 0 if training else 0 < share < 0.2


def test_without_quantization_nothing_is_rounded():
    x = images(16, (6, 6, 4))
    model = model_with(LAYERS["leaky"]())
    qat = observe(keras_qat.quantize_model(model), x)
    keras_qat.set_quantization(qat, enabled=False)
    np.testing.assert_allclose(
        qat.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_pass(kind):
    x = tf.constant(images(4, (6, 6, 4)))
    qat = observe(keras_qat.quantize_model(model_with(LAYERS[kind]())), x.numpy())
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(qat(x, training=False) ** 2)
    assert np.abs(tape.gradient(loss, x)).max() > 0


@pytest.mark.legacy
@pytest.mark.parametrize("form", ["model.keras", "model.h5", "model"])
def test_reloads_with_equal_outputs(tmp_path, form):
    def build(x):
        x = layers.LeakyReLU(0.2)(layers.Conv2D(4, 3)(x))
        x = layers.PReLU(shared_axes=[1, 2])(layers.Conv2D(4, 1)(x))
        x = layers.UpSampling2D(interpolation="bilinear")(x)
        return layers.Conv2D(3, 1)(x * tf.nn.relu6(x + 3.0) / 6.0)

    x = images(16, (6, 6, 4))
    qat = observe(keras_qat.quantize_model(scramble(functional((6, 6, 4), build=build))), x)
    qat.save(tmp_path / form)
    reloaded = keras.models.load_model(tmp_path / form)
    expected = qat.predict(x, verbose=0)
    np.testing.assert_array_equal(reloaded.predict(x, verbose=0), expected)
    report = keras_qat.verify(reloaded, keras_qat.export_tflite(reloaded), x, per_layer=True)
    assert report.differing == ()
