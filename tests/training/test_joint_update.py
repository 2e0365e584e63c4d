"""Vectors that an optimizer updates side by side, against each by itself."""

import pytest
import tensorflow as tf

from keras_qat.keras2.backend import keras
from keras_qat.training.steps import optimizers as updates
from tests.helpers import assert_all_equal, rng

optimizers = keras.optimizers
KNOWN = {
    "SGD": lambda: optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: optimizers.Adam(0.1, weight_decay=0.01, clipnorm=1.0),
    "Adam, amsgrad": lambda: optimizers.Adam(0.1, amsgrad=True),
    "AdamW": lambda: optimizers.AdamW(optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "Lion": lambda: optimizers.Lion(0.1),
}
OTHERS = {
    "averages of weights": lambda: optimizers.SGD(0.1, use_ema=True),
    "Nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda: optimizers.RMSprop(0.1),
}
SHAPES = [(), (3,), (3, 3, 4, 1), (5,), (2, 7), (1,), (3, 3, 4, 1)]


def updated(optimizer, is_joint):
    """What three updates make of all variables, with gradients that differ in magnitude."""
    random = rng(7)
    shapes = [*SHAPES, (10, 2)]
    variables = [tf.Variable(random.normal(size=shape), dtype=tf.float32) for shape in shapes]
    optimizer.build(variables)

    @tf.function
    def step(gradients):
        *pairs, (rows, table) = zip(gradients, variables, strict=True)
        slices = tf.IndexedSlices(rows[:2], tf.constant([1, 4]), tf.constant([10, 2]))
        pairs.append((slices, table))
        left = updates.update_together(optimizer, pairs) if is_joint else pairs
        counts.append(len(left))
        for gradient, variable in left:
            optimizer.update_step(gradient, variable)
        optimizer.iterations.assign_add(1)

    counts: list[int] = []
    for magnitude in (1.0, 1e-3, 1e3):
        gradients = [magnitude * random.normal(size=shape) for shape in shapes]
        step([tf.constant(gradient, tf.float32) for gradient in gradients])
    return counts[0], [variable.numpy() for variable in [*variables, *optimizer.variables]]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", KNOWN)
def test_variables_side_by_side_become_what_they_become_alone(name):
    left, together = updated(KNOWN[name](), is_joint=True)
    _, alone = updated(KNOWN[name](), is_joint=False)
    assert left == len(SHAPES) - 3 + 1  # All but the vectors, and a table with a sparse gradient.
    assert_all_equal(together, alone)


@pytest.mark.parametrize("name", OTHERS)
def test_each_is_updated_alone_where_the_result_would_be_another(name):
    variables = [tf.Variable([1.0]), tf.Variable([2.0])]
    optimizer = OTHERS[name]()
    pairs = [(tf.constant([0.5]), variable) for variable in variables]
    with tf.Graph().as_default():
        assert updates.update_together(optimizer, pairs) == pairs
