"""Models in mixed precision become quantization-aware ones that compute in float32."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from tests.helpers import rng

pytestmark = pytest.mark.legacy


@pytest.fixture(params=["mixed_float16", "mixed_bfloat16"])
def policy(request):
    before = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy(request.param)
    yield
    keras.mixed_precision.set_global_policy(before)


def images(count: int = 16) -> np.ndarray:
    return rng().uniform(-1, 1, (count, 8, 8, 3)).astype("float32")


def network():
    """Convolutions, operations, a nested model with a layer in a layer, and an LSTM."""
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(4, 3, padding="same", use_bias=False)(inputs)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    x = tf.nn.relu(keras.layers.Conv2D(4, 3, padding="same", activation="swish")(x) + x)
    inner = keras.Input((8, 32))
    step = keras.layers.TimeDistributed(keras.layers.Dense(5))(inner)
    step = keras.layers.Bidirectional(keras.layers.LSTM(3))(step)
    x = keras.Model(inner, step, name="inner")(keras.layers.Reshape((8, 32))(x))
    return keras.Model(inputs, keras.layers.Dense(3, dtype="float32")(x))


@pytest.mark.usefixtures("policy")
def test_mixed_precision_trains_in_float32_and_exports(tmp_path):
    model = network()
    with pytest.warns(UserWarning, match="computes in mixed precision"):
        qat = keras_qat.quantize_model(model)
    assert {layer.compute_dtype for layer in qat._flatten_layers()} == {"float32"}
    assert model.layers[1].compute_dtype != "float32", "the model itself is not changed"
    x = images()
    np.testing.assert_allclose(qat(x), model(x), atol=0.05)

    qat.compile("adam", "mse")
    qat.fit(x, np.ones((len(x), 3)), epochs=2, verbose=0)
    contents = keras_qat.export_tflite(qat)
    report = keras_qat.verify(qat, contents, x)
    assert report.max_difference <= 1
    qat.save(tmp_path / "qat.keras")
    reloaded = keras.models.load_model(tmp_path / "qat.keras")
    np.testing.assert_array_equal(reloaded.predict(x, verbose=0), qat.predict(x, verbose=0))
    plain = keras_qat.strip_quantization(qat)
    keras_qat.set_quantization(qat, False)
    np.testing.assert_allclose(plain(x), qat(x), atol=1e-5)


def test_float32_models_are_taken_as_they_are(recwarn):
    keras_qat.quantize_model(network())
    assert not [each for each in recwarn if "mixed precision" in str(each.message)]
