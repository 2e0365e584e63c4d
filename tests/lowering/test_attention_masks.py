"""Attention with masks: integers, exact, and close to float."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from tests.comparison import export
from tests.helpers import rng, scramble

layers = keras.layers

STEPS = 5
DISTANCES = np.arange(STEPS)[:, np.newaxis] - np.arange(STEPS)
SHAPES = {"padding": (STEPS,), "pairs": (STEPS, STEPS)}


def model_of(mask, causal, dtype):
    keras.utils.set_random_seed(1)
    inputs = [keras.Input((STEPS, 8))]
    given = None
    if mask is not None:
        inputs.append(keras.Input(SHAPES[mask], dtype=dtype))
        given = inputs[1] if mask == "pairs" else inputs[1][:, tf.newaxis, :]
    attention = layers.MultiHeadAttention(2, 4)
    x = attention(inputs[0], inputs[0], attention_mask=given, use_causal_mask=causal)
    return scramble(keras.Model(inputs, layers.Dense(3)(x)))


def data_of(model, count=16):
    numbers = rng(0)
    result = [numbers.normal(size=(count, STEPS, 8)).astype(np.float32)]
    for tensor in model.inputs[1:]:
        mask = numbers.random((count, *tensor.shape[1:])) < 0.6
        mask[..., 0] = True  # Each step sees something.
        result.append(mask.astype(tensor.dtype.name))
    return result


CASES = [
    ("pairs", True, "bool"),
    pytest.param("padding", False, "int32", marks=pytest.mark.slow),
    pytest.param("pairs", False, "int64", marks=pytest.mark.slow),
    pytest.param("padding", True, "float32", marks=pytest.mark.slow),
    pytest.param(None, True, "", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("recipe", ["int8", pytest.param("int16x8", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("mask", "causal", "dtype"), CASES)
def test_masked_attention_is_integers(mask, causal, dtype, recipe):
    model = model_of(mask, causal, dtype)
    x = data_of(model)
    qat = keras_qat.quantize_model(model, recipe)
    keras_qat.set_quantization(qat, False)
    in_float = model(x)
    np.testing.assert_allclose(qat(x, training=True), in_float, rtol=1e-3, atol=1e-4)
    exported = export(model, *x, recipe=recipe, strict=True)
    assert exported.report.outputs[0].identical == 1.0
    noise = in_float - exported.model(exported.x)
    # With -1e9 in the range of the scores all attention would be uniform.
    assert 10 * np.log10(np.sum(in_float**2) / np.sum(noise**2)) > 20
    fixed = keras_qat.export_tflite(exported.model, batch_size=1)
    assert keras_qat.verify(exported.model, fixed, exported.x).outputs[0].identical == 1.0


def by_hand(mask):
    """Attention as tutorials write it, with a mask that is 1 where there is nothing to see."""
    keras.utils.set_random_seed(1)
    x, inputs = keras.Input((STEPS, 8)), []
    queries, keys, values = (layers.Dense(6)(x) for _ in range(3))
    scores = tf.matmul(queries, keys, transpose_b=True) * 6**-0.5
    if mask == "causal":
        scores += (1.0 - np.tri(STEPS, dtype=np.float32)) * -1e9
    else:
        inputs = [keras.Input((1, STEPS))]
        scores += inputs[0] * -1e9 if mask == "padding" else (1.0 - inputs[0]) * -10000.0
    weights = tf.nn.softmax(scores, axis=-1)
    return scramble(keras.Model([x, *inputs], layers.Dense(3)(tf.matmul(weights, values))))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask", ["causal", "padding", pytest.param("visible", marks=pytest.mark.slow)]
)
def test_large_negative_numbers_survive_8_bits(mask):
    model = by_hand(mask)
    x = data_of(model)
    if mask == "padding":
        x[1] = 1.0 - x[1]
    exported = export(model, *x, strict=True)
    assert exported.report.outputs[0].identical == 1.0
    in_float = model(x)
    noise = in_float - exported.model(exported.x)
    assert 10 * np.log10(np.sum(in_float**2) / np.sum(noise**2)) > 20


BIAS = np.sin(np.arange(STEPS**2, dtype=np.float32)).reshape(1, STEPS, STEPS)
CHOICES = {
    "number": lambda mask, scores: tf.where(mask > 0.5, scores, -1e9),
    "exchanged": lambda mask, scores: tf.where(mask < 0.5, -1e4, scores),
    "ones_like": lambda mask, scores: tf.where(mask > 0.5, scores, -1e9 * tf.ones_like(scores)),
    "fill": lambda mask, scores: tf.where(
        tf.cast(mask, tf.bool), scores, tf.fill(tf.shape(scores), -1e4)
    ),
    "causal": lambda mask, scores: tf.where(np.tri(STEPS) > 0, scores, -np.inf),
    "window": lambda mask, scores: scores + np.where(abs(DISTANCES) < 2, 0.0, -100.0)[None],
    "with distances": lambda mask, scores: scores - np.where(DISTANCES < 0, 1e9, 0.5 * DISTANCES),
    "padding and later steps": lambda mask, scores: of_two(mask, scores),
    "padding beside copies": lambda mask, scores: of_copies(mask, scores),
    "beside a bias": lambda mask, scores: scores + (BIAS + (1.0 - mask) * -1e9),
    "beside zeros": lambda mask, scores: scores - (tf.zeros((1, 1, STEPS)) + (1.0 - mask) * 1e9),
    "beside a tensor": lambda mask, scores: (1.0 - mask) * -1e9 + tf.sin(scores) + scores,
    "cast": lambda mask, scores: scores + tf.cast(tf.where(mask > 0, 0.0, -1e9), scores.dtype),
    "moved": lambda mask, scores: scores + ((1.0 - mask[:, 0]) * -1e9)[:, tf.newaxis],
    "added": lambda mask, scores: (
        scores - tf.where(mask[:, 0] > 0.5, tf.zeros_like(mask[:, 0]), 1e9)[:, tf.newaxis]
    ),
}
"""How a mask, 1 where there is something to attend to, chooses scores; or a constant one."""


def of_two(mask, scores):
    """As recommenders write it: the second mask has the size of what the first one gives."""
    chosen = tf.where(mask > 0, scores, tf.ones_like(scores) * -1e9)
    seen = tf.linalg.band_part(tf.ones_like(chosen[0]), -1, 0)
    seen = tf.tile(seen[None], [tf.shape(chosen)[0], 1, 1])
    return tf.where(tf.equal(seen, 0.0), -1e9, chosen)


def of_copies(mask, scores):
    """As BART writes it: later steps in copies for each example, and sizes that are read."""
    later = (1.0 - np.tri(STEPS, dtype=np.float32))[np.newaxis] * -1e8
    later = tf.tile(later, [tf.shape(scores)[0], 1, 1])
    scores += tf.cast(later + (1.0 - mask) * -1e8, scores.dtype)
    return tf.reshape(scores, [tf.shape(scores)[0], STEPS, -1]) + 1e-9


def choosing(choice):
    keras.utils.set_random_seed(1)
    x, mask = keras.Input((STEPS, 8)), keras.Input((1, STEPS))
    queries, keys, values = (layers.Dense(6)(x) for _ in range(3))
    scores = tf.matmul(queries, keys, transpose_b=True) * 6**-0.5
    weights = tf.nn.softmax(CHOICES[choice](mask, scores), axis=-1)
    inputs = [x] if choice in ("causal", "window", "with distances") else [x, mask]
    return scramble(keras.Model(inputs, layers.Dense(3)(tf.matmul(weights, values))))


COPIED = {
    "broadcast_to": lambda scores: tf.broadcast_to(-np.inf, tf.shape(scores)),
    "tile": lambda scores: tf.tile(tf.constant([[[-np.inf]]]), [tf.shape(scores)[0], STEPS, STEPS]),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("copied", COPIED)
def test_numbers_that_are_copied_hide_scores(copied):
    x, mask = keras.Input((STEPS, 8)), keras.Input((1, STEPS))
    scores = tf.matmul(x, x, transpose_b=True)
    shares = tf.nn.softmax(tf.where(mask > 0.5, scores, tf.cast(COPIED[copied](scores), "float32")))
    model = keras.Model([x, mask], tf.matmul(shares, x))
    exported = export(model, *data_of(model), strict=True)
    assert exported.report.outputs[0].identical == 1.0
    assert not {"BROADCAST_TO", "TILE"}.intersection(exported.operations)


REPEATED = ("exchanged", "ones_like")
"""Which the others cover but for one condition."""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "choice",
    [pytest.param(c, marks=pytest.mark.slow if c in REPEATED else ()) for c in CHOICES],
)
def test_masks_that_choose_scores(choice):
    model = choosing(choice)
    exported = export(model, *data_of(model))
    assert exported.report.outputs[0].identical == 1.0
    in_float = model(exported.x)
    noise = in_float - exported.model(exported.x)
    assert 10 * np.log10(np.sum(in_float**2) / np.sum(noise**2)) > 20
    filled = [c for c in symbols(exported.model) if "fill" in c or "ones_like" in c]
    assert not filled or choice == "padding and later steps"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "added",
    [
        lambda mask, scores: tf.where(mask > 0.5, 3.0 * mask + scores, -1e9),
        lambda mask, scores: tf.where(mask > 0.5, tf.zeros_like(scores), -1e9)[:, 1:2],
    ],
)
def test_what_is_added_beside_a_mask_is_not_lost(added, monkeypatch):
    monkeypatch.setitem(CHOICES, "others", lambda mask, scores: scores + added(mask, scores))
    model = choosing("others")
    x = data_of(model)
    qat = keras_qat.quantize_model(model)
    keras_qat.set_quantization(qat, False)
    np.testing.assert_allclose(qat(x, training=True), model(x), rtol=1e-3, atol=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["sum", "where"])
def test_maxima_of_what_a_mask_leaves(kind):
    keras.utils.set_random_seed(1)
    x, mask = keras.Input((STEPS, 8)), keras.Input((1, STEPS))
    values, column = layers.Dense(6)(x), tf.transpose(mask, (0, 2, 1))
    hidden = tf.where(column > 0.5, values, -1e9)
    hidden = values + (1.0 - column) * -1e9 if kind == "sum" else hidden
    pooled = tf.reduce_max(hidden, 1) if kind == "sum" else layers.GlobalMaxPooling1D()(hidden)
    model = scramble(keras.Model([x, mask], layers.Dense(3)(pooled)))
    qat, data = keras_qat.quantize_model(model, strict=True), data_of(model)
    keras_qat.calibrate(qat, data)
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), data)
    assert report.identical == 1.0
    assert report.outputs[0].float_sqnr > 30


IGNORES = {
    "scaled": lambda scores: tf.nn.softmax(scores / 2.0),
    "scaled twice": lambda scores: tf.nn.softmax(0.5 * (scores * 3.0)),
    "sigmoid": tf.sigmoid,
    "exponential": tf.exp,
    "largest": lambda scores: tf.math.top_k(scores, 2)[0],
    "which": lambda scores: tf.one_hot(tf.argmax(scores, -1), STEPS),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("reader", IGNORES)
def test_what_else_ignores_hidden_numbers(reader):
    x, mask = keras.Input((STEPS,)), keras.Input((STEPS,))
    scores = layers.Dense(STEPS)(x) + (1.0 - mask) * -1e9
    model = scramble(keras.Model([x, mask], IGNORES[reader](scores)))
    seen = rng(2).random((64, STEPS)) < 0.7
    seen[:, :2] = True
    data = [rng(1).normal(size=(64, STEPS)).astype(np.float32), seen.astype(np.float32)]
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, data)
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), data)
    assert report.identical == 1.0
    assert report.outputs[0].float_sqnr > 20


class Biased(layers.Layer):
    """As T5's decoder: weights for each distance, and later steps hidden in the same tensor."""

    def build(self, shape):
        self.bias = self.add_weight("bias", (1, STEPS, STEPS), initializer="random_normal")

    def call(self, scores):
        return tf.nn.softmax(scores + (self.bias + np.where(DISTANCES < 0, -1e9, 0.0)))


def test_masks_are_no_part_of_weights():
    x = keras.Input((STEPS, STEPS))
    model = scramble(keras.Model(x, Biased()(x)))
    data = rng(1).normal(size=(32, STEPS, STEPS)).astype(np.float32)
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, data)
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), data)
    assert report.identical == 1.0
    assert report.outputs[0].float_sqnr > 20


def symbols(model):
    return [str(getattr(layer, "symbol", "")) for layer in model.layers]
