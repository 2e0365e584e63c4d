"""Tests which tensors have quantizers, and why: in `plan`, and in the model."""

import json

import pytest

import keras_qat
from keras_qat.specs import FixedSpec, QuantSpec, SharedSpec
from tests.networks.small import functional, layers, residual_net, tiny_net

pytestmark = pytest.mark.legacy


def specs(plan) -> dict:
    """Returns tensor -> its specification."""
    return {row.tensor: row.spec for row in plan.rows}


def test_residual_net():
    result = specs(keras_qat.plan(residual_net()))
    quantized = {tensor for tensor, spec in result.items() if isinstance(spec, QuantSpec)}
    assert quantized == {
        *("image", "stem/kernel", "stem_relu", "depthwise/depthwise_kernel", "depthwise_relu"),
        *("project/kernel", "project_bn", "merge_relu", "logits/kernel", "logits"),
    }
    # Pooling and flattening move values. Tensors inside a kernel do not exist at run time.
    assert isinstance(result["pool"], SharedSpec)
    assert isinstance(result["flatten"], SharedSpec)
    for inside in ("stem", "stem_bn", "depthwise", "depthwise_bn", "project", "merge"):
        assert result[inside] is None


def test_weights_are_per_channel_symmetric_and_narrow():
    for row in keras_qat.plan(residual_net()).rows:
        if row.role == "weight":
            assert row.spec.per_channel
            assert row.spec.symmetric
            assert row.spec.narrow_range


def test_relu_starts_at_zero():
    result = specs(keras_qat.plan(residual_net()))
    assert result["stem_relu"].lower_bound == 0.0
    assert result["project_bn"].lower_bound is None


@pytest.mark.parametrize(
    ("activation", "low", "high"),
    [("softmax", 0, 255 / 256), ("sigmoid", 0, 255 / 256), ("tanh", -1, 127 / 128)],
)
def test_fixed_ranges(activation, low, high):
    model = functional((4,), build=layers.Dense(3, activation=activation, name="y"))
    assert specs(keras_qat.plan(model))["y"] == FixedSpec(low, high)


def test_concatenated_tensors_share_a_range():
    def build(x):
        a = layers.Conv2D(3, 1, name="a")(x)
        b = layers.Conv2D(3, 1, name="b")(x)
        return layers.Concatenate(name="both")([a, b])

    plan = keras_qat.plan(functional((4, 4, 2), build=build))
    (shared,) = [spec for spec in plan.ranges if len(spec.observed) == 2]
    assert [value.name for value in shared.observed] == ["a", "b"]
    assert isinstance(specs(plan)["both"], SharedSpec)


def test_planning_builds_nothing_and_agrees_with_the_model():
    model = residual_net()
    weights = len(model.weights)
    plan = keras_qat.plan(model)
    assert len(model.weights) == weights
    tensors = {row.tensor for row in plan.rows if isinstance(row.spec, (QuantSpec, FixedSpec))}
    qat = keras_qat.quantize_model(model)
    assert {
        name for quantizer in keras_qat.quantizers(qat) for name in quantizer.quantizes
    } == tensors


def test_prints_readably_and_is_json_data():
    plan = keras_qat.plan(residual_net())
    text = str(plan)
    for part in ("stem/kernel", "Conv2D", "8-bit symmetric per channel", "folded with stem_bn"):
        assert part in text
    assert json.loads(json.dumps(plan.to_dict()))["recipe"]["name"] == "int8"


@pytest.mark.parametrize("build", [tiny_net, residual_net])
def test_all_names_are_a_scope(build):
    """Includes names of inputs, and of layers that are fused into others."""
    model = build()
    plan = keras_qat.plan(model, scope=[layer.name for layer in model.layers])
    assert plan.float_layers == keras_qat.plan(model).float_layers


def test_why_a_tensor_in_front_of_the_scope_is_quantized():
    reasons = {row.tensor: row.reason for row in keras_qat.plan(tiny_net(), scope="logits").rows}
    assert reasons["conv"] == "outside the scope"
    assert reasons["flatten"] == "input of logits; outside the scope"
