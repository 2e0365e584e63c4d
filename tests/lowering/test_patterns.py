"""Tests passes of lowering, and the engine that finds and replaces patterns of operations."""

import math

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.graph.read_model import read_model
from keras_qat.graph.rebuild_model import rebuild_model
from keras_qat.lowering import builder, passes
from keras_qat.lowering.builder import LoweringContext
from keras_qat.lowering.patterns import (
    Matcher,
    Rule,
    any_of,
    apply_rules,
    argument,
    constant,
    operation,
    repeated,
    tensor,
)
from tests.helpers import images, layers
from tests.networks.small import functional

SHAPE = (4, 6)
X, Y, C = tensor("x"), tensor("y"), constant("c")
exp, relu6, tanh = operation("exp"), operation("relu6"), operation("tanh")

# A rule for GELU. ---------------------------------------------------------------------------------
ERF = 1.0 + operation("erf")(X * math.sqrt(0.5))
CUBE = any_of(operation("pow")(X, 3.0), X * X * X, X * operation("square")(X))
TANH = tanh((X + CUBE * 0.044715) * math.sqrt(2 / math.pi)) + 1.0
GATE = any_of(ERF, TANH)
GELU = Rule(
    any_of(X * 0.5 * GATE, X * (GATE * 0.5), X * GATE * 0.5), lambda x: layers.Activation("gelu")(x)
)
# --------------------------------------------------------------------------------------------------

GELUS = {
    "of erf": lambda x: 0.5 * x * (1.0 + tf.math.erf(x / np.sqrt(2.0))),
    "of tanh": lambda x: (
        x * (0.5 * (1 + tf.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * tf.pow(x, 3)))))
    ),
    "of layers": lambda x: layers.Multiply()(
        [layers.Rescaling(0.5)(x), 1.0 + tf.math.erf(x * 0.70711)]
    ),
}


def matches(pattern, build, shape=SHAPE):
    graph = read_model(functional(shape, build=build))
    return next(Matcher().find(pattern, graph.calls[-1]), None)


@pytest.mark.parametrize("name", GELUS)
def test_a_rule_for_gelu(name):
    model = functional(SHAPE, build=GELUS[name])
    graph = apply_rules(read_model(model), LoweringContext(), [GELU])
    assert [type(call.layer) for call in graph.calls] == [layers.Activation]
    x = images(4, SHAPE)
    np.testing.assert_allclose(rebuild_model(graph)(x), model(x), atol=2e-3)


@pytest.mark.parametrize(
    ("pattern", "build", "is_match"),
    [
        pytest.param(exp(X) + Y * C, lambda x: x * 2.0 + tf.exp(x), True, id="another order"),
        pytest.param(exp(X) - Y, lambda x: x - tf.exp(x), False, id="order of a difference"),
        pytest.param(1.0 - X, lambda x: 1.0 - x, True, id="a constant minus a tensor"),
        pytest.param(1.0 - X, lambda x: x - 1.0, False, id="a tensor minus a constant"),
        pytest.param(2.0 / X, lambda x: tf.divide(2.0, x), True, id="a constant divided"),
        pytest.param(2.0 * X, lambda x: x * 2.0, True, id="a constant first"),
        pytest.param(X - 2.0, lambda x: tf.subtract(y=2.0, x=x), True, id="keywords"),
        pytest.param(X / 2.0, lambda x: layers.Rescaling(0.5)(x), True, id="a layer"),
        pytest.param(relu6(X), lambda x: layers.ReLU(6.0)(x), True, id="ReLU(6)"),
        pytest.param(relu6(X), lambda x: layers.ReLU(6.0, 0.1)(x), False, id="a leaky ReLU(6)"),
        pytest.param(tanh(X), lambda x: layers.Activation("tanh")(x), True, id="Activation"),
        pytest.param(X * 0.3, lambda x: x * 0.3000001, True, id="rounded"),
        pytest.param(X * 0.3, lambda x: x * 0.301, False, id="another constant"),
        pytest.param(X * 0.3, lambda x: x * np.full(6, 0.3, "float32"), True, id="an array"),
        pytest.param(
            X * 0.3, lambda x: x * np.float32([0.3, 0.4] * 3), False, id="an array of several"
        ),
        pytest.param(X + 3.0, lambda x: x + 3 * tf.ones_like(x), True, id="a uniform tensor"),
        pytest.param(exp(X) + exp(X), lambda x: tf.exp(x) + tf.exp(x), True, id="computed twice"),
        pytest.param(exp(X) + exp(X), lambda x: tf.exp(x) + tf.exp(-x), False, id="of others"),
        pytest.param(exp(any_of(tanh(X), X)), lambda x: tf.exp(tf.tanh(x)), True, id="a step"),
        pytest.param(
            operation("reduce_sum")(X, argument("axis")),
            lambda x: tf.reduce_sum(keepdims=True, input_tensor=x, axis=1),
            True,
            id="an axis",
        ),
    ],
)
def test_what_matches(pattern, build, is_match):
    assert (matches(pattern, build) is not None) is is_match


def test_optional_steps_are_left_out_if_they_can_be():
    assert (
        matches(exp(any_of(tanh(X), X)), lambda x: tf.exp(-x))
        .found["x"]
        .name.startswith("tf.math.negative")
    )
    match = matches(repeated(tanh, exp(X)), lambda x: tf.tanh(tf.tanh(tf.exp(x))))
    assert len(match.calls) == 3


def test_calls_that_only_a_match_reads_go():
    rule = Rule(
        operation("where")(argument("mask"), X, constant("end")), lambda x, **_: layers.ReLU()(x)
    )
    model = functional(SHAPE, build=lambda x: tf.where(tf.cos(x) > 0.5, x, 2 * tf.ones_like(x)))
    graph = apply_rules(read_model(model), LoweringContext(), [rule])
    assert [type(call.layer) for call in graph.calls] == [layers.ReLU]


class Gate(layers.Layer):
    def call(self, x):
        return x * tf.sigmoid(x)


def gated():
    return functional(
        (4,), build=lambda x: Gate(name="gate")(layers.Dense(4, "relu", name="dense")(x))
    )


def test_plan_shows_what_each_pass_changes(capsys):
    plan = keras_qat.plan(gated(), show_passes=True)
    printed = capsys.readouterr().out
    assert "trace custom layers: user code is replaced by Keras layers and operations" in printed
    assert "- gate float32 (None, 4) = Gate(dense)" in printed
    assert "+ gate/sigmoid float32 (None, 4) = math.sigmoid(dense)" in printed
    assert "+ dense float32 (None, 4) = Activation(dense_before_activation)" in printed
    assert not plan.float_layers


def test_plan_prints_nothing_by_default(capsys):
    keras_qat.plan(gated())
    assert not capsys.readouterr().out


def test_unused_calls_are_dropped():
    model = functional((4,), build=lambda x: x + tf.zeros_like(tf.sigmoid(x)))
    plan = keras_qat.plan(model)
    assert "math.sigmoid" not in [getattr(call.layer, "symbol", "") for call in plan.graph.calls]


def test_verifier_names_the_pass(monkeypatch):
    def swap(graph, context):
        graph.calls.reverse()
        return graph

    monkeypatch.setenv(builder.VERIFY, "1")
    monkeypatch.setattr(passes, "PASSES", (passes.Pass("swap", swap, "wrong order"),))
    with pytest.raises(AssertionError, match="after 'swap'"):
        keras_qat.plan(gated())
