"""BatchNormalization's statistics, taken anew: those of the batches, and nothing else changes."""

import numpy as np
import pytest

import keras_qat
from tests.helpers import assert_all_equal, images, keras, quantize_on, scramble
from tests.networks.small import functional, layers, residual_net, tiny_net

pytestmark = pytest.mark.legacy
X = images(24, (8, 8, 1))


def calibrated(model, recipe="int8"):
    qat = quantize_on(model, X, recipe)
    return qat


def test_statistics_are_those_of_the_batches():
    """Of the first layer, computed by hand from its quantized input and weights."""
    qat = calibrated(scramble(residual_net()))
    keras_qat.reestimate_batch_norm(qat, X, batch_size=8)
    stem = qat.get_layer("quant_stem")
    ends = keras_qat.quantizers(qat)[0]
    scale = (ends.maximum - ends.minimum) / 255
    kernel = stem.layer.kernel.numpy()
    step = np.abs(kernel).max((0, 1, 2)) / 127
    conv = keras.layers.Conv2D(6, 3, padding="same", use_bias=False)
    conv.build((None, 8, 8, 1))
    conv.kernel.assign(np.round(kernel / step) * step)
    parts = [conv(np.round(X[i : i + 8] / scale) * scale).numpy() for i in (0, 8, 16)]
    means = np.mean([part.mean((0, 1, 2)) for part in parts], 0)
    variances = np.mean([part.var((0, 1, 2)) for part in parts], 0)
    np.testing.assert_allclose(stem.batch_norm.moving_mean, means, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(stem.batch_norm.moving_variance, variances, rtol=5e-3)


@pytest.mark.parametrize("recipe", ["int8", pytest.param("contrib", marks=pytest.mark.slow)])
def test_nothing_but_statistics_changes(recipe):
    def build(x):
        x = layers.Dropout(0.5)(layers.Conv2D(3, 3, name="conv")(x))
        x = layers.BatchNormalization(name="alone")(layers.Softmax()(x))
        return layers.BatchNormalization(trainable=False, name="fixed")(layers.Conv2D(3, 3)(x))

    qat = calibrated(functional((8, 8, 1), build=build), recipe)
    names = [weight.name for weight in qat.weights]
    before = qat.get_weights()
    keras_qat.reestimate_batch_norm(qat, X, steps=2, batch_size=8)
    changed = {
        name
        for name, one, other in zip(names, before, qat.get_weights(), strict=True)
        if np.any(one != other)
    }
    assert changed
    assert all("/moving_" in name and "fixed" not in name for name in changed), changed
    again = qat.get_weights()
    keras_qat.reestimate_batch_norm(qat, X, steps=2, batch_size=8)
    assert_all_equal(qat.get_weights(), again)
    if recipe == "int8":
        assert keras_qat.verify(qat, keras_qat.export_tflite(qat), X).identical == 1


def test_failure_leaves_the_model():
    qat = calibrated(scramble(residual_net()))
    before = qat.get_weights()
    x = X.copy()
    x[20] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        keras_qat.reestimate_batch_norm(qat, (x[i : i + 8] for i in (0, 8, 16)))
    assert_all_equal(qat.get_weights(), before)
    with pytest.raises(ValueError, match="have seen no data yet"):
        keras_qat.reestimate_batch_norm(keras_qat.quantize_model(tiny_net()), X)
