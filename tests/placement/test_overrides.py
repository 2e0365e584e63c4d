"""Tests overrides for some layers by name, pattern and type; strict mode; saved recipes."""

import json
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.recipes import Recipe
from keras_qat.tflite.interpreter import FileInterpreter
from tests.helpers import images, keras, observe, save_and_load, scramble
from tests.networks.small import functional, layers


def two_heads() -> Any:
    def build(x: Any) -> list[Any]:
        x = layers.Conv2D(4, 3, activation="relu", name="stem")(x)
        x = layers.Flatten(name="flatten")(x)
        return [layers.Dense(3, name="head_a")(x), layers.Dense(2, name="head_b")(x)]

    return functional((5, 5, 2), build=build)


def bits(model: Any) -> dict[str, int]:
    quantizer = keras_qat.quantizers(model)
    return {item.quantizes[0]: item.spec.bits for item in quantizer if "/kernel" in item.name}


def test_later_overrides_win_by_name_pattern_and_type():
    recipe = keras_qat.recipes.int8().override("Dense", weight_bits=4)
    recipe = recipe.override("head_*", weight_bits=5).override("head_b", weight_bits=6)
    assert bits(keras_qat.quantize_model(two_heads(), recipe)) == {
        "stem/kernel": 8,
        "head_a/kernel": 5,
        "head_b/kernel": 6,
    }


def test_a_skipped_layer_is_in_float_until_an_override_takes_it_back():
    recipe = keras_qat.recipes.int8().override("head*", quantize=False)
    plan = keras_qat.plan(two_heads(), recipe)
    assert plan.float_layers == dict.fromkeys(("head_a", "head_b"), "left in float by the recipe")
    recipe = recipe.override("head_b", quantize=True)
    assert list(keras_qat.plan(two_heads(), recipe).float_layers) == ["head_a"]


SKIPPED: dict[str, Any] = {
    "sigmoid": layers.Activation("sigmoid"),
    "softmax": layers.Softmax(),
    "gelu": layers.Activation("gelu"),
    "leaky_relu": layers.LeakyReLU(),
    "swish": layers.Activation("swish"),
    "add": lambda x: layers.Add()([x, layers.Activation("tanh")(x)]),
    "multiply": lambda x: 1.7 * x,
    "relu_behind_add": lambda x: layers.ReLU()(layers.Add()([x, layers.Activation("tanh")(x)])),
    "maximum": lambda x: layers.Maximum()([x, layers.Activation("tanh")(x)]),
    "concatenate": lambda x: layers.Concatenate()([x, layers.Activation("tanh")(x)]),
    "average_pooling": layers.AveragePooling2D(),
    "mean": layers.GlobalAveragePooling2D(keepdims=True),
    "resize": layers.UpSampling2D(interpolation="bilinear"),
    "move": layers.MaxPooling2D(),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["int8", "int16x8"])
@pytest.mark.parametrize("name", SKIPPED)
def test_what_is_skipped_is_in_float_in_the_file(name, recipe, tmp_path):
    """In training, too. The converter would quantize it with its own ranges."""

    def build(x: Any) -> Any:
        x = layers.Conv2D(4, 1, name="first")(x)
        return layers.Conv2D(4, 1, name="last")(SKIPPED[name](x))

    keras.backend.clear_session()
    model = scramble(functional((6, 6, 3), build=build))
    names = [layer.name for layer in model.layers[2:-1]]
    recipe = keras_qat.recipes.get(recipe)
    for item in names:
        recipe = recipe.override(item, quantize=False)
    assert keras_qat.plan(model, recipe).float_layers
    x = images(64, (6, 6, 3))
    qat = observe(keras_qat.quantize_model(model, recipe), x)
    file = keras_qat.export_tflite(qat)
    for model in (qat, save_and_load(qat, tmp_path / "model.keras")):
        report = keras_qat.verify(model, file, x)
        assert report.max_difference <= 1
        assert report.identical >= (0.9995 if recipe.name == "int8" else 0.998)
    assert keras_qat.export_tflite(model) == file
    operations = FileInterpreter(file).operations()
    computed = {kernel for kernel, _, types in operations if np.float32 in types}
    assert computed - {"DEQUANTIZE"}, operations


def test_recipes_are_json_and_saved_with_the_model(tmp_path):
    recipe = keras_qat.recipes.int8(weight_bits=6).override("head_a", activation_bits=4)
    assert Recipe.from_config(json.loads(json.dumps(recipe.to_config()))) == recipe
    qat = keras_qat.quantize_model(two_heads(), recipe)
    qat.save(tmp_path / "qat.keras")
    assert keras.models.load_model(tmp_path / "qat.keras").recipe == recipe


