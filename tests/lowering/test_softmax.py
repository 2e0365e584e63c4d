"""A softmax that a model computes with several operations is one layer."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.graph.read_model import read_model
from keras_qat.graph.rebuild_model import rebuild_model
from keras_qat.keras2.backend import keras
from keras_qat.lowering import lower
from tests.comparison import assert_kept
from tests.helpers import images
from tests.networks.small import functional

pytestmark = pytest.mark.legacy
SHAPE = (4, 6)


def shifted(x, axis=-1):
    return tf.exp(x - tf.reduce_max(x, axis, keepdims=True))


def total(e, axis=-1):
    return tf.reduce_sum(e, axis, keepdims=True)


def shares(e, axis=-1):
    return e / total(e, axis)


def of_backend(x):
    """As keras-self-attention."""
    backend = keras.backend
    e = backend.exp(x - backend.max(x, axis=-1, keepdims=True))
    return e / (backend.sum(e, axis=-1, keepdims=True) + backend.epsilon())


ONE = {
    "the largest subtracted": lambda x: shares(shifted(x)),
    "nothing subtracted": lambda x: shares(tf.exp(x)),
    "computed twice": lambda x: tf.exp(x) / total(tf.exp(x)),
    "along another axis": lambda x: shares(shifted(x, 1), 1),
    "a number added": of_backend,
    "a number added to": lambda x: shifted(x) / (1e-9 + total(shifted(x))),
    "at least a number": lambda x: shifted(x) / tf.maximum(total(shifted(x)), 1e-9),
    "axes added": lambda x: shifted(x) / tf.expand_dims(tf.reduce_sum(shifted(x), 2), 2),
    "axes added by a slice": lambda x: shifted(x) / tf.reduce_sum(shifted(x), -1)[..., None],
    "no gradient": lambda x: shares(tf.exp(x - tf.stop_gradient(tf.reduce_max(x, 2, True)))),
}

SEVERAL = {
    "a number added, nothing subtracted": lambda x: tf.exp(x) / (total(tf.exp(x)) + 1e-7),
    "a large number added": lambda x: shifted(x) / (total(shifted(x)) + 1e-2),
    "of others": lambda x: tf.exp(x) / total(tf.exp(-x)),
    "of other parts": lambda x: tf.exp(x[:, :2]) / total(tf.exp(x[:, 2:])),
    "of several outputs": lambda x: (
        tf.exp(tf.split(x, 2, 1)[0]) / total(tf.exp(tf.split(x, 2, 1)[1]))
    ),
    "one less": lambda x: tf.exp(x - 1.0) / total(tf.exp(1.0 - x)),
    "along other axes": lambda x: tf.exp(x[:, :, :4]) / total(tf.exp(x[:, :, :4]), 1),
    "of a part of it": lambda x: tf.exp(x[:, :1]) / tf.reduce_sum(tf.exp(x), 1, keepdims=True),
}


@pytest.mark.parametrize("name", [*ONE, *SEVERAL])
def test_one_layer_computes_the_same(name):
    model = functional(SHAPE, build={**ONE, **SEVERAL}[name])
    lowered = lower(read_model(model))
    kinds = [type(call.layer).__name__ for call in lowered.calls]
    assert (kinds == ["Softmax"]) is (name in ONE)
    x = 2 * images(4, SHAPE)
    np.testing.assert_allclose(rebuild_model(lowered)(x), model(x), rtol=1e-5, atol=1e-6)


def test_wide_scores_keep_their_shares(tmp_path):
    model, x = functional(SHAPE, build=ONE["nothing subtracted"]), 6 * images(16, SHAPE)
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.calibrate(qat, x)
    expected = np.asarray(model(x))
    assert np.std(qat(x) - expected) < 0.03 * np.std(expected)
    assert_kept(qat, x, tmp_path)
