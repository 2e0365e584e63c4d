"""Operations on symbolic tensors that TFLite computes otherwise, or has no kernels of."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.interpreter import TFLiteModel
from tests.helpers import images, observe, scramble
from tests.networks.small import functional, layers


def quantized(build, shape=(6, 6, 4), size=(6, 6, 4)):
    """A quantization-aware model behind a convolution, with ranges, and inputs."""
    model = functional(shape, build=lambda x: build(layers.Conv2D(4, 1, name="conv")(x)))
    x = images(32, size)
    return observe(keras_qat.quantize_model(scramble(model)), x), x


def kernels(contents):
    return [name for name, *_ in TFLiteModel(contents).operations()]


@pytest.mark.parametrize("kernel", ["ARG_MAX", "ARG_MIN"])
def test_where_the_largest_code_is(kernel):
    """A map of classes is not turned into real numbers first."""
    find = {"ARG_MAX": tf.argmax, "ARG_MIN": tf.argmin}[kernel]
    qat, x = quantized(lambda y: find(y, axis=-1))
    contents = keras_qat.export_tflite(qat)
    assert kernels(contents) == ["CONV_2D", kernel]
    (found,) = TFLiteModel(contents).run({qat.input_names[0]: x}).values()
    np.testing.assert_array_equal(found, qat.predict(x, verbose=0))
    (simulated,) = keras_qat.simulate(qat, x).outputs.values()
    np.testing.assert_array_equal(simulated, found)


def test_a_clip_is_part_of_the_convolution():
    qat, x = quantized(lambda y: tf.clip_by_value(y, 0.0, 1.0))
    contents = keras_qat.export_tflite(qat)
    assert kernels(contents) == ["CONV_2D"]
    assert keras_qat.verify(qat, contents, x).identical == 1
    assert qat.predict(x, verbose=0).max() <= 1.0


def test_casts_to_integers_stay():
    """They cut off what is behind the point."""
    qat, x = quantized(lambda y: tf.cast(tf.cast(9.0 * y, tf.int32), tf.float32))
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), x).identical == 1


@pytest.mark.parametrize("shift", [(2, -1), (-7, 0)])
def test_roll_of_unknown_size(shift):
    model = functional((None, None, 4), build=lambda x: tf.roll(x, shift, [1, 2]))
    x = np.sin(images(16, (9, 8, 4)))
    qat = observe(keras_qat.quantize_model(model), x)
    np.testing.assert_allclose(model.predict(x, verbose=0), qat.predict(x, verbose=0), atol=0.02)
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), x, per_layer=True)
    assert report.identical == 1
    assert not report.float_operations


def test_a_shape_that_is_resized_to_leaves_nothing_behind():
    def build(y):
        small = layers.MaxPooling2D()(y)
        return layers.Concatenate()([y, tf.image.resize(small, tf.shape(y)[1:3])])

    qat, x = quantized(build)
    contents = keras_qat.export_tflite(qat)
    assert kernels(contents) == ["CONV_2D", "MAX_POOL_2D", "RESIZE_BILINEAR", "CONCATENATION"]
    assert keras_qat.verify(qat, contents, x).identical == 1
    assert not [layer.name for layer in qat.layers if "shape" in layer.name]


@pytest.mark.parametrize("number", [1.0, -3.5])
def test_padding_with_other_numbers_is_in_float(number):
    qat, x = quantized(lambda y: tf.pad(y, [[0, 0], [1, 1], [0, 0], [0, 0]], "CONSTANT", number))
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), x, per_layer=True)
    assert len(report.float_operations) == 1
    assert report.identical == 1


def test_a_sum_of_unknown_length_is_in_float():
    model = functional((None, 4), build=lambda x: tf.reduce_sum(x, 1))
    (reason,) = keras_qat.plan(model).float_layers.values()
    assert reason == "no int8 rule for tf.math.reduce_sum"
