"""Tests softmax of all differences of two values, and of sums of few and many values."""

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.ops.registry import op_named
from keras_qat.ops.softmax import _sum_in_order
from tests.comparison import RUNNABLE
from tests.ops.harness import BATCH, assert_same, in_integers, node_of, with_ends


def with_rows(bits, scale, rows):
    """Returns a softmax along the last axis with this scale, and rows of quantized values."""
    node, _ = node_of(op_named("softmax"), bits, 0)
    rows = np.resize(rows, (BATCH, *rows.shape)).astype(f"int{bits}")
    params = QuantParams(np.float32(scale), 0 if bits == 16 else 5, bits)
    shapes = [(None, *rows.shape[1:])] * 2
    node = with_ends(node, params, node.output.params, shapes=shapes, attributes={"axis": -1})
    return node, {node.inputs[0].name: rows}


def all_differences(bits, width):
    """Returns one value, and `width - 1` times another value that is lower by each difference."""
    below = np.arange(256) if bits == 8 else np.unique(np.r_[:700, :65536:211, 65535])
    top = 2 ** (bits - 1) - 1
    return np.stack([np.full_like(below, top), *[top - below] * (width - 1)], -1)


@pytest.mark.parametrize(("shape", "axis"), [((3, 40, 7), -2), ((2, 4, 20, 20), -1), ((3, 9), -1)])
def test_sums_are_rounded_in_order(shape, axis):
    """The order also holds with an unknown batch size, and after graph optimization."""
    x = np.exp(np.random.default_rng(0).normal(0, 5, shape)).astype(np.float32)
    expected = np.cumsum(np.moveaxis(x, axis, 0), 0, dtype=np.float32)[-1]
    spec = tf.TensorSpec([None, *shape[1:]], tf.float32)
    traced = tf.function(lambda x: _sum_in_order(x, axis), input_signature=[spec])
    for sums in (traced(x), _sum_in_order(tf.constant(x), axis)):
        np.testing.assert_array_equal(np.squeeze(sums, axis), expected)


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", RUNNABLE)
@pytest.mark.parametrize("bits", [8, 16])
def test_all_differences(bits, family):
    for scale in (1e-3, 0.0117, 0.04, 0.2, 3.0) if family != "tflm" else (0.0117,):
        for width in (1, 2, 9) if family != "tflm" else (2,):
            example = with_rows(bits, scale * 2.0 ** (8 - bits), all_differences(bits, width))
            assert_same(*example, family, f"scale {scale}, {width} values")


@pytest.mark.parametrize(
    ("family", "bits"),
    [*((name, 8) for name in ("xnnpack", "reference", "xnnpack_arm64")), ("tflm", 16)],
)
def test_shares_are_near_the_real_ones(family, bits):
    """Errors are little more than half a step of 8 bits, and a few steps of 16 bits."""
    scale = 0.04 * 2.0 ** (8 - bits)
    node, inputs = with_rows(bits, scale, all_differences(bits, 3))
    (q,), (codes,), params = inputs.values(), in_integers(node, inputs, family), node.output.params
    real = np.exp(scale * q.astype(float))
    real = real / real.sum(-1, keepdims=True) / params.scale + params.zero_point
    steps = np.abs(np.clip(real, params.lowest, params.highest) - codes)
    assert steps.max() < (0.55 if bits == 8 else 2.5)
