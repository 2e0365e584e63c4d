"""Tests that layers with several operations are split, and the lowered model computes the same."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.graph.read_model import read_model
from keras_qat.graph.rebuild_model import rebuild_model
from keras_qat.lowering import lower
from tests.helpers import images, keras, scramble
from tests.networks.small import functional, layers

pytestmark = pytest.mark.legacy

EVERYTHING = {"padding": "same", "depth_multiplier": 2, "use_bias": False, "activation": "relu"}
CASES = {
    "conv_relu": (partial(layers.Conv2D, 4, 3, activation="relu"), ["Conv2D", "Activation"]),
    "conv": (partial(layers.Conv2D, 4, 3), ["Conv2D"]),
    "dense_softmax": (partial(layers.Dense, 4, activation="softmax"), ["Dense", "Activation"]),
    "separable": (partial(layers.SeparableConv2D, 4, 3), ["DepthwiseConv2D", "Conv2D"]),
    "separable_with_everything": (
        partial(layers.SeparableConv2D, 4, 3, strides=2, **EVERYTHING),
        ["DepthwiseConv2D", "Conv2D", "Activation"],
    ),
}


def lowered_outputs(model, x):
    lowered = lower(read_model(model))
    rebuilt = rebuild_model(lowered)
    for layer, weights in lowered.weights.items():
        for new, old in zip(layer.weights, weights, strict=True):
            new.assign(old)
    return lowered, rebuilt(x)


@pytest.mark.parametrize("case", CASES)
def test_split_computes_the_same(case):
    make, kinds = CASES[case]
    model = scramble(functional((8, 8, 3), build=lambda x: make(name="layer")(x)))
    x = images(4, (8, 8, 3))
    lowered, result = lowered_outputs(model, x)
    assert [type(call.layer).__name__ for call in lowered.calls] == kinds
    np.testing.assert_allclose(result, model(x), rtol=1e-5, atol=1e-6)
    assert lowered.calls[-1].output.name == "layer"


@pytest.mark.parametrize("merge", [layers.Add, layers.Multiply])
def test_merge_of_four_becomes_three_of_two(merge):
    model = functional(*[(4,)] * 4, build=lambda *values: merge(name="merge")(list(values)))
    x = [images(4, (4,), seed) for seed in range(4)]
    lowered, result = lowered_outputs(model, x)
    assert [len(call.inputs) for call in lowered.calls] == [2, 2, 2]
    np.testing.assert_allclose(result, model(x), rtol=1e-5)


def test_copies_for_a_batch_keep_their_shape():
    """`tf.repeat` along the first axis. Without an axis, it would flatten the tensor."""
    one, x = layers.Input((1, 4), batch_size=1), layers.Input((3,))
    count = tf.shape(x)[0]
    result = [tf.repeat(one, count, axis=0), tf.tile(input=one, multiples=[count, 1, 1])]
    result += [tf.repeat(one, count), tf.tile(one, [count, 2, 1])]
    plan = keras_qat.plan(keras.Model([one, x], result))
    assert sorted(plan.float_layers) == sorted(item.node.layer.name for item in result[2:])


def test_numbers_near_others_are_computed_with():
    x = keras.Input((4,))
    near = tf.maximum(x, tf.ones_like(x) * 0.5) + (tf.zeros_like(x) - 3.0)
    qat = keras_qat.quantize_model(keras.Model(x, 2.0 - tf.zeros_like(x) * x + near))
    keras_qat.set_quantization(qat, False)
    np.testing.assert_allclose(qat(np.ones([2, 4], np.float32), training=True), 0.0, atol=1e-6)


def test_float_model_keeps_its_activation():
    model = functional((4,), build=layers.Dense(3, activation="relu", name="dense"))
    lower(read_model(model))
    assert model.get_layer("dense").activation.__name__ == "relu"
