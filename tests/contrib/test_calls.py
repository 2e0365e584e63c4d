"""Tests `quantize_model` with `recipes.contrib`, like the original's tests of its functions."""

import numpy as np
import pytest

import keras_qat
from keras_qat.layers import Quantize, QuantizeWrapper
from keras_qat.training.schedule import list_scheduled_layers
from tests.helpers import assert_all_equal, images, keras, train, values
from tests.networks.contrib import conv, image, layers, relu, two_scopes
from tests.networks.small import residual_net, tiny_net

contrib = keras_qat.recipes.contrib


def quantized_in(model: keras.Model, scope: str | None = None) -> set[str]:
    rows = keras_qat.plan(model, "contrib", scope=scope).rows
    return {row.tensor for row in rows if row.spec}


def test_variables_are_added_and_the_float_model_is_not_changed():
    model = residual_net()
    before = values(model.weights)
    quantized = keras_qat.quantize_model(model, "contrib")
    assert len(quantized.weights) > len(model.weights)
    assert not any(isinstance(layer, (Quantize, QuantizeWrapper)) for layer in model.layers)
    assert_all_equal(before, model.weights)


def test_quant_delay_is_in_every_layer():
    quantized = keras_qat.quantize_model(residual_net(), contrib(quant_delay=100))
    assert {int(layer.quantize_from) for layer in list_scheduled_layers(quantized)} == {100}


def test_a_model_with_an_optimizer_is_no_error():
    """The original refused graphs with training operations. A Keras model does not contain any."""
    model = train(tiny_net(), images(shape=(6, 6, 2)), steps=2)
    quantized = keras_qat.quantize_model(model, "contrib")
    assert getattr(quantized, "optimizer", None) is None
    train(quantized, images(shape=(6, 6, 2)), steps=2)
    assert model.optimizer is not None


def test_twice_is_the_same_as_once():
    recipe = contrib(4, 4, quant_delay=7, freeze_bn_delay=9)
    once = keras_qat.quantize_model(residual_net(), recipe)
    once(images(4, (8, 8, 1)), training=True)
    twice = keras_qat.quantize_model(once, recipe)
    assert twice.get_config() == once.get_config()
    assert [quantizer.name for quantizer in keras_qat.quantizers(twice)] == [
        quantizer.name for quantizer in keras_qat.quantizers(once)
    ]
    for one, other in zip(once.weights, twice.weights, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=one.name)
    x = images(4, (8, 8, 1), 3)
    np.testing.assert_array_equal(once(x), twice(x))


def test_scope():
    """Layers, activations and standalone merges in the scope are quantized, and no others."""
    model = two_scopes()
    inside = {"scope1/layer/kernel", "scope1/relu", "scope1/multiply"}
    assert quantized_in(model, "scope1") == inside
    assert quantized_in(model, "scope2") == {name.replace("1", "2") for name in inside}
    assert quantized_in(model) == inside | quantized_in(model, "scope2")
    quantized = keras_qat.quantize_model(model, "contrib", scope="scope1")
    result = {
        tensor for quantizer in keras_qat.quantizers(quantized) for tensor in quantizer.quantizes
    }
    assert result == inside


@pytest.mark.parametrize("scope", ["scope", "scope1/lay", "NonExisting/", "multiply"])
def test_scope_that_matches_nothing_is_an_error(scope):
    """This is a deliberate difference: the original ignored such a scope without an error."""
    for function in (keras_qat.plan, keras_qat.quantize_model):
        with pytest.raises(ValueError, match=r"matches no layer.*scope1/layer"):
            function(two_scopes(), "contrib", scope=scope)


def test_scope_with_a_trailing_slash_is_the_same():
    assert quantized_in(two_scopes(), "scope1/") == quantized_in(two_scopes(), "scope1")


def test_bypass_across_the_edge_of_a_scope():
    """`conv_quant` needs its readers in the scope, `post_activation_bypass_quant` only the Add."""
    x = image()
    first = conv(x, "inside_layer")
    y = relu(layers.Add(name="outside_add")([first, x]), "outside_relu")
    assert quantized_in(keras.Model(x, y), "inside") == {"inside_layer/kernel"}

    first = relu(conv(x, "inside_layer"), "inside_relu")
    y = conv(layers.Add(name="inside_add")([first, x]), "outside_layer")
    assert quantized_in(keras.Model(x, y), "inside") == {
        "inside_layer/kernel",
        "inside_relu",
        "inside_add",
    }


def test_post_activation_bypass_trains_and_infers():
    """BatchNormalization updates its statistics when it is called, as in Keras."""
    inputs = image()
    x = layers.BatchNormalization(name="bn")(conv(inputs, "layer", use_bias=False))
    x = layers.Add(name="add")([relu(x), inputs])
    quantized = keras_qat.quantize_model(keras.Model(inputs, conv(x, "last")), "contrib")
    before = {
        quantizer.quantizes[0]: quantizer.maximum for quantizer in keras_qat.quantizers(quantized)
    }
    quantized.compile("sgd", "mse")
    x = images(16, (6, 6, 4))
    quantized.fit(x, np.zeros((16, 6, 6, 4)), 8, verbose=0)
    after = {
        quantizer.quantizes[0]: quantizer.maximum for quantizer in keras_qat.quantizers(quantized)
    }
    assert {name for name in after if before[name] != after[name]} == {
        "layer/kernel",
        "relu",
        "add",
        "last/kernel",
        "last",
    }
    assert np.isfinite(quantized.predict(x, verbose=0)).all()


def test_inference_before_the_delay_is_float():
    """Like `experimental_create_eval_graph(quant_delay=n)`, but inference is not counted."""
    model = tiny_net()
    quantized = keras_qat.quantize_model(model, contrib(2, 2, quant_delay=3))
    x = images(4, (6, 6, 2))
    for _ in range(5):
        np.testing.assert_allclose(quantized(x), model(x), atol=1e-5)
    train(quantized, x, steps=3)
    assert len(np.unique(quantized(x))) <= 4
