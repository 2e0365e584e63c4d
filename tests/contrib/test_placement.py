"""Tests which tensors have quantizers, like the original's tests of its graph patterns.

The recorded runs in `tests/conformance` have further networks, with all readers of a quantized
tensor.
"""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.graph.calls import flatten_values
from keras_qat.graph.read_model import read_model
from keras_qat.lowering import lower
from keras_qat.placement.fusion_groups import find_groups
from tests.helpers import images, keras
from tests.networks.contrib import conv, identity, image, layers, relu


def quantized_tensors(inputs, outputs, **kwargs) -> dict[str, str]:
    plan = keras_qat.plan(keras.Model(inputs, outputs), "contrib", **kwargs)
    return {row.tensor: row.reason for row in plan.rows if row.spec}


@pytest.mark.parametrize("kind", ["conv", "depthwise"])
def test_add_behind_a_convolution(kind):
    """The convolution is quantized. The Add is not, because it is fused with its ReLU6."""
    x = image()
    if kind == "conv":
        y, kernel = conv(x, "layer"), "layer/kernel"
    else:
        y = layers.DepthwiseConv2D(3, padding="same", name="layer")(x)
        kernel = "layer/depthwise_kernel"
    y = relu(layers.Add(name="add")([y, x]), "relu6", 6.0)
    assert quantized_tensors(x, y) == {
        kernel: "kernel",
        "layer": "conv_quant",
        "relu6": "act_quant",
    }


def test_separable_convolution_is_quantized_between_its_stages():
    x = image()
    y = layers.SeparableConv2D(4, 3, padding="same", name="layer")(x)
    assert quantized_tensors(x, relu(layers.Add(name="add")([y, x]), "relu6", 6.0)) == {
        "layer_depthwise/depthwise_kernel": "kernel",
        "layer_depthwise": "act_quant",
        "layer/kernel": "kernel",
        "layer": "conv_quant",
        "relu6": "act_quant",
    }


def test_activation_behind_a_layer_without_bias():
    x = image()
    y = relu(conv(x, "layer", use_bias=False), "relu6", 6.0)
    assert quantized_tensors(x, y) == {"layer/kernel": "kernel", "relu6": "act_quant"}


def test_final_layer():
    """Without an activation, the sum with the bias is quantized."""
    x = image()
    y = conv(relu(conv(x, "first")), "last")
    assert quantized_tensors(x, y) == {
        "first/kernel": "kernel",
        "relu": "act_quant",
        "last/kernel": "kernel",
        "last": "act_quant",
    }


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_post_activation_bypass(batch_norm, swapped):
    """Tensors before and after the Add are quantized, for both orders of its inputs."""
    x = image()
    y = conv(x, "layer", use_bias=not batch_norm)
    if batch_norm:
        y = layers.BatchNormalization(name="bn")(y)
    y = relu(y, "relu6", 6.0)
    y = layers.Add(name="add")([x, y] if swapped else [y, x])
    y = conv(y, "next")
    assert quantized_tensors(x, y) == {
        "layer/kernel": "kernel" + (", folded with bn" if batch_norm else ""),
        "relu6": "act_quant",
        "add": "post_activation_bypass_quant",
        "next/kernel": "kernel",
        "next": "act_quant",
    }


def test_overlapping_bypasses():
    """The second Add has an activation and a bare convolution as inputs, and a ReLU6 after it."""
    x = image()
    first = relu(conv(x, "first"), "first_relu6", 6.0)
    second = conv(x, "second")
    y = relu(layers.Add(name="add")([first, second]), "relu6", 6.0)
    assert quantized_tensors(x, y) == {
        "first/kernel": "kernel",
        "first_relu6": "act_quant",
        "second/kernel": "kernel",
        "second": "conv_quant",
        "relu6": "act_quant",
    }


def test_reshape_is_not_quantized_twice():
    """If operators only move values, only the moved tensor is quantized."""
    x = image()
    y = layers.Flatten(name="flat")(relu(conv(x, "layer"), "relu6", 6.0))
    expected = {"layer/kernel": "kernel", "relu6": "act_quant"}
    assert quantized_tensors(x, y) == expected
    y = layers.Reshape((-1,), name="again")(y)
    assert quantized_tensors(x, y) == expected


@pytest.mark.parametrize("between", ["Reshape", "MaxPooling2D", "Dropout", "identity"])
def test_merges_are_found_through_layers_that_move_values(between):
    x = image()
    y = relu(conv(x, "layer"))
    y = {
        "Reshape": lambda: layers.Reshape((3, 12, 4)),
        "MaxPooling2D": lambda: layers.MaxPooling2D(),
        "Dropout": lambda: layers.Dropout(0.5),
        "identity": lambda: layers.Activation("linear"),
    }[between]()(y)
    y = layers.Add(name="add")([y, y])
    tensors = quantized_tensors(x, y)
    assert tensors["add"] == "activation_AddV2_quant"
    assert set(tensors) == {"layer/kernel", "relu", "add"}


def test_merges_behind_average_pooling_are_left_alone():
    x = image()
    y = layers.AveragePooling2D()(relu(conv(x, "layer")))
    y = layers.Add(name="add")([y, y])
    assert set(quantized_tensors(x, y)) == {"layer/kernel", "relu"}


def test_chain_of_multiply_and_add():
    x = image()
    y = relu(conv(x, "layer"), "relu6", 6.0)
    y = layers.Multiply(name="multiply")([y, x])
    y = layers.Add(name="add")([y, x])
    tensors = quantized_tensors(x, y)
    assert tensors["multiply"] == "activation_Mul_quant"
    assert tensors["add"] == "activation_AddV2_quant"


