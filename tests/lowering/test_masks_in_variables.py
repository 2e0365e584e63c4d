"""Masks in variables that do not train: they count as constants, as Swin's of its windows."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from tests.comparison import assert_kept
from tests.helpers import images

layers = keras.layers

SHAPE = (8, 4)

WITHIN = np.equal(*np.meshgrid(np.arange(8) // 4, np.arange(8) // 4))
"""What a step sees: those of its window."""

FORMS = {
    "sum": (np.where(WITHIN, 0.0, -100.0), lambda x, mask: x + tf.cast(mask, tf.float32)),
    "truth": (WITHIN, lambda x, mask: tf.where(mask, x, -1e9)),
    "product": (WITHIN.astype(np.float32), lambda x, mask: x * mask - 1e10 * (1.0 - mask)),
    "counts": (WITHIN.astype(np.int32), lambda x, mask: tf.where(mask == 0, -1e9, x)),
}
"""What a variable holds, and how it hides scores."""


@keras.utils.register_keras_serializable("tests")
class Attention(layers.Layer):
    """Attention to what a mask shows, which a variable holds."""

    def __init__(self, form, **kwargs):
        super().__init__(**kwargs)
        self.form, self.dense = form, layers.Dense(4)

    def build(self, input_shape):
        self.mask = tf.Variable(FORMS[self.form][0], trainable=False)

    def call(self, x):
        y = self.dense(x)
        return tf.nn.softmax(FORMS[self.form][1](y @ tf.transpose(y, [0, 2, 1]), self.mask)) @ y

    def get_config(self):
        return {**super().get_config(), "form": self.form}


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", FORMS)
def test_scores_keep_their_range(form, tmp_path):
    inputs, x = keras.Input(SHAPE), images(32, SHAPE)
    model = keras.Model(inputs, Attention(form)(inputs))
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    expected = model(x).numpy()
    assert np.mean((qat(x) - expected) ** 2) < np.var(expected) / 500
    assert_kept(qat, x, tmp_path)
    for strips in (qat, keras.models.load_model(tmp_path / "qat.keras")):
        np.testing.assert_array_equal(keras_qat.strip_quantization(strips)(x), expected)


def test_another_mask_is_not_taken_for_the_one_before(monkeypatch):
    """The copy of a float model makes its masks anew, with the user's own code."""
    inputs = keras.Input(SHAPE)
    qat = keras_qat.quantize_model(keras.Model(inputs, Attention("truth")(inputs)))
    monkeypatch.setitem(FORMS, "truth", (WITHIN[::-1], FORMS["truth"][1]))
    with pytest.raises(ValueError, match="Keras cannot copy the float model"):
        keras_qat.strip_quantization(qat)


class Windows(layers.Layer):
    """Scales windows, and holds their mask and an offset for another layer."""

    def build(self, input_shape):
        self.mask = tf.Variable(FORMS["sum"][0], trainable=False)
        self.offset, self.scale = tf.Variable(tf.zeros(4)), self.add_weight("scale", (4,))

    def call(self, x):
        return x * self.scale


class Within(layers.Layer):
    """Attention that sees what a mask shows."""

    def call(self, x, mask=None, offset=None):
        assert mask.get_shape() == (8, 8)
        scores = x @ tf.transpose(x, [0, 2, 1]) + tf.cast(mask, tf.float32)
        return tf.nn.softmax(scores) @ x + offset


def test_a_layer_is_given_weights_of_another(tmp_path):
    inputs, windows = keras.Input(SHAPE), Windows()
    x = layers.Dense(4)(windows(inputs))
    model = keras.Model(inputs, Within()(x, mask=windows.mask, offset=windows.offset))
    qat, data = keras_qat.quantize_model(model, strict=True), images(16, SHAPE)
    keras_qat.calibrate(qat, data)
    assert len(qat.trainable_weights) == len(model.trainable_weights)
    assert np.abs(qat(data) - model(data)).max() < 0.05
    assert_kept(qat, data, tmp_path)
