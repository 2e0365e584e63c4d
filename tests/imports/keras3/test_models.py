"""Tests models of Keras 3: conversion, quantization, export, and returning their weights."""

from typing import Any

import numpy as np
import pytest

import keras_qat
from keras_qat.keras2.backend import keras as keras_2
from tests.helpers import assert_all_equal, images
from tests.imports.keras3.comparison import (
    assert_converts,
    assert_equal_outputs,
    inputs_of,
    scrambled,
)

keras = pytest.importorskip("keras", minversion="3.0")
L = keras.layers


def residual() -> Any:
    """Returns operations, a shared layer, and activations that Keras 2 defines differently."""
    inputs = keras.Input((8, 8, 4), name="image")
    conv = L.Conv2D(4, 3, padding="same", use_bias=False, name="shared")
    x = conv(inputs)
    x = keras.ops.relu(L.BatchNormalization()(x))
    x = x + keras.ops.relu6(L.BatchNormalization()(conv(x)))
    x = L.Activation("hard_swish")(L.DepthwiseConv2D(3)(x))
    x = L.Conv2D(6, 1, activation="hard_sigmoid")(x)
    x = L.LeakyReLU(0.1)(x[:, ::2, 1:])
    x = L.Conv2D(6, 1, activation="leaky_relu")(x)
    x = keras.ops.mean(x, axis=[1, 2])
    return keras.Model(inputs, L.Dense(3, name="logits")(x), name="residual")


def nested() -> Any:
    """Returns nested models, one of them shared, and several inputs and outputs by name."""
    tower_input = keras.Input((6,))
    tower = keras.Model(tower_input, L.Dense(4, activation="relu")(tower_input), name="tower")
    head = keras.Sequential([keras.Input((4,)), L.Dense(3), tower_of(3)], name="head")
    inputs = {name: keras.Input((6,), name=name) for name in ("left", "right")}
    left, right = (tower(inputs[name]) for name in ("left", "right"))
    joined = L.Concatenate()([left, right])
    outputs = {"sum": head(left + right), "both": L.Dense(2, name="both")(joined)}
    return keras.Model(inputs, outputs, name="nested")


def tower_of(width: int) -> Any:
    inputs = keras.Input((width,))
    x = L.BatchNormalization()(inputs)
    return keras.Model(inputs, x * 2.0, name="norm")


def test_nested_models_are_converted():
    model = nested()
    model.get_layer("tower").trainable = False
    converted = assert_converts(model)
    assert {layer.name for layer in converted.layers if layer.weights} == {"tower", "head", "both"}
    assert set(converted.output_names) >= {"head", "both"}
    assert not converted.get_layer("tower").trainable
    assert len(converted.trainable_weights) == len(model.trainable_weights)
    assert isinstance(converted.get_layer("head"), keras_2.Sequential)
    reloaded = keras_2.Model.from_config(converted.get_config())
    reloaded.set_weights(converted.get_weights())
    assert_equal_outputs(model, reloaded, inputs_of(model))


def test_a_model_for_each_step():
    inputs = keras.Input((3, 6))
    inner = keras.Sequential([keras.Input((6,)), L.Dense(4), L.BatchNormalization(), L.Dense(2)])
    assert_converts(keras.Model(inputs, L.TimeDistributed(inner)(inputs)))


def test_part_of_a_model():
    model = residual()
    cut = keras.Model(model.layers[2].output, model.output)
    assert_converts(cut)


def test_phases_are_those_of_the_model():
    """Keras 3 stores the phase in each call when the model is built."""
    inputs = keras.Input((8,))
    converted = keras_qat.from_keras_3(keras.Model(inputs, L.Dropout(0.5)(inputs)))
    x = np.ones((4, 8), np.float32)
    assert np.any(np.asarray(converted(x, training=True)) == 0)
    np.testing.assert_array_equal(converted(x, training=False), x)


def test_quantized_trained_exported_and_brought_back(tmp_path):
    model, x = scrambled(residual()), images(16)
    before = model.get_weights()
    with pytest.warns(UserWarning, match=r"'residual' is a model of Keras 3.*to_keras_3"):
        qat = keras_qat.quantize_model(model, strict=True)
    qat.compile(keras_2.optimizers.SGD(0.1), "mse", run_eagerly=True)  # Tracing takes longer.
    qat.train_on_batch(x, np.zeros((len(x), 3), np.float32))
    contents = keras_qat.export_tflite(qat)
    (output,) = keras_qat.verify(qat, contents, x).outputs
    assert output.name == "logits" and output.identical == 1.0
    assert_all_equal(model.get_weights(), before)
    qat.save(tmp_path / "qat.keras")
    reloaded = keras_2.models.load_model(tmp_path / "qat.keras")
    assert keras_qat.to_keras_3(reloaded, model) is model
    assert_equal_outputs(model, keras_qat.strip_quantization(qat), x)
    assert any(np.any(a != b) for a, b in zip(model.get_weights(), before, strict=True))


