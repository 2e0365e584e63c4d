"""Products with constants of several matrices."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras

MATRICES = np.random.default_rng(0).normal(size=(40, 6, 5)).astype("float32")
FORMS = {
    "an equation": lambda x: tf.einsum("bni,nij->bnj", x, MATRICES),
    "an equation, constant first": lambda x: tf.einsum("nij,bni->bjn", tf.constant(MATRICES), x),
    "a product": lambda x: tf.matmul(x[:, :, None], MATRICES),
    "a product, constant first": lambda x: tf.matmul(MATRICES, b=x[..., None], transpose_a=True),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", FORMS)
def test_a_matrix_for_each_entry(name, tmp_path):
    inputs = keras.Input((40, 6))
    model = keras.Model(inputs, FORMS[name](inputs))
    x = np.random.default_rng(1).normal(size=(16, 40, 6)).astype("float32")
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    np.testing.assert_allclose(qat(x), model(x), atol=0.03 * np.abs(model(x)).max())
    contents = keras_qat.export_tflite(qat)
    assert keras_qat.verify(qat, contents, x).identical == 1
    qat.save(tmp_path / "qat.keras")
    assert keras_qat.export_tflite(keras.models.load_model(tmp_path / "qat.keras")) == contents
