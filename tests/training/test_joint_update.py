"""Small variables that an optimizer updates side by side, against each by itself."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from keras_qat.training.steps import optimizers as updates
from tests.helpers import rng

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
SHAPES = [(), (3,), (3, 3, 4, 1), (5,), (), (3, 3, 6, 1), (2, 7), (1,), (7, 2), (3, 3, 4, 1)]


def updated(optimizer, is_joint):
    """What three updates make of all variables, with gradients that differ in magnitude."""
    random = rng(7)
    shapes = [*SHAPES, (updates.SMALL + 1,), (10, 2)]
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
    assert left == 4  # Two of own shapes, what is large, a table with gradients of some rows.
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", OTHERS)
def test_each_is_updated_alone_where_the_result_would_be_another(name):
    variables = [tf.Variable([1.0]), tf.Variable([2.0])]
    optimizer = OTHERS[name]()
    pairs = [(tf.constant([0.5]), variable) for variable in variables]
    with tf.Graph().as_default():
        assert updates.update_together(optimizer, pairs) == pairs


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_training_is_that_of_an_optimizer_that_is_not_known(policy, request, monkeypatch):
    """Through `fit`, with phases that share the update, and a constraint and decay beside it."""
    request.addfinalizer(lambda: keras.mixed_precision.set_global_policy("float32"))
    saved = {}

    def recorded(optimizer, pairs):
        left = updates.update_together(optimizer, pairs)
        saved[type(optimizer)] = len(pairs) - len(left)
        return left

    monkeypatch.setattr(updates, "update_together", recorded)

    class Own(optimizers.Adam):
        """As Keras' own, but of a class that could compute anything."""

    def trained(kind):
        keras.utils.set_random_seed(0)
        keras.mixed_precision.set_global_policy(policy)
        layers = keras.layers
        image = keras.Input((6, 6, 2))
        x = layers.Conv2D(3, 3, use_bias=False)(image)
        x = layers.ReLU()(layers.BatchNormalization(gamma_constraint="non_neg")(x))
        x = layers.BatchNormalization()(layers.DepthwiseConv2D(2, use_bias=False)(x))
        model = keras.Model(image, layers.Dense(3)(layers.Flatten()(layers.ReLU()(x))))
        qat = keras_qat.quantize_model(model)
        images, targets = rng(3).uniform(-1.0, 1.0, (24, 6, 6, 2)), rng(4).normal(size=(24, 3))
        qat.compile(kind(0.01, weight_decay=0.1, global_clipnorm=1.0), "mse")
        callbacks = [keras_qat.callbacks.QuantDelay(2), keras_qat.callbacks.FreezeBatchNorm(4)]
        qat.fit(images, targets, batch_size=4, verbose=0, shuffle=False, callbacks=callbacks)
        return [*qat.get_weights(), *(variable.numpy() for variable in qat.optimizer.variables)]

    for one, other in zip(trained(optimizers.Adam), trained(Own), strict=True):
        np.testing.assert_array_equal(one, other)
    assert saved == {optimizers.Adam: 5, Own: 0}  # Gammas, betas and a bias.
