"""A softmax that a model computes with several operations is one layer."""

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.graph.read_model import read_model
from keras_qat.graph.rebuild_model import rebuild_model
from keras_qat.lowering import lower
from tests.helpers import images
from tests.networks.forms.patterns import ONE, SHAPE, shifted, total
from tests.networks.small import functional

pytestmark = pytest.mark.legacy


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