def test_operators_count_as_merges():
    x = image()
    y = relu(conv(x, "layer")) * x
    assert "activation_Mul_quant" in quantized_tensors(x, y).values()


def test_shared_weights_have_one_quantizer():
    """A layer with two calls quantizes its weights once, and each call's output separately."""
    x = image()
    for shared in (
        layers.Conv2D(4, 3, padding="same", name="shared"),
        layers.DepthwiseConv2D(3, padding="same", name="shared"),
    ):
        y = relu(shared(relu(shared(x), "one")), "two")
        model = keras_qat.quantize_model(
            keras.Model(x, y), keras_qat.recipes.contrib(quant_delay=1)
        )
        names = [name for quantizer in keras_qat.quantizers(model) for name in quantizer.quantizes]
        assert sorted(name.split("/")[0] for name in names) == ["one", "shared", "two"]
        read = read_model(model)
        calls = [call for call in read.calls if call.layer.name == "quant_shared"]
        assert len(calls) == 2
        assert calls[0].layer is calls[1].layer
        assert len(calls[0].layer.weight_quantizers) == 1


def test_called_inside_a_name_scope():
    """TensorFlow's name scope around the call does not change the names of layers."""
    x = image()
    model = keras.Model(x, relu(conv(x, "layer")))
    names = [layer.name for layer in keras_qat.quantize_model(model, "contrib").layers]
    for scope in ("name_scope", None):
        with tf.name_scope(scope or ""):
            inside = keras_qat.quantize_model(model, "contrib")
        assert [layer.name for layer in inside.layers] == names
        assert not any("name_scope/name_scope" in weight.name for weight in inside.weights)


# Patterns and graphs, as in the original's tests of its graph matcher.


def test_kernel_batch_norm_activation_is_one_group():
    x = image()
    y = relu(layers.BatchNormalization(name="bn")(conv(x, "layer")))
    (group,) = find_groups(lower(read_model(keras.Model(x, y))))
    assert [call.name for call in group.calls] == ["layer", "bn", "relu"]
    assert [value.name for value in group.kernel.inputs] == ["image"]


def test_either_activation_ends_a_group():
    for max_value in (None, 6.0):
        x = image()
        y = relu(conv(x, "layer"), "end", max_value)
        (group,) = find_groups(read_model(keras.Model(x, y)))
        assert group.output.name == "end"
    y = layers.Activation("tanh", name="tanh")(conv(x, "layer"))
    (group,) = find_groups(read_model(keras.Model(x, y)))
    assert group.output.name == "layer"


def test_pattern_on_one_of_several_outputs():
    x = image()
    _, second = tf.split(x, 2, axis=-1)
    y = relu(conv(second, "layer"))
    assert quantized_tensors(x, y) == {"layer/kernel": "kernel", "relu": "act_quant"}
    model = keras.Model(x, y)
    (group,) = find_groups(lower(read_model(model)))
    assert group.kernel.inputs[0].name.endswith(":1")
    quantized = keras_qat.quantize_model(model, "contrib")
    keras_qat.set_quantization(quantized, False)
    batch = images(2, (6, 6, 4))
    np.testing.assert_allclose(quantized(batch), model(batch), rtol=1e-6, atol=1e-6)


def test_no_one_and_several_consumers():
    x = image()
    y = relu(x, "read_twice")
    outputs = layers.Add(name="end")([conv(y, "one"), y])
    read = read_model(keras.Model(x, outputs))
    readers = {
        value.name: [call.name for call in calls] for value, calls in read.consumers().items()
    }
    assert readers == {
        "image": ["read_twice"],
        "read_twice": ["one", "end"],
        "one": ["end"],
        "end": [],
    }


def test_only_consumers_behind_the_quantizer_are_rerouted():
    """The wrapped layer's inputs stay. All readers of its result read the quantized result."""
    x = image()
    y = relu(conv(x, "layer"))
    z = layers.Add(name="add")([conv(y, "one"), conv(y, "two")])
    quantized = read_model(keras_qat.quantize_model(keras.Model(x, [z, y]), "contrib"))
    (layer,) = [call for call in quantized.calls if call.name == "quant_layer"]
    readers = {call.name for call in quantized.consumers()[layer.output]}
    assert readers == {"quant_one", "quant_two"}
    assert layer.output in flatten_values(quantized.outputs)
    assert [value.name for value in layer.inputs] == ["image"]


@pytest.mark.parametrize("between", [False, True])
def test_identities_around_batch_norm(between):
    """Before BatchNormalization, a linear activation is ignored. After it, it is quantized."""
    x = image()
    y = conv(x, "layer", use_bias=False)
    if between:
        y = identity(y, "between")
    y = identity(layers.BatchNormalization(name="bn")(y), "behind")
    assert quantized_tensors(x, y) == {
        "layer/kernel": "kernel, folded with bn",
        "behind": "act_quant",
    }


def test_activations_without_a_quantizer_are_named():
    """Files compute them in float, except activations with a fixed range."""
    x = image()
    y = layers.ELU(name="elu")(layers.Conv2D(4, 1, name="first")(x))
    y = layers.Activation("sigmoid", name="gate")(layers.Conv2D(4, 1, name="second")(y))
    model = keras.Model(x, layers.Conv2D(4, 1, name="last")(y))
    assert keras_qat.plan(model, "contrib").float_layers == {"elu": "its output is not quantized"}
