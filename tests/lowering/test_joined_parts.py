"""Parts of concatenated and stacked tensors: which of them are read without a join."""

import pytest
import tensorflow as tf

import keras_qat
from keras_qat.graph.read_model import read_model
from keras_qat.lowering import lower
from keras_qat.ops.registry import find_op
from tests.helpers import keras, layers
from tests.networks.forms.tensors import (
    cropped,
    nested,
    one_index,
    reshaped,
    slices,
    splits,
    stacked,
    unstacked,
)

JOINS = {"concatenate", "stack"}


def whole_and_part(small, large):
    both = tf.concat([small, large], -1)
    return both[..., :4], both


OF_ONE = [slices, one_index, splits, stacked, unstacked, nested, reshaped, cropped]


def model_of(function):
    inputs = [keras.Input((5, 4)), keras.Input((5, 6))]
    small, large = (layers.Dense(x.shape[-1])(x) for x in inputs)
    return keras.Model(inputs, function(small, large * 1000.0))


def kinds_in(calls):
    return {op.name for op in map(find_op, calls) if op is not None}


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


def test_each_tensor_that_is_unstacked_has_a_layer_of_its_own():
    x = keras.Input((4,))
    stacked = tf.stack([layers.Dense(3)(x), layers.Dense(3)(x)], axis=1)
    plan = keras_qat.plan(keras.Model(x, tf.unstack(stacked, axis=1)))
    identities = [call for call in plan.graph.calls if type(call.layer) is layers.Activation]
    assert len({call.layer for call in identities}) == len(identities) == 2
    assert len({call.name for call in identities}) == 2
