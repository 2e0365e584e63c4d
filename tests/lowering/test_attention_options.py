"""Keras' attention layers with options of their constructors and calls."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from tests.comparison import assert_kept
from tests.helpers import images, rng, scramble

layers = keras.layers
STEPS = 5
MASK = rng(3).random((1, STEPS, STEPS)) < 0.6
MASK[..., 0] = True
DROP = {"dropout": 0.5}


def video(*sequences):
    """Returns tensors of frames, rows, columns and channels."""
    return [
        layers.Reshape((-1, 2, x.shape[2] // 2, 4))(layers.Dense(8)(x[..., None]))
        for x in sequences
    ]


FORMS = {
    "scale": lambda x, seen: layers.Attention(use_scale=True, **DROP)([x, x]),
    "concat": lambda x, seen: layers.Attention(score_mode="concat", **DROP)(
        [x, x], use_causal_mask=True
    ),
    "masks": lambda x, seen: layers.Attention(**DROP)(
        [x, x, layers.Dense(4)(x)], [seen, seen], return_attention_scores=True
    ),
    "additive": lambda x, seen: layers.AdditiveAttention(**DROP)([x, x], [None, seen]),
    "additive without": lambda x, seen: layers.AdditiveAttention(False, **DROP)([x, x]),
    "causal": lambda x, seen: layers.Attention(causal=True)([x, x]),
    "four axes": lambda x, seen: layers.Attention(**DROP)(
        [x[:, None] * np.ones((1, 2, 1, 1), np.float32)] * 2
    ),
    "constant": lambda x, seen: layers.MultiHeadAttention(2, 3, **DROP)(
        x, x, attention_mask=MASK, use_causal_mask=True
    ),
    "spatial": lambda x, seen: layers.MultiHeadAttention(2, 3, attention_axes=(2, 3), **DROP)(
        *video(x, x[..., :2])
    ),
    "some of several axes": lambda x, seen: layers.MultiHeadAttention(
        2, 3, attention_axes=(1, 3), output_shape=(3, 2), activity_regularizer="l2", **DROP
    )(*video(x, x[:, :3])),
    "constant of heads": lambda x, seen: layers.MultiHeadAttention(2, 3)(
        x, x, attention_mask=tf.stack([MASK, np.tri(STEPS, dtype=bool)[None]], 1)
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", FORMS)
def test_options_of_attention(form, tmp_path):
    keras.utils.set_random_seed(1)
    inputs = [keras.Input((STEPS, 4)), keras.Input((STEPS,), dtype="bool")]
    model = scramble(keras.Model(inputs, FORMS[form](*inputs)))
    seen = rng(2).random((32, STEPS)) < 0.6
    seen[:, 0] = True
    x = [images(32, (STEPS, 4)), seen]
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.set_quantization(qat, False)
    expected, in_training = model(x), qat(x, training=True)
    for ours, real in zip(*map(flat, (in_training, expected)), strict=True):
        drops = np.abs(ours - real).max() > 1e-3
        assert drops == (form not in ("causal", "constant of heads"))
    keras_qat.set_quantization(qat, True)
    keras_qat.calibrate(qat, x)
    for ours, real in zip(*map(flat, (qat(x), expected)), strict=True):
        assert np.abs(ours - real).mean() < 0.02 * np.abs(real).max()
    assert_kept(qat, x, tmp_path)


def flat(outputs):
    return outputs if isinstance(outputs, (list, tuple)) else [outputs]


def test_masks_of_several_examples_stay():
    x = keras.Input((STEPS, 4))
    y = layers.MultiHeadAttention(2, 3, name="mha")(x, x, attention_mask=np.tile(MASK, (2, 1, 1)))
    assert keras_qat.plan(keras.Model(x, y)).float_layers.keys() == {"mha"}
