"""Tokens that come as real numbers, as `keras.Input((steps,))` without a type has them."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.tflite.interpreter import FileInterpreter
from tests.helpers import keras, layers

TOKENS = np.random.default_rng(0).integers(0, 9, (16, 5)).astype(np.float32)


def pooled(x):
    return layers.GlobalAveragePooling1D()(layers.Embedding(9, 4, mask_zero=True)(x))


def compared(x):
    kept = tf.cast(tf.not_equal(x, 0.0), tf.float32)[..., None]
    return layers.Dense(3)(layers.Embedding(9, 4)(x) * kept)


def sentence():
    x = keras.Input((5,))
    return keras.Model(x, layers.GlobalAveragePooling1D()(layers.Embedding(9, 4)(x)))


FORMS = {
    "a mask": pooled,
    "a comparison": compared,
    "a cast": lambda x: layers.Dense(3)(tf.one_hot(tf.cast(x, tf.int64), 9)),
    "a table and a cast": lambda x: (
        layers.Embedding(9, 4)(x)
        * tf.gather(tf.range(0.1, 1.0, 0.1), tf.cast(x, tf.int32))[..., None]
    ),
    "a part": lambda x: layers.Embedding(9, 4)(x[:, 1:3]),
    "parts of it": lambda x: layers.Embedding(9, 4)(
        layers.Concatenate()([x[:, :2], *tf.split(x[:, 2:4], 2, 1)])
    ),
    "turned": lambda x: layers.Embedding(9, 4)(tf.transpose(layers.Reshape((5, 1))(x), [0, 2, 1])),
    "shifted": lambda x: layers.Embedding(30, 4)(3.0 * x + 1),
    "each step": lambda x: layers.TimeDistributed(sentence())(layers.RepeatVector(3)(x)),
    "two tables": lambda x: layers.Embedding(9, 4)(x) + layers.Embedding(9, 4)(x),
}


def quantized(build, target, shape=(5,)):
    x = keras.Input(shape)
    model = keras.Model(x, build(x))
    qat = keras_qat.quantize_model(model, target=target)
    data = TOKENS.reshape(-1, *shape)
    keras_qat.calibrate(qat, data)
    np.testing.assert_allclose(qat(data), model(data), atol=0.03)
    contents = keras_qat.export_tflite(qat)
    assert keras_qat.verify(qat, contents, data).identical == 1
    return qat, FileInterpreter(contents)


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", FORMS)
def test_files_without_float_take_integers(form, tmp_path):
    qat, file = quantized(FORMS[form], "ethos_u55")
    (details,) = file.inputs.values()
    assert details["dtype"] == np.int32
    assert not any(
        dtype.kind == "f" for _, reads, writes in file.operations() for dtype in reads + writes
    )
    qat.save(tmp_path / "qat.keras")
    loaded = keras.models.load_model(tmp_path / "qat.keras")
    assert keras_qat.export_tflite(loaded) == keras_qat.export_tflite(qat)
    assert keras_qat.export_tflite(qat, input_dtype="float32") != keras_qat.export_tflite(qat)


def test_tables_at_each_step():
    characters = layers.TimeDistributed(layers.Embedding(9, 4))
    _, file = quantized(characters, "ethos_u55", (4, 5))
    assert [details["dtype"] for details in file.inputs.values()] == [np.int32]


def test_other_files_take_them_as_the_model_does():
    _, file = quantized(pooled, None)
    assert [details["dtype"] for details in file.inputs.values()] == [np.float32]


def test_what_computes_with_them_keeps_real_numbers():
    x = keras.Input((5,))
    model = keras.Model(x, layers.Embedding(9, 4)(x) * x[..., None])
    assert "Indices" not in str(keras_qat.plan(model))
