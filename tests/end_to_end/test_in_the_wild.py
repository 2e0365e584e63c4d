"""What models in the wild have: forms that failed once, from reading to the file."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from tests.helpers import images

layers = keras.layers


class Prior(keras.initializers.Initializer):
    """Not registered with Keras."""

    def __call__(self, shape, dtype=None, **kwargs):
        return tf.fill(shape, tf.constant(-0.1, dtype))


def conv(x, filters=4):
    return layers.Conv2D(filters, 3, padding="same")(x)


def center_points(x):
    scores = layers.Conv2D(4, 1, activation="sigmoid")(x)
    return [scores, tf.cast(scores > 0.5, tf.float32) * scores]


def preprocessed(mode):
    def build(x):
        return conv(keras.applications.imagenet_utils.preprocess_input(x, mode=mode))

    return build


SHAPE = (8, 8, 4)
FORMS = {
    "a sum of stacked tensors": (lambda x: tf.reduce_sum([x, x * 2.0], axis=0), SHAPE),
    "a mean of stacked tensors": (lambda x: tf.reduce_mean([x, x * 3.0], axis=0), SHAPE),
    "a mean of all of them": (lambda x: tf.reduce_mean([x, x * 3.0], axis=[0, 2]), SHAPE),
    "an initializer of one's own": (
        lambda x: layers.Conv2D(4, 1, bias_initializer=Prior())(x),
        SHAPE,
    ),
    "open sizes": (lambda x: layers.Conv2D(4, 3)(layers.Conv2D(4, 3)(x)), (None, None, 4)),
    "caffe": (preprocessed("caffe"), (8, 8, 3)),
    "torch": (preprocessed("torch"), (8, 8, 3)),
    "divided by an array": (lambda x: x / np.array([1.0, 2.0, 4.0, 5.0]), SHAPE),
    "divided by a list": (lambda x: x / [1.0, 2.0, 4.0, 5.0], SHAPE),
    "a bias": (lambda x: tf.nn.bias_add(conv(x), tf.constant([0.5, -0.5, 1.0, 0.0])), SHAPE),
    "outputs that others read": (center_points, SHAPE),
}
IN_FLOAT = {"a sum of stacked tensors", "a mean of stacked tensors", "a mean of all of them"}
IN_FLOAT |= {"outputs that others read"}


@pytest.mark.parametrize("name", FORMS)
def test_from_reading_to_the_file(name):
    build, shape = FORMS[name]
    x = keras.Input(shape)
    model = keras.Model(x, build(x))
    assert bool(keras_qat.plan(model).float_layers) == (name in IN_FLOAT)
    data = 100 * np.abs(images(24, [size or 12 for size in shape]))
    qat = keras_qat.quantize_model(model)
    keras_qat.calibrate(qat, data)
    for ours, real in zip(*map(tf.nest.flatten, (qat(data), model(data))), strict=True):
        assert np.abs(ours - real).mean() < 0.02 * np.abs(real).max()
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), data, per_layer=True)
    assert report.identical == 1
    assert not report.differing
