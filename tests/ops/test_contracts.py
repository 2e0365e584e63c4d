"""Tests every operator, bit width and kernel family on random examples, and their files."""

import math

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.arithmetic.kernel_families import kernel_family
from keras_qat.ops.registry import ROWS, op_named
from keras_qat.tflite.interpreter import FileInterpreter
from keras_qat.tflite.schema import OPERATORS, operator_code, unpack
from tests.comparison import KERNELS, RUNNABLE
from tests.helpers import images, keras, observe
from tests.networks.small import functional
from tests.ops.examples import EXAMPLES
from tests.ops.examples.example import BATCH
from tests.ops.harness import (
    LACKING,
    assert_exact,
    file_of,
    in_integers,
    in_integers_as_tensors,
    node_of,
    random_inputs,
    with_ends,
)

BITS = (8, 16, 5)
LISTING = {op.name for op in ROWS if op.layers or op.paths or op.kinds or op.functions}
OF_PARTS = {"group_norm", "layer_norm"}
"""Composed operators, which take long in graphs."""
UNROLLED = {"gru", "masked_lstm", "simple_rnn", "simple_rnn_relu", "conv_lstm"}
"""Files with many operators, which are slow except for one case."""
MATCHING = [op for op in ROWS if op.name in LISTING | OF_PARTS]
"""Operators with Keras layers or operations. All other operators are for custom layers."""


def is_slow(op, bits, family):
    """Returns whether a case is slow, or has 5 bits, for which one kernel family is enough."""
    if op.name in UNROLLED:
        return (op.name, bits, family) != ("gru", 8, "xnnpack")
    return bits == 5 and family != "xnnpack"


CASES = [
    pytest.param(
        *(op, bits, family),
        id=f"{op.name}-{bits}-{family}",
        marks=[pytest.mark.slow] * is_slow(op, bits, family),
    )
    for op in MATCHING
    for bits in BITS
    for family in RUNNABLE
    if op.has_kernel_for(bits, kernel_family(family))
]


def first_seeds(op, bits, family):
    """Returns the examples to test by default, which differ between bits and kernels."""
    start = 3 * BITS.index(bits) + RUNNABLE.index(family)
    return range(start, start + 1)


def test_every_row_has_an_example():
    assert {op.name for op in MATCHING} == set(EXAMPLES)


@pytest.mark.sample(120)
@pytest.mark.parametrize(("op", "bits", "family"), CASES)
def test_the_operator_computes_what_the_interpreter_does(op, bits, family):
    for seed in first_seeds(op, bits, family):
        assert_exact(op, bits, family, seed)


OF_CHANNELS = [case for case in CASES if any(case.values[0].weights.values())]
"""Cases with a scale for each output channel of the weights."""


@pytest.mark.sample(5)
@pytest.mark.parametrize(("op", "bits", "family"), OF_CHANNELS)
def test_with_one_scale_for_the_weights(op, bits, family):
    for seed in first_seeds(op, bits, family):
        assert_exact(op, bits, family, seed, per_channel=False)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "bits", "family"), OF_CHANNELS)
def test_many_more_with_one_scale(op, bits, family, seeds):
    for seed in range(seeds):
        assert_exact(op, bits, family, seed, per_channel=False)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "bits", "family"), CASES)
def test_many_more(op, bits, family, seeds):
    for seed in range(seeds):
        assert_exact(op, bits, family, seed)


@pytest.mark.sample(6)
@pytest.mark.parametrize("maximum", [math.inf, 6.0, 1.5])
@pytest.mark.parametrize(
    ("op", "bits", "family"),
    [
        pytest.param(*case.values, id=case.id, marks=[pytest.mark.legacy] * bool(op.weights))
        for case in CASES
        if (op := case.values[0]).can_merge_relu and case.values[2] != "tflm"
    ],
)
def test_a_relu_is_merged(op, bits, family, maximum):
    for seed in range(2):
        assert_exact(op, bits, family, seed, maximum)


@pytest.mark.sample(3)
@pytest.mark.parametrize("jit", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize(
    ("op", "bits"),
    [
        pytest.param(
            op, bits, id=f"{op.name}-{bits}", marks=[pytest.mark.slow] * (op.name in OF_PARTS)
        )
        for op in MATCHING
        for bits in (8, 16)
        if op.has_kernel_for(bits) and not op.weights
    ],
)
def test_graphs_compute_the_same(op, bits, jit):
    node, numbers = node_of(op, bits, 3)
    inputs = random_inputs(node, numbers)
    for family in KERNELS:
        compute = tf.function(
            lambda given, family=family: in_integers_as_tensors(node, given, family),
            autograph=False,
            jit_compile=jit,
        )
        for expected, result in zip(
            in_integers(node, inputs, family), compute(inputs), strict=True
        ):
            np.testing.assert_array_equal(result, expected)


def assert_written_as_computed(contents: bytes, kernels: str = "reference") -> None:
    """Asserts that tensors have the written shapes, and depthwise convolutions their multiplier."""
    model, interpreter = unpack(contents), FileInterpreter(contents, kernels).interpreter
    (graph,) = model.subgraphs
    interpreter.allocate_tensors()
    computed = {detail["index"]: detail["shape"] for detail in interpreter.get_tensor_details()}
    for index, tensor in enumerate(graph.tensors):
        assert tensor.hasRank
        assert tuple(computed[index]) == tuple(tensor.shape), tensor.name
    for operator in graph.operators:
        if (
            OPERATORS[operator_code(model.operatorCodes[operator.opcodeIndex])]
            == "DEPTHWISE_CONV_2D"
        ):
            before, after = (graph.tensors[end[0]] for end in (operator.inputs, operator.outputs))
            times = operator.builtinOptions.depthMultiplier
            assert before.shape[-1] * times == after.shape[-1]


WEIGHTS = {
    **dict.fromkeys(("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"), range(1, 2)),
    "UNIDIRECTIONAL_SEQUENCE_LSTM": range(1, 9),
}
"""Operator -> which of its inputs are weights."""


@pytest.mark.parametrize("name", ["conv", "depthwise_conv", "dense", "lstm"])
def test_weights_have_no_zero_point(name):
    """Kernels do not read a zero point of weights."""
    model = unpack(file_of(node_of(op_named(name), 8, 1)[0], BATCH))
    (graph,) = model.subgraphs
    indices = [
        operator.inputs[at]
        for operator in graph.operators
        for at in WEIGHTS.get(
            OPERATORS[operator_code(model.operatorCodes[operator.opcodeIndex])], ()
        )
    ]
    assert indices
    for index in indices:
        assert not np.any(graph.tensors[index].quantization.zeroPoint)


def test_shapes_of_causal_convolutions():
    convolution = keras.layers.Conv1D(4, 3, padding="causal", dilation_rate=2)
    qat = observe(
        keras_qat.quantize_model(functional((7, 3), build=convolution)), images(9, (7, 3))
    )
    assert_written_as_computed(keras_qat.export_tflite(qat, batch_size=BATCH))


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    "op", [op for op in MATCHING if op.has_kernel_for(8)], ids=lambda op: op.name
)
def test_shapes_are_those_that_the_interpreter_computes(op):
    kernels = "optimized" if (op.name, "reference") in LACKING else "reference"
    assert_written_as_computed(file_of(node_of(op, 8, 1)[0], BATCH), kernels)


def test_several_open_sizes_behind_others_are_refused():
    node, _ = node_of(op_named("linear"), 8, 0)
    shapes = (None, 6, None), (None, 3, None, None)
    with pytest.raises(NotImplementedError, match="allows only one unknown size"):
        file_of(with_ends(node, shapes=shapes))
