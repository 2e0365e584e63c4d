"""Tests operations on symbolic tensors that TFLite computes differently or lacks."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.comparison import assert_identical, export
from tests.helpers import images, keras, observe, quantize_on, scramble
from tests.networks.small import functional, layers


def exported(build, **options):
    """Returns a model of an operation after a convolution, and its file."""
    model = functional((6, 6, 4), build=lambda x: build(layers.Conv2D(4, 1, name="conv")(x)))
    return export(scramble(model), images(32, (6, 6, 4)), **options)


@pytest.mark.parametrize("kernel", ["ARG_MAX", "ARG_MIN"])
def test_where_the_largest_code_is(kernel):
    """The argmax reads quantized values, not float values."""
    find = {"ARG_MAX": tf.argmax, "ARG_MIN": tf.argmin}[kernel]
    made = exported(lambda y: find(y, axis=-1))
    assert made.operations == ["CONV_2D", kernel]
    (outputs,) = made.file.run({made.model.input_names[0]: made.x}).values()
    np.testing.assert_array_equal(outputs, made.model.predict(made.x, verbose=0))
    (simulated,) = keras_qat.simulate(made.model, made.x).outputs.values()
    np.testing.assert_array_equal(simulated, outputs)


def test_a_clip_is_part_of_the_convolution():
    made = exported(lambda y: tf.clip_by_value(y, 0.0, 1.0))
    assert made.operations == ["CONV_2D"]
    assert made.report.identical == 1
    assert made.model.predict(made.x, verbose=0).max() <= 1.0


def test_one_number_for_each_example_is_negated():
    made = exported(lambda y: -tf.cos(y[:, 0, 0, 0]), strict=True)
    assert made.report.identical == 1


def test_casts_to_integers_stay():
    """Casts to integers truncate fractions."""
    made = exported(lambda y: tf.cast(tf.cast(9.0 * y, tf.int32), tf.float32))
    assert made.report.identical == 1
    stripped = keras_qat.strip_quantization(made.model)
    first, *_ = keras_qat.plan(stripped).float_layers.values()
    assert first == "computes indices, which rounding would change"


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("shift", [(2, -1), (-7, 0)])
def test_roll_of_unknown_size(shift):
    model = functional((None, None, 4), build=lambda x: tf.roll(x, shift, [1, 2]))
    x = np.sin(images(16, (9, 8, 4)))
    made = export(model, x, per_layer=True)
    expected = model.predict(x, verbose=0)
    np.testing.assert_allclose(expected, made.model.predict(x, verbose=0), atol=0.02)
    assert made.report.identical == 1
    assert not made.report.float_operations


def test_a_shape_that_is_resized_to_leaves_nothing_behind():
    def build(y):
        small = layers.MaxPooling2D()(y)
        return layers.Concatenate()([y, tf.image.resize(small, tf.shape(y)[1:3])])

    made = exported(build)
    assert made.operations == ["CONV_2D", "MAX_POOL_2D", "RESIZE_BILINEAR", "CONCATENATION"]
    assert made.report.identical == 1
    assert not [layer.name for layer in made.model.layers if "shape" in layer.name]


def test_a_sum_of_unknown_length_is_in_float():
    model = functional((None, 4), build=lambda x: tf.reduce_sum(x, 1))
    (reason,) = keras_qat.plan(model).float_layers.values()
    assert reason == "no int8 rule for tf.math.reduce_sum"


def test_parts_of_unlike_ranges_are_joined_without_a_quantizer():
    """Recipe `contrib` adds no quantizer after a concatenation: all inputs get its range."""

    def build(x):
        kernels = keras.initializers.Constant(0.0713), keras.initializers.Constant(1.0)
        small, large = (
            layers.Conv2D(2, 1, activation="relu", kernel_initializer=k) for k in kernels
        )
        return layers.Concatenate()([small(x), large(x)])

    x = np.abs(images(4, (5, 5, 3)))
    model = functional((5, 5, 3), build=build)
    qat = observe(keras_qat.quantize_model(model, keras_qat.recipes.contrib()), x)
    (output,) = assert_identical(qat, x, "xnnpack").outputs.values()
    values = (output.codes - float(output.zero_point)) * output.scale
    expected = qat(x)
    np.testing.assert_allclose(values, expected, atol=1.1 * float(np.max(expected)) / 255)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("kernels", ["xnnpack", "reference"])
def test_many_softmaxes(kernels):
    """One in half a million values differed, because a graph computed a reciprocal of the sum."""
    inputs = keras.Input((4, 16, 16))
    x = (2 * np.random.default_rng(0).normal(size=(2048, 4, 16, 16))).astype(np.float32)
    qat = quantize_on(keras.Model(inputs, layers.Softmax()(inputs)), x[:64])
    qat.kernels = kernels
    (expected,) = keras_qat.simulate(qat, x, kernels, batch_size=256).outputs.values()
    predicted = qat.predict(x, batch_size=256, verbose=0)
    np.testing.assert_array_equal(predicted, expected.values)
