"""A BatchNormalization of vectors that is not folded: slim ran it through the fused operation."""

import numpy as np
import pytest

import keras_qat
from keras_qat.keras2.backend import keras
from tests.helpers import save_and_load


@pytest.mark.legacy
def test_vectors_keep_the_variance_of_the_population(tmp_path):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(4, name="fc"),  # With a bias: the original does not fold.
            keras.layers.BatchNormalization(momentum=0.9, name="bn"),
        ]
    )
    qat = keras_qat.quantize_model(model, "contrib")
    keras_qat.set_quantization(qat, False)
    x = np.random.default_rng(0).normal(size=(5, 6)).astype("float32")
    y = model.layers[0](x).numpy()
    output = qat(x, training=True)
    norm = qat.get_layer("quant_bn")
    np.testing.assert_allclose(norm.moving_mean, 0.1 * y.mean(0), rtol=1e-5)
    np.testing.assert_allclose(norm.moving_variance, 0.9 + 0.1 * y.var(0, ddof=1), rtol=1e-5)
    normalized = (y - y.mean(0)) / np.sqrt(y.var(0) + 1e-3)
    np.testing.assert_allclose(output, normalized, rtol=1e-3, atol=1e-4)
    loaded = save_and_load(qat, tmp_path / "qat.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), qat.predict(x, verbose=0))
