"""Families whose kernels compute in real numbers, against the real functions themselves."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.arithmetic.kernel_families import FAMILIES, kernel_family
from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.graph.calls import map_values
from keras_qat.integer_graph.execute import prepare, run
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.ops.node import Node, Tensor
from keras_qat.ops.requantize import prepare_requantization, requantize
from tests.ops.harness import node_of, random_inputs
from tests.ops.test_contracts import MATCHING

ELSEWHERE = {
    "weights by gate": ("lstm", "masked_lstm", "gru", "simple_rnn", "simple_rnn_relu", "conv_lstm"),
    "weights in other shapes than the layer's": ("einsum_dense_heads", "affine"),
    "not defined for all random inputs": ("log", "sqrt", "rsqrt", "log1p"),
    "other types": ("select", "from_integers", "one_hot", "reduce_any", "reduce_all"),
}
"""Why `real_results` cannot compute rows -> the rows."""

CASES = [
    pytest.param(op, name, id=f"{op.name}-{name}")
    for op in MATCHING
    for name, family in FAMILIES.items()
    if family.in_float and not op.is_table and op.name not in sum(ELSEWHERE.values(), ())
]


def real_results(node: Node, numbers: list[Any]) -> list[Any]:
    """What the node's layer computes of real numbers, with the quantized weights."""
    layer, weights, given = node.call.layer, node.weights, iter(numbers)
    args, kwargs = map_values(lambda _: next(given), (node.call.args, node.call.kwargs))
    if weights is not None:
        unit = node.inputs[0].params.scale * weights.scale
        bias = [] if weights.bias is None else [weights.bias * unit.reshape(-1)]
        layer.set_weights([weights.q * weights.scale, *bias])
    return tf.nest.flatten(layer(*args, **kwargs))


@pytest.mark.sample(18)
@pytest.mark.parametrize(("op", "family"), CASES)
def test_results_are_the_real_ones_rounded(op, family):
    """Next to halves the order of operations in float32 decides."""
    # Of weights some have no bias, and of two operands one may be a number, which stays real. The
    # last seed gives two tensors, neither of which begins at its zero point.
    for seed in (0, 1, 2, 4) if op.weights or op.quantizes_constants else (0,):
        node, numbers = node_of(op, 8, seed)
        read = [item for item in node.inputs if isinstance(item, Tensor)]
        inputs = {tensor.name: tensor for tensor in read}
        tensors = dict(zip(node.call.inputs, read, strict=True))
        graph = ResolvedGraph("", inputs, {}, (node,), tensors, {})
        codes = random_inputs(node, numbers)
        centred = [
            tf.cast(codes[x.name], tf.float32) - x.params.zero_point for x in inputs.values()
        ]
        kernels = kernel_family(family)
        results = run(graph, centred, kernels, real_results, prepare(graph, kernels))
        numbers = [np.float32(x.params.dequantize(codes[x.name])) for x in read]
        for real, tensor in zip(real_results(node, numbers), node.outputs, strict=True):
            result, params = np.asarray(results[tensor]), tensor.params
            if params is None:
                np.testing.assert_array_equal(result, real)
                continue
            ends = params.lowest - params.zero_point, params.highest - params.zero_point
            steps = np.clip(np.asarray(real) / np.float64(params.scale), *ends)
            np.testing.assert_array_equal(result, np.round(result))
            assert np.abs(result - steps).max() < 0.501


@pytest.mark.parametrize(
    ("family", "rounded"), [("onnxruntime", np.rint), ("esp_dl", lambda x: np.floor(x + 0.5))]
)
def test_another_scale_rounds_once(family, rounded):
    """Of half the steps every second value is a half."""
    every = np.arange(-128, 128, dtype=np.float32)
    scales = (QuantParams(np.float32(scale), 0).as_tensors() for scale in (0.5, 1.0))
    numbers = prepare_requantization(kernel_family(family), *scales)
    np.testing.assert_array_equal(requantize(tf.constant(every), numbers), rounded(every / 2))
