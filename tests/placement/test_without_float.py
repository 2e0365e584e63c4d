"""Tests float layers in plans, and targets and `strict=True` without float."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.comparison import assert_kept
from tests.helpers import images, keras, layers, observe, quantize_on, save_and_load
from tests.networks.small import functional


def normalized(*more):
    x = inputs = keras.Input((6, 4))
    for layer in (layers.Dense(4, name="dense"), layers.LayerNormalization(name="norm"), *more):
        x = layer(x)
    return keras.Model(inputs, x)


def untouched(x):
    return tf.math.xlogy(x, 3.0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{"target": "ethos_u55"}, {"strict": True}])
def test_norms_are_in_integers(options, tmp_path):
    model, data = normalized(), images(16, (6, 4))
    assert list(keras_qat.plan(model).float_layers) == ["norm"]
    qat = observe(keras_qat.quantize_model(model, **options), data)
    contents = keras_qat.export_tflite(qat)
    report = keras_qat.verify(qat, contents, data[:1])
    assert report.identical == 1
    assert not report.float_operations
    again = save_and_load(qat, tmp_path / "qat.keras")
    assert keras_qat.export_tflite(again) == contents
    keras_qat.quantize_model(again, **options)  # A copy, which is quantized with the same recipe.


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "norm",
    [
        layers.LayerNormalization(1),
        layers.LayerNormalization([1, 3]),
        layers.GroupNormalization(2, axis=1),
    ],
)
def test_norms_along_other_axes_are_turned(norm):
    inputs, data = keras.Input((4, 5, 6)), images(16, (4, 5, 6))
    model = keras.Model(inputs, norm(inputs))
    norm.set_weights([1.0 + images(*weight.shape[:1], weight.shape[1:]) for weight in norm.weights])
    qat = observe(keras_qat.quantize_model(model, target="ethos_u55"), data)
    assert abs(qat(data) - model(data)).numpy().mean() < 0.03
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), data[:1])
    assert report.identical == 1
    assert not report.float_operations


@pytest.mark.slow
def test_norms_along_other_axes_are_turned_where_an_override_asks(tmp_path):
    inputs, data = keras.Input((4, 5)), images(16, (4, 5))
    asked = layers.LayerNormalization(1, name="asked")(inputs)
    model = keras.Model(inputs, [asked, layers.LayerNormalization(1, name="other")(inputs)])
    recipe = keras_qat.recipes.int8().override("asked", quantize=True)
    assert keras_qat.plan(model, recipe).float_layers.keys() == {"other"}
    qat = observe(keras_qat.quantize_model(keras.Model(inputs, asked), recipe), data)
    assert abs(qat(data) - model(data)[0]).numpy().mean() < 0.03
    assert_kept(qat, data, tmp_path)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("axes", [(1, 1), (2, 1)])
def test_cosines_along_any_axes(axes):
    inputs, data = [keras.Input((6, 6)) for _ in range(2)], [images(32, (6, 6), n) for n in (1, 2)]
    model = keras.Model(inputs, layers.Dot(axes, normalize=True)(inputs))
    qat = quantize_on(model, data, strict=True)
    np.testing.assert_allclose(qat(data), model(data), atol=0.05)
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), data).identical == 1


class Branch(layers.Layer):
    """A layer that cannot be traced."""

    def call(self, x):
        return tf.cond(tf.reduce_mean(x) > 0.0, lambda: x, lambda: -x)


@pytest.mark.parametrize(
    "other",
    [layers.Lambda(untouched, name="last"), Branch(name="last")],
    ids=["operation", "layer"],
)
def test_a_float_layer_keeps_to_itself(other):
    model = normalized(other)
    assert list(keras_qat.plan(model, target="ethos_u55").float_layers) == ["last"]
    assert list(keras_qat.plan(model).float_layers) == ["norm", "last"]
    with pytest.raises(ValueError, match=r"1 layer of .* in float:\n  last: no int8 rule"):
        keras_qat.quantize_model(model, strict=True)


def test_a_custom_norm_is_in_integers_beside_a_float_layer():
    class Norm(layers.Layer):
        def call(self, x):
            return x * tf.math.rsqrt(tf.reduce_mean(x * x, -1, keepdims=True) + 1e-3)

    model = normalized(Norm(name="own"), Branch(name="last"))
    assert list(keras_qat.plan(model, target="ethos_u55").float_layers) == ["last"]


def test_targets_with_float_have_norms_in_float():
    assert len(keras_qat.plan(normalized(), target="tflm").float_layers) == 1


class Unknown(layers.Layer):
    """A layer without an operator."""

    def call(self, inputs):
        return tf.math.xlogy(inputs, 3.0)


def with_unknown_layers():
    def build(x):
        x = layers.Conv2D(4, 3, name="conv")(x)
        x = Unknown(name="wave")(x)
        x = layers.Flatten(name="flatten")(x)
        x = layers.Dense(4, name="dense")(x)
        return Unknown(name="last")(x)

    return functional((6, 6, 2), build=build)


@pytest.mark.legacy
def test_unknown_layer_passes_through_and_is_reported():
    model = with_unknown_layers()
    plan = keras_qat.plan(model)
    assert list(plan.float_layers) == ["wave", "last"]
    assert "tf.math.xlogy" in plan.float_layers["wave"]
    assert "2 layers stay in float: wave, last" in str(plan)
    qat = keras_qat.quantize_model(model)
    x = images(32, (6, 6, 2))
    keras_qat.set_quantization(qat, False)
    np.testing.assert_allclose(
        qat.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-4, atol=1e-6
    )
