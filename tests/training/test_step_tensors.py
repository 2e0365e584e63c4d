"""Tests that quantizers and optimizers compute the same in joint operations as separately."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.training.fake_quantization.phase import Phase
from keras_qat.training.schedule import list_scheduled_layers
from keras_qat.training.scheduled_layer import assuming
from keras_qat.training.steps import optimizers as updates
from keras_qat.training.steps.step_tensors import compute_together, current
from tests.helpers import assert_all_equal, keras, layers, rng

X = rng(3).uniform(-1.0, 1.0, (8, 4, 4, 6)).astype(np.float32)
Y = rng(4).normal(size=(8, 3)).astype(np.float32)


def net():
    """Returns a model with fused kernels, other kernels, and a layer with two calls."""
    image = keras.Input((4, 4, 6))
    twice = layers.Conv2D(6, 1, name="twice")
    x = twice(layers.ReLU()(twice(image)))
    for filters in (4, 3):
        y = layers.Conv2D(filters, 1, activation="relu6")(x)
    x = layers.DepthwiseConv2D(3)(layers.DepthwiseConv2D(2)(layers.Concatenate()([x, y])))
    return keras.Model(image, layers.Dense(3, name="last")(layers.Flatten()(x)))


def trained(model, **options):
    qat = keras_qat.quantize_model(model)
    qat.compile(keras.optimizers.SGD(0.01), "mse", **options)
    for _ in range(3):
        qat.train_on_batch(X, Y)
    return qat


KERNELS = {
    "short": (lambda: layers.Conv2D(5, 1), (4, 4, 3)),
    "long": (lambda: layers.Conv2D(4, 1), (4, 4, 7)),
    "as long": (lambda: layers.Conv2D(2, 1), (4, 4, 7)),
    "zeros": (lambda: layers.Conv2D(3, 1, kernel_initializer="zeros"), (4, 4, 7)),
    "wide": (lambda: layers.Conv2D(3, 3), (4, 4, 2)),
    "by channel": (lambda: layers.DepthwiseConv2D(3, depth_multiplier=2), (4, 4, 6)),
    "fewer by channel": (lambda: layers.DepthwiseConv2D(3, depth_multiplier=2), (4, 4, 3)),
    "dense": (lambda: layers.Dense(4), (9,)),
    "more dense": (lambda: layers.Dense(6), (9,)),
    "sequence": (lambda: layers.Conv1D(4, 2), (6, 3)),
    "heads": (lambda: layers.EinsumDense("abc,cde->abde", (None, 2, 3)), (4, 5)),
    "more heads": (lambda: layers.EinsumDense("abc,cde->abde", (None, 4, 3)), (4, 5)),
    "large": (lambda: layers.Dense(2**9), (2**9,)),
    "as large": (lambda: layers.Dense(2**9), (2**9,)),
}
"""Layers with kernels of all shapes, and the shapes of their inputs."""


def test_weights_of_all_shapes_together_are_those_by_themselves():
    inputs = [keras.Input(shape) for _, shape in KERNELS.values()]
    outputs = [make()(x) for (make, _), x in zip(KERNELS.values(), inputs, strict=True)]
    qat = keras_qat.quantize_model(keras.Model(inputs, outputs))
    quantized, phase = list(list_scheduled_layers(qat)), Phase(True, True, False)
    with assuming(phase, quantized):
        pairs = [pair for layer in quantized for pair in layer.yield_block_weights()]
    assert len(pairs) == len(KERNELS)

    @tf.function(autograph=False)
    def together():
        with assuming(phase, quantized), compute_together(quantized):
            known = current().weights
            return {n: known[q][1] for n, (q, _) in zip(KERNELS, pairs, strict=True) if q in known}

    alone = dict(
        zip(KERNELS, (quantizer(weight, phase) for quantizer, weight in pairs), strict=True)
    )
    found = together()
    assert KERNELS.keys() - found.keys() == {"short", "wide", "sequence", "large", "as large"}
    for name, weight in found.items():
        np.testing.assert_array_equal(weight, alone[name], err_msg=name)


def test_a_layer_that_a_step_calls_twice_counts_twice():
    qat = trained(net())
    steps = {layer.name: int(layer.step) for layer in qat.layers if hasattr(layer, "step")}
    assert (steps["quant_twice"], steps["quant_last"]) == (6, 3)


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
    """Returns all variables after three updates, with gradients of different magnitude."""
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
    assert left == len(SHAPES) - 3 + 1  # All except vectors, and a sparse table.
    assert_all_equal(together, alone)


@pytest.mark.parametrize("name", OTHERS)
def test_each_is_updated_alone_where_the_result_would_be_another(name):
    variables = [tf.Variable([1.0]), tf.Variable([2.0])]
    optimizer = OTHERS[name]()
    pairs = [(tf.constant([0.5]), variable) for variable in variables]
    with tf.Graph().as_default():
        assert updates.update_together(optimizer, pairs) == pairs
