"""Recurrent layers behind an Embedding whose padding is masked."""

from __future__ import annotations

import numpy as np
import pytest

import keras_qat
from keras_qat.keras2.backend import keras

layers = keras.layers

pytestmark = pytest.mark.legacy

KINDS = (
    layers.GRU,
    pytest.param(layers.LSTM, marks=pytest.mark.slow),
    pytest.param(layers.SimpleRNN, marks=pytest.mark.slow),
)
STEPS = 4


def words():
    """Sentences with padding behind, before and between words, and nothing else in one."""
    x = np.random.default_rng(0).integers(1, 9, (12, STEPS))
    x[1, 2:], x[2, :2], x[3, 2], x[4] = 0, 0, 0, 0
    return x


def model_of(kind, both_ways, sequences, depth=1):
    ids = keras.Input((STEPS,), dtype="int32")
    start = keras.initializers.RandomNormal(stddev=1.0, seed=1)
    x = layers.Embedding(9, 4, mask_zero=True, embeddings_initializer=start)(ids)
    x = layers.Dropout(0.1)(x)
    for index in range(depth):
        layer = kind(3, return_sequences=sequences or index < depth - 1)
        x = (layers.Bidirectional(layer) if both_ways else layer)(x)
    return keras.Model(ids, layers.Dense(2)(x))


@pytest.mark.parametrize("sequences", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("both_ways", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_masked_steps_keep_the_state(kind, both_ways, sequences, tmp_path):
    """As in Keras, in integers, and in the file."""
    model, x = model_of(kind, both_ways, sequences), words()
    qat = keras_qat.quantize_model(model, strict=True)
    assert len(qat.layers) <= 10  # All steps are one layer.
    expected = model.predict(x, verbose=0)
    keras_qat.set_quantization(qat, enabled=False)
    np.testing.assert_allclose(qat.predict(x, verbose=0), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(keras_qat.strip_quantization(qat).predict(x, verbose=0), expected)
    keras_qat.set_quantization(qat, enabled=True)
    keras_qat.calibrate(qat, x)
    noise = np.mean(np.square(qat.predict(x, verbose=0) - expected))
    assert noise < 0.01 * np.mean(np.square(expected))
    contents = keras_qat.export_tflite(qat)
    report = keras_qat.verify(qat, contents, x)
    assert report.identical == 1
    assert not report.float_operations
    qat.save(tmp_path / "qat.keras")
    loaded = keras.models.load_model(tmp_path / "qat.keras")
    assert keras_qat.export_tflite(loaded) == contents


@pytest.mark.slow
def test_masks_go_from_layer_to_layer():
    """Through Dropout and both directions; each layer of the stack reads one mask."""
    model, x = model_of(layers.GRU, both_ways=True, sequences=False, depth=2), words()
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.set_quantization(qat, enabled=False)
    expected = model.predict(x, verbose=0)
    np.testing.assert_allclose(qat.predict(x, verbose=0), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_masks_that_are_given():
    x, mask = keras.Input((STEPS, 4)), keras.Input((STEPS,), dtype="bool")
    model = keras.Model([x, mask], layers.Dense(2)(layers.GRU(3)(x, mask=mask)))
    qat = keras_qat.quantize_model(model, strict=True)
    data = [np.random.default_rng(0).normal(size=(8, STEPS, 4)).astype(np.float32), words()[:8] > 2]
    keras_qat.calibrate(qat, data)
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), data).identical == 1
