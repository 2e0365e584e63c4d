"""Which inputs may hold NaN: those in which the model replaces it before anything else reads it."""

import pytest
import tensorflow as tf

from keras_qat.graph.missing_values import find_nan_handling
from keras_qat.graph.read_model import read_model
from tests.helpers import build_model, layers


def replaced(x):
    return tf.where(tf.not_equal(x, x), 0.0, x)


def moved(x):
    return replaced(layers.Reshape((2, 3))(tf.concat([x, 2.0 * x - 1.0], -1)[:, :6]))


def only_asked(x):
    return tf.cast(tf.not_equal(x, x), tf.float32)


def returned_too(x):
    return [x, replaced(x)]


def summed_too(x):
    return replaced(x) + tf.reduce_sum(x, -1, keepdims=True)


def compared_with_another(x):
    return tf.where(tf.not_equal(x, 2.0 * x), 0.0, x)


@pytest.mark.parametrize("function", [replaced, moved, only_asked])
def test_inputs_in_which_nan_is_replaced(function):
    graph = read_model(build_model((6,), function))
    ((value, calls),) = find_nan_handling(graph).items()
    assert value is graph.inputs
    assert {call.output.dtype for call in calls} >= {"bool"}


@pytest.mark.parametrize(
    "function", [returned_too, summed_too, compared_with_another, layers.ReLU()]
)
def test_inputs_whose_nan_reaches_other_calls(function):
    assert not find_nan_handling(read_model(build_model((6,), function)))
