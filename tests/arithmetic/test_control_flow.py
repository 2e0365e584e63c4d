"""Branches: which of them are traced."""

import pytest
import tensorflow as tf

from keras_qat.arithmetic.control_flow import cond

pytestmark = pytest.mark.legacy


@pytest.mark.parametrize("taken", [True, False])
def test_a_graph_has_one_branch_if_a_tensor_outside_of_it_decides(taken):
    def other():
        raise AssertionError("is not traced")

    def add_one(x):
        branches = [lambda: x + 1.0, other] if taken else [other, lambda: x + 1.0]
        return cond(outside, *branches)

    outside = tf.constant(taken)
    assert tf.function(add_one)(tf.constant(1.0)) == 2.0