def test_strict_lists_everything_that_is_not_quantized():
    def curve(x: Any) -> Any:
        return tf.math.xlogy(x, 3.0)

    def build(x: Any) -> Any:
        x = layers.Lambda(curve, name="curve")(x)
        x = layers.RNN(layers.GRUCell(3), name="gru")(x)
        return layers.Activation(curve, name="bent")(layers.Dense(2)(x))

    with pytest.raises(ValueError, match="3 layers") as raised:
        keras_qat.quantize_model(functional((40, 3), build=build), strict=True)
    for name in ("curve", "gru", "bent"):
        assert name in str(raised.value)


class Doubled(layers.Layer):
    """A custom layer that is not registered with Keras."""

    def call(self, inputs: Any) -> Any:
        return 2.0 * inputs


def test_an_unregistered_custom_layer_loads_with_custom_objects(tmp_path):
    def build(x: Any) -> Any:
        doubled = Doubled(name="doubled")(layers.Conv2D(3, 3)(x))
        return layers.TimeDistributed(Doubled())(doubled)

    x = images(8, (6, 6, 2))
    recipe = keras_qat.recipes.int8().override("TimeDistributed", open=False)
    qat = observe(keras_qat.quantize_model(functional((6, 6, 2), build=build), recipe), x)
    qat.save(tmp_path / "qat.keras")
    with pytest.raises((TypeError, ValueError), match="Doubled"):
        keras.models.load_model(tmp_path / "qat.keras")
    loaded = keras.models.load_model(tmp_path / "qat.keras", custom_objects={"Doubled": Doubled})
    np.testing.assert_array_equal(loaded(x), qat(x))


def test_a_frozen_backbone_stays_frozen():
    inner = keras.Input((6, 6, 2))
    features = layers.Conv2D(3, 3, name="features")(inner)
    features = layers.BatchNormalization(name="norm")(features)
    backbone = keras.Model(inner, features, name="backbone")
    backbone.trainable = False
    x = keras.Input((6, 6, 2))
    head = layers.Dense(2, name="head")(layers.Flatten()(backbone(x, training=False)))
    qat = keras_qat.quantize_model(keras.Model(x, head))
    assert {weight.name.split("/")[-2] for weight in qat.trainable_weights} == {"head"}
    qat.compile("sgd", "mse")
    qat.fit(images(8, (6, 6, 2)), np.zeros((8, 2)), verbose=0)
    norm = next(layer for layer in qat._flatten_layers() if layer.name == "norm")
    np.testing.assert_array_equal(norm.moving_mean, np.zeros(3))


def test_regularizers_and_added_losses_are_kept():
    @keras.utils.register_keras_serializable("tests")
    class Penalty(layers.Layer):
        def call(self, inputs: Any) -> Any:
            self.add_loss(0.5 * tf.reduce_mean(inputs**2))
            return inputs

    def build(x: Any) -> Any:
        x = layers.SeparableConv2D(3, 3, pointwise_regularizer="l2", depthwise_regularizer="l1")(x)
        x = layers.LSTM(3, kernel_regularizer="l2")(layers.Reshape((-1, 3))(Penalty()(x)))
        return layers.Dense(2, kernel_regularizer="l2")(x)

    model = functional((5, 5, 2), build=build)
    qat = keras_qat.quantize_model(model)
    keras_qat.set_quantization(qat, False)
    x = images(4, (5, 5, 2))
    model(x), qat(x, training=False)
    assert len(qat.losses) == len(model.losses) == 5
    np.testing.assert_allclose(
        sorted(map(float, qat.losses)), sorted(map(float, model.losses)), rtol=1e-5
    )


def test_branches_that_compute_the_same_are_one():
    def build(x: Any) -> list[Any]:
        joined = layers.Concatenate()([x, layers.ReLU(name="first")(x)])
        return [joined, layers.ReLU(name="second")(x)]

    model = functional((4,), build=build)
    plan = keras_qat.plan(model)
    assert "second" not in [row.tensor for row in plan.rows]
    x = images(16, (4,))
    np.testing.assert_allclose(keras_qat.quantize_model(model)(x)[1], model(x)[1])


def test_the_same_settings_with_other_weights_are_not_one():
    def build(x: Any) -> Any:
        return layers.Subtract()([layers.Conv2D(3, 1, **first)(x), layers.Conv2D(3, 1, **first)(x)])

    first = {"data_format": "channels_first"}
    qat = keras_qat.quantize_model(functional((2, 5, 5), build=build))
    keras_qat.set_quantization(qat, False)
    x = images(4, (2, 5, 5))
    assert np.abs(qat(x)).max() > 0.1
    assert len(qat.trainable_weights) == 4