def test_plan():
    with pytest.warns(UserWarning, match="is a model of Keras 3"):
        plan = keras_qat.plan(residual())
    assert not plan.float_layers


class Scale(L.Layer):
    def build(self, input_shape):
        self.scale = self.add_weight(shape=(input_shape[-1],), name="scale")

    def call(self, inputs):
        return inputs * self.scale


class Scale2(keras_2.layers.Layer):
    def build(self, input_shape):
        self.scale = self.add_weight("scale", (input_shape[-1],))

    def call(self, inputs):
        return inputs * self.scale


def test_custom_layers():
    inputs = keras.Input((4,))
    x = L.RMSNormalization(name="rms")(Scale(name="mine")(inputs))
    model = keras.Model(inputs, x)
    with pytest.raises(ValueError, match=r"mine: Scale\n  rms: RMSNormalization\n.*custom_objects"):
        keras_qat.quantize_model(model)
    model = scrambled(keras.Model(inputs, Scale(name="mine")(inputs)))
    converted = keras_qat.from_keras_3(model, custom_objects={"Scale": Scale2})
    assert_equal_outputs(model, converted, inputs_of(model))


@pytest.mark.parametrize(
    ("layer", "option"),
    [
        (lambda: L.MultiHeadAttention(2, 3, use_gate=True), "use_gate=True"),
        (lambda: L.Dense(3, activation="sparsemax"), "'sparsemax'"),
        (lambda: L.Resizing(3, 3, antialias=True), "antialias=True"),
    ],
    ids=["gate", "activation", "antialias"],
)
def test_options_that_keras_2_lacks_are_refused(layer, option):
    inputs, made = keras.Input((4, 4, 3)), layer()
    twice = isinstance(made, L.MultiHeadAttention)
    model = keras.Model(inputs, made(inputs, inputs) if twice else made(inputs))
    with pytest.raises(ValueError, match=f"{made.name}.*{option}.*custom_objects"):
        keras_qat.from_keras_3(model)


def test_what_keras_3_quantized_is_refused():
    model = keras.Sequential([keras.Input((4,)), L.Dense(4, name="dense")])
    model.quantize("int8")
    with pytest.raises(ValueError, match=r"'dense' .*quantized already, by the policy"):
        keras_qat.from_keras_3(model)


def test_what_is_no_graph_of_keras_3_is_refused():
    class Own(keras.Model):
        def call(self, inputs):
            return inputs

    with pytest.raises(ValueError, match=r"'own' is a subclassed model of Keras 3.*functional"):
        keras_qat.quantize_model(Own(name="own"))
    with pytest.raises(ValueError, match="'unbuilt' has no input shape yet"):
        keras_qat.quantize_model(keras.Sequential([L.Dense(2)], name="unbuilt"))
    with pytest.raises(ValueError, match="Expected a model of Keras 3, got Dense"):
        keras_qat.quantize_model(L.Dense(2))
    with pytest.raises(ValueError, match="Expected a model of Keras 3, got Functional"):
        keras_qat.from_keras_3(keras_qat.from_keras_3(residual()))


def test_weights_of_another_model_are_refused():
    with pytest.raises(ValueError, match=r"Functional belongs to Keras 3.*from_keras_3"):
        keras_qat.to_keras_3(nested(), nested())
    with pytest.raises(ValueError, match="'residual' lacks the layer 'tower' of 'nested'"):
        keras_qat.to_keras_3(keras_qat.from_keras_3(residual()), nested())
    inputs = keras.Input((4,))
    models = [keras.Model(inputs, L.Dense(size, name="dense")(inputs)) for size in (2, 3)]
    with pytest.raises(ValueError, match="weights of layer 'dense' have the shapes"):
        keras_qat.to_keras_3(keras_qat.from_keras_3(models[0]), models[1])


def test_loading_a_quantized_model_with_keras_3_says_how_to_load_it(tmp_path):
    qat = keras_qat.quantize_model(
        keras_2.Sequential([keras_2.Input((4,)), keras_2.layers.Dense(2)])
    )
    qat.save(tmp_path / "qat.keras")
    with pytest.raises(ValueError, match=r"keras_qat.keras.models.load_model\(path\)") as error:
        keras.models.load_model(tmp_path / "qat.keras")
    assert len(str(error.value)) < 200
    assert keras_qat.keras.models.load_model(tmp_path / "qat.keras").name == qat.name
