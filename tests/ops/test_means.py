"""Means of 16-bit values that are so many that their sum does not fit into 32 bits."""

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.ops.mean import MOST_WIDE, Step, wide_steps
from keras_qat.tflite.reader import FileGraph
from tests.comparison import RUNNABLE
from tests.helpers import layers
from tests.ops.harness import assert_same, file_of, in_integers, make_node, random_inputs
from tests.ops.test_movement import calls_of

MEANS = {
    "just few enough": (lambda x: tf.reduce_mean(x, 1), (MOST_WIDE,), ["MEAN"]),
    "parts that are filled up": (
        lambda x: tf.reduce_mean(x, 1),
        (MOST_WIDE + 1,),
        ["PAD", "RESHAPE", "MEAN", "MEAN"],
    ),
    "parts of another axis": (
        lambda x: tf.reduce_mean(x, 1, keepdims=True),
        (2 * MOST_WIDE, 1),
        ["RESHAPE", "MEAN", "MEAN"],
    ),
    "an open size beside it": (
        lambda x: tf.reduce_mean(x, 2),
        (None, MOST_WIDE + 1),
        ["PAD", "SHAPE", "SLICE", "CONCATENATION", "RESHAPE", "MEAN", "MEAN"],
    ),
    "images": (layers.GlobalAveragePooling2D(), (260, 260, 1), ["MEAN", "MEAN"]),
    "two axes, of which one is long": (
        lambda x: tf.reduce_mean(x, (1, 3)),
        (2, 1, MOST_WIDE + 2),
        ["RESHAPE", "MEAN", "MEAN"],
    ),
}


def mean_of(build, shape):
    """A mean of 16-bit values, and inputs: the smallest values, the largest, random ones."""
    node = make_node(calls_of(build, shape)[-1], 16, np.random.default_rng(0))
    ((name, codes),) = random_inputs(node, np.random.default_rng(1)).items()
    codes[0], codes[1] = -32768, 32767
    return node, {name: codes}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MEANS)
def test_16_bit_means_of_many_values(name):
    build, shape, kernels = MEANS[name]
    node, inputs = mean_of(build, shape)
    assert [operation.kernel for operation in FileGraph(file_of(node)).operations] == kernels
    for family in RUNNABLE:
        assert_same(node, inputs, family)
    (codes,), (result,) = inputs.values(), in_integers(node, inputs, "xnnpack")
    (x, output) = (tensor.params for tensor in (*node.inputs, node.output))
    axes = node.attributes["axes"]
    means = codes.astype(np.float64).mean(axes).reshape(result.shape) * x.scale / output.scale
    # Each step rounds by half a step of the input's scale.
    error = 0.6 + len(kernels) * 0.5 * float(x.scale / output.scale)
    assert np.abs(np.clip(means, -32768, 32767) - result).max() <= error


def test_no_step_adds_up_too_many_values():
    for shape, axes in (((None, 300, 300, 5), (1, 2, 3)), ((None, 2**20 + 1), (1,))):
        sizes, steps = list(shape), list(wide_steps(shape, axes))
        for step in steps:
            count = step.size or np.prod([sizes[axis] for axis in step.axes])
            assert count <= MOST_WIDE
            sizes = step.result(sizes)
        assert steps and np.prod([sizes[axis] for axis in axes]) <= MOST_WIDE


def test_open_sizes_are_averaged_at_once():
    assert list(wide_steps((None, None), (1,))) == []
    assert list(wide_steps((None, MOST_WIDE + 1), (1,))) == [Step((1,), 2, MOST_WIDE // 2 + 1)]
