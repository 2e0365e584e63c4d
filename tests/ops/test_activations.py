"""Tests operators on one or two values: halves, ends of domains, graphs, options."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.graph.read_model import read_model
from keras_qat.keras2.backend import keras
from keras_qat.ops import relu
from keras_qat.ops.activations import ACTIVATIONS
from keras_qat.ops.functions import LOOKUPS
from keras_qat.ops.lookup import lookup_row
from keras_qat.ops.node import Constant
from keras_qat.ops.op import Arguments, FixedRange, SharedRange
from keras_qat.ops.registry import Match, match, op_named
from keras_qat.ops.softmax import SOFTMAX, UNIT_NORM
from keras_qat.tflite.interpreter import FileInterpreter
from tests.comparison import KERNELS
from tests.ops import harness
from tests.ops.examples import EXAMPLES
from tests.ops.examples.example import of_any_shape

BINARY = tuple(map(op_named, ("add", "subtract", "multiply", "maximum", "minimum")))
OPS = (*BINARY, relu.RELU, relu.LEAKY_RELU, relu.PRELU, *ACTIVATIONS, *LOOKUPS, SOFTMAX, UNIT_NORM)
CASES = [
    pytest.param(op, bits, id=f"{op.name}-{bits}")
    for op in OPS
    for bits in (8, 16)
    if op.has_kernel_for(bits)
]


def call_of(build, *shapes):
    inputs = [keras.Input(shape) for shape in shapes or [(4, 5, 6)]]
    (call,) = read_model(keras.Model(inputs, build(*inputs))).calls
    return call


def with_round_scales(node, numbers):
    """Returns a node with scales near powers of two, so many results are halves."""
    made = {}

    def changed(tensor):
        if isinstance(tensor, Constant):
            return tensor
        if tensor not in made:
            power = 2.0 ** np.round(np.log2(tensor.params.scale))
            factors = [1, 1, 1.5] if tensor.params.bits == 8 else [1, 1.25, 1.5]
            scale = np.float32(power * numbers.choice(factors))
            params = dataclasses.replace(tensor.params, scale=scale)
            made[tensor] = dataclasses.replace(tensor, params=params)
        return made[tensor]

    outputs = node.outputs
    if not isinstance(node.op.output, FixedRange):
        outputs = tuple(map(changed, outputs))
    return dataclasses.replace(node, inputs=tuple(map(changed, node.inputs)), outputs=outputs)


ROUNDING = [case for case in CASES if not isinstance(case.values[0].output, SharedRange)]


def assert_halves_agree(op, bits, family, seeds, monkeypatch):
    make = harness.make_node
    for seed in seeds:
        numbers = np.random.default_rng(seed)
        changed = lambda *a, numbers=numbers: with_round_scales(make(*a), numbers)  # noqa: E731
        monkeypatch.setattr(harness, "make_node", changed)
        harness.assert_exact(op, bits, family, seed)


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", KERNELS)
@pytest.mark.parametrize(("op", "bits"), ROUNDING)
def test_halves_are_rounded_as_the_interpreter_does(op, bits, family, monkeypatch):
    assert_halves_agree(op, bits, family, range(4), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("family", KERNELS)
@pytest.mark.parametrize(("op", "bits"), ROUNDING)
def test_many_more_halves(op, bits, family, monkeypatch, seeds):
    assert_halves_agree(op, bits, family, range(4, seeds), monkeypatch)


@pytest.mark.parametrize("family", KERNELS)
@pytest.mark.parametrize("bits", [8, 16, 5])
def test_a_new_operator_is_a_row(bits, family, monkeypatch):
    erf = lookup_row("erf", tf.math.erf, "error function")
    monkeypatch.setitem(EXAMPLES, "erf", of_any_shape(tf.math.erf))
    monkeypatch.setattr(harness, "match", lambda call: Match(erf, {}))
    for seed in range(4):
        harness.assert_exact(erf, bits, family, seed)


def computed(op, real, output, attributes=None):
    """Returns an operator's float results for float inputs, which are multiples of 1/16."""
    x = QuantParams(np.float32(1 / 16), 0).as_tensors()
    q = [tf.constant(np.float32(real) * 16)]
    given = Arguments("xnnpack", attributes or {}, q, [x], output.as_tensors(), None)
    return np.asarray(op(given)) * output.scale


@pytest.mark.parametrize(
    ("op", "expected"),
    [("log", [-4, -4, 0]), ("rsqrt", [127 / 32, 127 / 32, 1]), ("sqrt", [0, 0, 1])],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_in_the_domain_counts_as_its_end(op, expected):
    output = QuantParams(np.float32(1 / 32), 0)
    result = np.clip(computed(op_named(op), [-2, 0, 1], output), -4, 127 / 32)
    np.testing.assert_array_equal(result, expected)


def test_a_product_of_one_tensor_and_itself_is_a_square():
    """XNNPACK looks up squares, and never rounds the product of both scales."""
    params = QuantParams(np.float32(0.00035065995), -128)
    output = QuantParams(np.float32(3.0494675e-05), -128)
    node = harness.make_node(call_of(lambda x: x * x, (6,)), 8, np.random.default_rng(0))
    x = dataclasses.replace(node.inputs[0], params=params)
    y = dataclasses.replace(node.output, params=output)
    node = dataclasses.replace(node, inputs=(x, x), outputs=(y,))
    inputs = {x.name: np.full((1, 6), 58, np.int8)}
    (expected,) = harness.in_the_interpreter(harness.file_of(node), inputs, "reference")
    np.testing.assert_array_equal(harness.in_integers(node, inputs, "reference")[0], expected)
    (codes,) = harness.in_integers(node, inputs, "xnnpack")
    assert codes[0, 0] == 11


@pytest.mark.parametrize("kind", [np.float32, tf.constant, lambda numbers: 2.0])
def test_constants_are_numbers_arrays_and_tensors(kind):
    constant = kind([1.0, 2.0, 3.0])
    for build in (lambda x: x + constant, lambda x: tf.subtract(constant, x)):
        call = call_of(build, (3,))
        node = harness.make_node(call, 8, np.random.default_rng(0))
        assert sorted(type(tensor).__name__ for tensor in node.inputs) == ["Constant", "Tensor"]


def test_variables_are_refused():
    variable = tf.Variable([1.0, 2.0, 3.0])
    assert match(call_of(lambda x: x + variable, (3,))).reason == "a variable"


@pytest.mark.parametrize("op", [op_named("elu"), op_named("gelu")], ids=lambda op: op.name)
def test_a_table_is_written_where_no_kernel_computes_the_same(op):
    codes = {}
    for bits in (8, 16):
        node, _ = harness.node_of(op, bits, 0)
        model = FileInterpreter(harness.file_of(node))
        codes[bits] = [name for name, _, _ in model.operations()]
    assert codes[16] == ["CAST", "ADD", "GATHER"]
    assert codes[8] in (["ELU"], ["GELU"], ["CAST", "ADD", "GATHER"])
