"""Parts of concatenated and stacked tensors."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.graph.read_model import read_model
from keras_qat.keras2.backend import keras
from keras_qat.lowering import lower
from keras_qat.ops.registry import op_of

layers = keras.layers
JOINS = {"concatenate", "stack"}


def slices(small, large):
    both = tf.concat([small, large], -1)
    return both[..., :4], both[:, None, :, -6:-3]


def one_index(small, large):
    both = layers.Concatenate()([small, large])
    return both[:, ::-1, 2], both[..., 5]


def splits(small, large):
    return tf.split(tf.concat([small, large], 2), [1, 3, 6], axis=-1)


def stacked(small, large):
    pairs = tf.stack([small, large[..., :4]], axis=2)
    return pairs[:, :, 0], pairs[:, 1:, 1, :3]


def unstacked(small, large):
    return tf.unstack(tf.stack([small, large[..., :4]], -1), axis=-1)


def nested(small, large):
    both = tf.concat([small, tf.concat([small, large], -1)], -1)
    return both[..., 1:3], both[..., 4:][..., 4:]


def reshaped(small, large):
    both = tf.reshape(tf.concat([small, large], -1), [tf.shape(small)[0], 1, 5, 10])
    return both[..., :4], tf.split(both, [4, 6], -1)[0], both[:, 0, 1:, 3:4]


def cropped(small, large):
    both = tf.concat([tf.concat([small, small], 1), large[..., :4]], 1)
    return tf.slice(both, [0, 0, 0], [-1, 5, 4]), layers.Cropping1D((6, 7))(both)


def several(small, large):
    """Boxes of a detector, of centres and sizes, beside scores."""
    both = tf.concat([small, large, small * 0.5, small[..., :1]], -1)
    return (*tf.split(both, [4, 6, 5], -1), both[:, 1:, -5:], both[..., -4:])


def whole_and_part(small, large):
    both = tf.concat([small, large], -1)
    return both[..., :4], both


OF_ONE = [slices, one_index, splits, stacked, unstacked, nested, reshaped, cropped]


def model_of(function):
    inputs = [keras.Input((5, 4)), keras.Input((5, 6))]
    small, large = (layers.Dense(x.shape[-1])(x) for x in inputs)
    return keras.Model(inputs, function(small, large * 1000.0))


def kinds_in(calls):
    return {op.name for op in map(op_of, calls) if op is not None}


def data(size=16):
    draw = np.random.default_rng(1)
    return [draw.normal(size=(size, 5, n)).astype("float32") for n in (4, 6)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "function", [slices, one_index, splits, stacked, unstacked, nested, several]
)
def test_small_numbers_keep_their_own_range(function):
    model, x = model_of(function), data()
    qat = keras_qat.quantize_model(model, target="ethos_u55")
    keras_qat.calibrate(qat, x)
    for y, float_y in zip(qat.predict(x, verbose=0), model.predict(x, verbose=0), strict=True):
        assert np.abs(y - float_y).max() < 0.03 * np.abs(float_y).max()
    contents = keras_qat.export_tflite(qat)
    assert keras_qat.verify(qat, contents, x).identical == 1


@pytest.mark.parametrize("function", OF_ONE)
def test_what_is_read_in_parts_alone_is_not_joined(function):
    graph = read_model(model_of(function))
    assert not JOINS & kinds_in(lower(graph).calls)


def across(small, large):
    both = tf.concat([small, large], -1)
    return both[..., 2:6]


def with_steps(small, large):
    return tf.concat([small, large], -1)[..., ::2]


def of_examples(small, large):
    return tf.concat([small, small], 0)[2:]


def one_of_a_stack(small, large):
    return tf.stack([small, large[..., :4]], 1)[:, :1]


@pytest.mark.parametrize(
    "function", [across, with_steps, of_examples, one_of_a_stack, whole_and_part]
)
def test_other_parts_are_of_the_joined_tensor(function):
    graph = read_model(model_of(function))
    assert JOINS & kinds_in(lower(graph).calls)


@pytest.mark.parametrize("begin", [[0, 1], [0, 0, 2]])
def test_strided_slices_of_all_examples(begin):
    inputs = keras.Input((5, 4))
    end = [tf.shape(inputs)[0], -1, 4][: len(begin)]
    model = keras.Model(inputs, tf.strided_slice(inputs, begin, end))
    x = data()[0]
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    np.testing.assert_allclose(qat(x), model(x), atol=0.05)
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), x).identical == 1
