"""Tests the wrapper against the same computation with plain layers."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.arithmetic import fake_quant
from tests.helpers import assert_all_close, assert_all_equal, images, observe, scramble
from tests.networks.small import functional, layers

pytestmark = pytest.mark.legacy

X = images(32, (6, 6, 2))


def conv_bn_relu():
    model = scramble(
        functional(
            (6, 6, 2),
            build=lambda x: layers.ReLU()(
                layers.BatchNormalization(name="bn")(layers.Conv2D(4, 3, name="conv")(x))
            ),
        )
    )
    qat = keras_qat.quantize_model(model)
    return model, qat, qat.get_layer("quant_conv")


def test_wrapper_computes_with_quantized_weights_and_output():
    model, qat, wrapper = conv_bn_relu()
    observe(qat, X)
    conv, norm = model.get_layer("conv"), model.get_layer("bn")
    kernel = conv.kernel.numpy()
    scale = np.abs(kernel).max((0, 1, 2)) / 127
    inputs = qat.layers[1].quantizer
    x = fake_quant.fake_quantize(X, *inputs.observe(None, training=False))
    y = tf.nn.conv2d(x, np.round(kernel / scale) * scale, 1, "VALID") + conv.bias
    y = tf.nn.relu(norm(y, training=False))
    low, high = wrapper.output_quantizer.current_range()
    expected = fake_quant.fake_quantize(y, np.float32(low), np.float32(high))
    result = wrapper(x, training=False)
    step = (high - low) / 255
    assert np.mean(np.abs(result - expected) < step / 2) > 0.999
    assert np.abs(result - expected).max() < 1.5 * step


def test_gradients_are_those_of_the_rounded_layer():
    """The gradient passes as if the rounded kernel were the kernel itself."""
    _, qat, wrapper = conv_bn_relu()
    keras_qat.freeze_batch_norm(qat)
    kernel = wrapper.layer.kernel

    def gradient():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(wrapper(X, training=False)))
        return tape.gradient(loss, kernel).numpy()

    gradients = gradient()  # Without data, the kernel is quantized, but not the output.
    limits = np.abs(kernel.numpy()).max((0, 1, 2)) / 127
    kernel.assign(np.round(kernel.numpy() / limits) * limits)
    keras_qat.set_quantization(qat, False)
    np.testing.assert_allclose(gradients, gradient(), rtol=1e-3, atol=1e-3)


def test_training_updates_moving_statistics_like_plain_batch_norm():
    model, qat, wrapper = conv_bn_relu()
    keras_qat.set_quantization(qat, False)
    model(X, training=True)
    qat(X, training=True)
    assert_all_close(
        wrapper.batch_norm.weights, model.get_layer("bn").weights, rtol=1e-5, atol=1e-6
    )


def test_batch_norm_that_was_called_frozen_stays_frozen():
    norm = layers.BatchNormalization(name="bn")
    model = scramble(
        functional((6, 6, 2), build=lambda x: norm(layers.Conv2D(4, 3)(x), training=False))
    )
    qat = keras_qat.quantize_model(model)
    before = [weight.numpy() for weight in qat.non_trainable_weights if "moving_" in weight.name]
    qat(X, training=True)
    after = [weight.numpy() for weight in qat.non_trainable_weights if "moving_" in weight.name]
    assert len(before) == 2
    assert_all_equal(before, after)
