"""Tests that graph optimization does not change the arithmetic of operators.

If it changes a float operation, only some results in a million are rounded differently, which
random inputs rarely show. The tests therefore read the optimized graphs.
"""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, meta_graph_pb2, rewriter_config_pb2
from tensorflow.python.grappler import tf_optimizer

from keras_qat.arithmetic.kernel_families import kernel_family
from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.integer_graph.cached_inference import PreparedStore
from keras_qat.integer_graph.execute import compute_node, prepare_node
from keras_qat.ops.node import Constant, Tensor
from keras_qat.ops.op import get_held_dtype
from tests.ops.harness import node_of, random_inputs
from tests.ops.test_contracts import CASES

ROUNDING = {
    *("Add", "AddV2", "AddN", "Sub", "Mul", "MulNoNan", "Div", "DivNoNan", "RealDiv", "Square"),
    *("SquaredDifference", "Reciprocal", "Inv", "Sqrt", "Rsqrt", "Pow", "Exp", "Expm1", "Log"),
    *("Log1p", "Tanh", "Sigmoid", "Erf", "Erfc", "Cumsum", "Sum", "Mean"),
}
PASSED = {
    *("Identity", "Snapshot", "Reshape", "Cast", "Transpose", "Squeeze", "ExpandDims"),
    *("BroadcastTo", "Switch"),
}
"""Operations that do not round. Optimization may move and drop them."""
OTHER_PASSES = (
    *("layout_optimizer", "constant_folding", "shape_optimization", "remapping"),
    *("common_subgraph_elimination", "arithmetic_optimization", "dependency_optimization"),
    *("loop_optimization", "debug_stripper"),
)
"""All optimizations except inlining functions."""


def optimized(traced, inlines_only=False):
    """Returns the nodes of a traced function as they run."""
    meta = tf.compat.v1.train.export_meta_graph(
        graph_def=traced.graph.as_graph_def(add_shapes=True), graph=traced.graph
    )
    fetched = meta_graph_pb2.CollectionDef()
    fetched.node_list.value.extend(tensor.name for tensor in traced.outputs)
    meta.collection_def["train_op"].CopyFrom(fetched)
    config = config_pb2.ConfigProto()
    options = config.graph_options.rewrite_options
    options.min_graph_nodes = -1
    if inlines_only:
        for name in OTHER_PASSES:
            setattr(options, name, rewriter_config_pb2.RewriterConfig.OFF)
    return tf_optimizer.OptimizeGraph(config, meta).node


def arithmetic(nodes):
    """Returns the float operations that round, each with the operations that compute its inputs."""
    by_name = {node.name: node for node in nodes}
    kinds = {}

    def get_kind(name):
        """Returns the operation that computes a tensor; "Const" if only constants contribute."""
        left = [name]
        while left:
            node = by_name[left[-1].split(":")[0]]
            inputs = [source for source in node.input if not source.startswith("^")]
            missing = [array for array in inputs if array.split(":")[0] not in kinds]
            if missing and "Next" not in node.op and node.op != "Merge":
                left += missing
                continue
            of_inputs = [kinds.get(array.split(":")[0], "loop") for array in inputs]
            kind = of_inputs[0] if node.op in PASSED else node.op
            if inputs and all(of_input == "Const" for of_input in of_inputs):
                kind = "Const"
            kinds[left.pop().split(":")[0]] = kind
        return kinds[name.split(":")[0]]

    return {
        (node.op, *sorted(get_kind(source) for source in node.input if not source.startswith("^")))
        for node in nodes
        if node.op in ROUNDING
        and tf.as_dtype(node.attr["T"].type).is_floating
        and get_kind(node.name) != "Const"
    }


def assert_left_alone(traced):
    written, run = arithmetic(optimized(traced, inlines_only=True)), arithmetic(optimized(traced))
    assert run <= written, f"{sorted(run - written)} instead of some of {sorted(written - run)}"


def with_tensors(node):
    """Returns the node as inference reads it, with tensors as constants."""
    made = {}

    def number(value):
        return None if value is None else tf.constant(np.asarray(value, np.float64))

    def params(given: QuantParams | None):
        if given is not None and id(given) not in made:
            made[id(given)] = QuantParams(number(given.scale), number(given.zero_point), given.bits)
        return made.get(id(given))

    def operand(given):
        if id(given) not in made:
            q = {"q": number(given.q)} if isinstance(given, Constant) else {}
            made[id(given)] = dataclasses.replace(given, params=params(given.params), **q)
        return made[id(given)]

    def weights(given):
        if given is None:
            return None
        fields = {name: number(getattr(given, name)) for name in ("q", "scale", "bias", "reach")}
        inner = {name: params(value) for name, value in given.inner.items()}
        recurrent = weights(given.recurrent)
        return dataclasses.replace(given, **fields, inner=inner, recurrent=recurrent)

    return dataclasses.replace(
        node,
        inputs=tuple(map(operand, node.inputs)),
        outputs=tuple(map(operand, node.outputs)),
        weights=weights(node.weights),
    )


def traced_for_inference(node, inputs, family):
    """Returns a node's computation as `predict` traces it, with known constants."""
    changed, kernels = with_tensors(node), kernel_family(family)
    store = PreparedStore(prepare_node(changed, kernels))

    def infer(*given):
        by_name = dict(zip(inputs, given, strict=True))
        tensors = [
            by_name[tensor.name] if isinstance(tensor, Tensor) else None
            for tensor in changed.inputs
        ]
        return compute_node(changed, tensors, kernels, store.read(decides=True))

    params = {tensor.name: tensor.params for tensor in node.inputs if isinstance(tensor, Tensor)}
    specs = [
        tf.TensorSpec(array.shape, get_held_dtype(params[name]) if params[name] else array.dtype)
        for name, array in inputs.items()
    ]
    return tf.function(infer, autograph=False).get_concrete_function(*specs)


@pytest.mark.sample(20)
@pytest.mark.parametrize(
    ("op", "bits", "family"),
    [case for case in CASES if case.values[1] in (8, 16) and case.values[2] != "tflm"],
)
def test_of_each_operator(op, bits, family):
    node, numbers = node_of(op, bits, 0)
    assert_left_alone(traced_for_inference(node, random_inputs(node, numbers), family))


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_of_ranges(bits):
    def params(minimum, maximum):
        result = QuantParams.from_range(minimum, maximum, bits)
        return result.scale, result.zero_point

    number = tf.TensorSpec([], tf.float32)
    assert_left_alone(tf.function(params).get_concrete_function(number, number))


def test_of_a_symmetric_range():
    """Zero is a tie, so the last bit matters."""
    traced = tf.function(lambda end: QuantParams.from_range(-end, end).zero_point)
    for end in np.float32(10.0 ** np.random.default_rng(0).uniform(-3, 3, 500)):
        number = tf.constant(end)
        assert traced(number) == QuantParams.from_range(-number, number).zero_point
