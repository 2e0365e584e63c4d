"""Recurrent layers in float: the form that files take computes what Keras' own loop does."""

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.integer_graph.float_layers import rnn
from tests.helpers import assert_all_close, keras, rng

EXAMPLES, STEPS, UNITS = 3, 4, 2


def step(x, states):
    """An output that is no state, and two states."""
    hidden, count, *constants = states
    first, second = x
    hidden = tf.tanh(0.5 * hidden - first + second[..., 0])
    output = 2.0 * hidden + count + sum(constants)
    return output, [hidden, count + 1.0]


MASKS = {"none": None, "bool": tf.bool, "int8": tf.int8}


@pytest.mark.sample(12)
@pytest.mark.parametrize("steps", [1, STEPS])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"unroll": True},
        {"zero_output_for_mask": True},
        {"return_all_outputs": False},
        {"time_major": True, "unroll": True},
        {"time_major": True, "return_all_outputs": False},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_it_is_the_loop_of_keras(options, backwards, mask, steps):
    numbers = rng()
    x = np.float32(numbers.normal(size=(EXAMPLES, steps, UNITS)))
    of_two = np.float32(numbers.normal(size=(EXAMPLES, steps, UNITS, 3)))
    is_there = numbers.random((EXAMPLES, steps)) < 0.6
    inputs = x, of_two
    if options.get("time_major"):
        is_there, *inputs = (np.swapaxes(array, 0, 1) for array in (is_there, *inputs))
    given = {
        "inputs": tuple(map(tf.constant, inputs)),
        "initial_states": [tf.ones([EXAMPLES, UNITS]), tf.zeros([EXAMPLES, 1])],
        "constants": [tf.constant(0.3)],
        "go_backwards": backwards,
        **options,
    }
    if MASKS[mask]:
        given["mask"] = tf.cast(is_there, MASKS[mask])
    result, expected = (
        tf.nest.flatten(compute(step, **given)) for compute in (rnn, keras.backend.rnn)
    )
    assert_all_close(result, expected, rtol=1e-6)
