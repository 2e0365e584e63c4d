"""Positions that are computed from real numbers: in integers for targets without float."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.tflite.interpreter import FileInterpreter
from tests.helpers import keras, layers, quantize_on

INTEGER = tf.int32

TABLE = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
X = np.random.default_rng(1).uniform(0, 1, (64, 4)).astype(np.float32)


def rows(positions):
    """Entries of a table of 12."""
    return layers.Dense(2)(tf.gather(tf.constant(TABLE), positions))


FORMS = {
    "floor": lambda x: tf.cast(tf.floor(x), INTEGER),
    "ceil": lambda x: tf.cast(tf.math.ceil(x), INTEGER),
    "rounded": lambda x: tf.cast(tf.round(x), INTEGER),
    "cut off": lambda x: tf.cast(x, INTEGER),
    "the next one": lambda x: tf.cast(tf.minimum(tf.floor(x) + 1.0, 11.0), INTEGER),
    "clipped": lambda x: tf.cast(tf.clip_by_value(tf.floor(x * 3) - 9, 0, 11), INTEGER),
    "of 64 bits": lambda x: tf.cast(tf.floor(x), tf.int64),
    "moved": lambda x: tf.cast(tf.reshape(tf.stack([tf.floor(x)] * 2, 1), (-1, 8)), INTEGER),
    "a slice": lambda x: tf.cast(tf.slice(tf.floor(x) + 1.0, [0, 0], [-1, 2]), INTEGER) - 1,
    "parts": lambda x: tf.cast(tf.split(tf.floor(x) + 1.0, 2, -1)[1], INTEGER) - 1,
    "each": lambda x: (
        tf.stack([tf.cast(part, INTEGER) for part in tf.unstack(tf.floor(x) + 1.0, axis=-1)], 1) - 1
    ),
    "differences": lambda x: tf.cast(tf.abs(x - tf.floor(x)) * 11.99, INTEGER),
    "and a sum of both": lambda x: tf.cast(tf.floor(x / 2) + tf.math.ceil(x / 2), INTEGER),
    "of truth values": lambda x: tf.cast(tf.floor(x / 2) + tf.cast(x > 4.0, "float32"), INTEGER),
}


def model_of(form):
    x = keras.Input((4,))
    scaled = layers.Dense(4, use_bias=False, kernel_initializer="identity")(x) * 11.0
    return keras.Model(x, rows(FORMS[form](scaled)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", FORMS)
def test_files_without_float_look_up_the_same_rows(form, tmp_path):
    model = model_of(form)
    qat = quantize_on(model, X, target="ethos_u55")
    contents = keras_qat.export_tflite(qat)
    file = FileInterpreter(contents)
    kinds = {dtype.kind for _, reads, writes in file.operations() for dtype in reads + writes}
    assert "f" not in kinds
    assert keras_qat.verify(qat, contents, X).identical == 1
    # A number within a step of a border may be on its other side.
    differs = np.abs(qat.predict(X, verbose=0) - model.predict(X, verbose=0)).max(-1) > 0.1
    assert differs.mean() < (0.4 if form == "differences" else 0.1)
    qat.save(tmp_path / "qat.keras")
    loaded = keras.models.load_model(tmp_path / "qat.keras")
    assert keras_qat.export_tflite(loaded) == contents


def test_whole_numbers_that_are_added_are_no_quantized_values():
    """A sum of 8 bits holds 2.98 for 3, of which a cast made 2."""
    x, steps = keras.Input((4,)), np.arange(256.0, dtype=np.float32).reshape(64, 4) / 4
    numbers = tf.cast(tf.floor(layers.ReLU()(x)) + 7.0, INTEGER)
    model = keras.Model(x, tf.one_hot(numbers, 72))
    qat = quantize_on(model, steps, target="ethos_u55")
    np.testing.assert_array_equal(np.argmax(qat(steps), -1), np.argmax(model(steps), -1))
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), steps).identical == 1


def test_runtimes_with_float_compute_them_in_float():
    model = model_of("the next one")
    plan = keras_qat.plan(model)
    assert any("Positions" in reason for reason in plan.float_layers.values())
    qat = quantize_on(model, X)
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), X).identical == 1


def test_tokens_among_real_numbers_keep_their_values():
    """A range of 8 bits would move them: they stay in float."""
    x = keras.Input((4,))
    tokens = tf.cast(x[:, 0], INTEGER)
    model = keras.Model(x, layers.Embedding(12, 3)(tokens) * layers.Dense(3)(x[:, 1:]))
    assert "Positions" not in str(keras_qat.plan(model, target="ethos_u55"))
