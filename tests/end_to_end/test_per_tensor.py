"""Weights with one scale for the tensor: of folded kernels, in training, model and file."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat import recipes
from tests.comparison import export
from tests.helpers import images, observe, scramble
from tests.networks.small import functional, layers, residual_net

PER_TENSOR = recipes.int8(per_channel=False)


def small_channel(size: float, **kwargs):
    """A depthwise convolution whose channel 1 is `size` times channel 0 when it is folded."""
    model = functional(
        (4, 4, 2),
        build=lambda x: layers.BatchNormalization(**kwargs)(
            layers.DepthwiseConv2D(3, use_bias=False)(x)
        ),
    )
    depthwise, norm = model.layers[1:]
    depthwise.depthwise_kernel.assign(np.ones((3, 3, 2, 1)))
    norm.moving_variance.assign([1.0, 1.0 / size**2])
    norm.moving_mean.assign([0.5, 0.25 / size])
    norm.beta.assign([0.25, 2.0])
    return model


@pytest.mark.parametrize("scale", [True, False])
def test_a_channel_too_small_for_the_scale_gives_its_offset(scale):
    """In training, model and file: as if its gamma were zero, and gamma still learns."""
    x = images(32, (4, 4, 2))
    result = export(small_channel(1 / 1000, scale=scale), x, recipe=PER_TENSOR)
    assert result.report.identical == 1
    qat = result.model
    for training in (True, False):
        np.testing.assert_allclose(qat(x, training=training)[..., 1], 2.0, atol=0.02)
        assert np.std(qat(x, training=training)[..., 0]) > 0.5
    if scale:
        gamma = qat.layers[-1].batch_norm.gamma
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(qat(x, training=True) ** 3)
        assert np.all(tape.gradient(loss, gamma).numpy() != 0)


def test_a_channel_of_few_codes_is_as_large_in_training_as_in_the_file():
    """With the statistics of the batch, too, which would hide that rounding made it larger."""
    x = images(256, (4, 4, 2))
    model = small_channel(0.6 / 127)
    qat = keras_qat.quantize_model(model, PER_TENSOR)
    norm = qat.layers[-1].batch_norm
    z = model.layers[1](x).numpy()
    norm.moving_mean.assign(z.mean((0, 1, 2)))
    variance = z.var((0, 1, 2))
    norm.gamma.assign(np.sqrt(variance + norm.epsilon) * [1, 0.6 / 127])
    norm.moving_variance.assign(variance)
    qat(x, training=True)
    trained = np.asarray(qat(x, training=True))[..., 1].std()
    assert trained == pytest.approx(np.asarray(qat(x))[..., 1].std(), rel=0.05)
    np.testing.assert_allclose(norm.moving_variance, variance, rtol=0.02)


def test_delayed_quantization_computes_in_float():
    model, x = scramble(residual_net()), images(8, (8, 8, 1))
    qat = keras_qat.quantize_model(model, PER_TENSOR)
    keras_qat.set_quantization(qat, False)
    keras_qat.freeze_batch_norm(qat)
    np.testing.assert_allclose(qat(x, training=True), model(x), rtol=1e-4, atol=1e-4)


def test_ranges_of_weights_are_those_of_the_folded_kernel():
    model = small_channel(0.5)
    qat = observe(keras_qat.quantize_model(model, PER_TENSOR), images(8, (4, 4, 2)))
    (result,) = [quantizer for quantizer in keras_qat.quantizers(qat) if "kernel" in quantizer.name]
    assert result.maximum == pytest.approx(1 / np.sqrt(1.001), rel=1e-5)
