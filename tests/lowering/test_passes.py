"""Passes of lowering: what they print, and the graphs between them."""

import pytest
import tensorflow as tf

import keras_qat
from keras_qat.lowering import builder, passes
from tests.networks.small import functional, layers


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
