"""Tests tracing: custom layers, Lambdas and functions are computed by their operations."""

import dataclasses
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import (
    build_model,
    export_exact,
    images,
    keras,
    layers,
    quantize_on,
    save_and_load,
)
from tests.networks.closed import CLOSED, OwnNorm
from tests.networks.custom import OPENED, Block, ChannelAffine, OwnConv

pytestmark = pytest.mark.legacy

SHAPE = (8, 8, 4)


def model_of(build):
    keras.utils.set_random_seed(3)
    return with_random_weights(build_model(SHAPE, build))


def with_random_weights(model):
    numbers = np.random.default_rng(3)
    for weight in model.trainable_weights:
        weight.assign(weight + 0.2 * numbers.normal(size=weight.shape))
    return model


class Net(keras.Model):
    """A subclassed model with layers in a list, weights, and a component that is called twice."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.stem = layers.Conv2D(4, 3, padding="same", activation="relu")
        self.blocks = [Block(4), Block(4)]
        self.pool, self.head = layers.GlobalAveragePooling2D(), layers.Dense(3, name="logits")

    def build(self, input_shape):
        self.scale = self.add_weight("scale", (4,), initializer="ones")
        super().build(input_shape)

    def call(self, inputs, training=None):
        x = self.stem(inputs) * self.scale
        for block in self.blocks:
            x = block(x, training=training)
        return self.head(self.pool(self.stem(x)))


class Reversible(layers.Layer):
    """Normalizes a series, and reverts that in a second call (RevIN)."""

    def build(self, input_shape):
        if isinstance(input_shape, list):
            input_shape = input_shape[0]
        self.gain = self.add_weight("gain", input_shape[-1:], initializer="ones")
        super().build(input_shape)

    def call(self, inputs, statistics=None):
        if statistics is not None:
            mean, deviation = statistics
            return inputs / (self.gain + 1e-10) * deviation + mean
        mean, variance = tf.nn.moments(inputs, 1, keepdims=True)
        deviation = tf.sqrt(variance + 1e-5)
        return (inputs - mean) / deviation * (2.0 * self.gain), mean, deviation


def quantized(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return keras_qat.quantize_model(model, strict=True)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CLOSED)
def test_what_is_not_opened_says_why(name):
    make, reason = CLOSED[name]
    model = build_model(SHAPE, lambda x: make()(layers.Conv2D(4, 1)(x)))
    (result,) = keras_qat.plan(model).float_layers.values()
    assert "cannot be traced" in result
    said = f"(?s)compute in float.*{model.layers[-1].name}: .*{reason}"
    with pytest.warns(UserWarning, match=said):
        keras_qat.quantize_model(model)


@pytest.mark.sample(1)
@pytest.mark.parametrize("without_float", [False, True])
def test_calls_of_a_layer_share_its_weights(without_float):
    """Includes calls that cannot be traced, and calls that compute differently from a weight."""
    x = keras.Input((8, 3))
    layer = Reversible()
    normalized, *statistics = layer(x)
    model = keras.Model(x, layer(layers.Dense(3)(normalized), statistics=statistics))
    data = np.random.default_rng(0).normal(3, 2, (16, 8, 3)).astype("float32")
    recipe = dataclasses.replace(keras_qat.recipes.int8(), without_float=without_float)
    with nullcontext() if without_float else pytest.warns(UserWarning, match="it normalizes"):
        qat = keras_qat.quantize_model(model, recipe)
    assert len(qat.trainable_weights) == len(model.trainable_weights)
    np.testing.assert_allclose(qat(data), model(data), atol=0.1)


def test_what_is_traced_warns_of_nothing(caplog):
    """Keras would warn of variables in operations."""
    keras_qat.plan(model_of(lambda x: ChannelAffine()(x)))
    assert not [record for record in caplog.records if "Lambda layer" in record.getMessage()]


def test_overrides_say_what_is_opened():
    model = model_of(lambda x: OwnNorm()(OwnConv(6)(x)))
    recipe = keras_qat.recipes.int8().override("OwnConv", open=False)
    closed = keras_qat.plan(model, recipe.override("own_norm*", open=True))
    assert list(closed.float_layers) == [model.layers[1].name]
    x = keras.Input(SHAPE)
    with keras_qat.register_op(OwnNorm, "move"):
        assert not keras_qat.plan(keras.Model(x, OwnNorm()(x))).float_layers


class Compressed(layers.Layer):
    """Rounds its difference from another tensor. In training, noise replaces the rounding."""

    def call(self, inputs, training=None):
        x, y = inputs
        z = (x - y) * 4.0
        return z + tf.random.uniform(tf.shape(z), -0.5, 0.5) if training else tf.round(z)


def test_what_training_computes_otherwise_stays_in_training(tmp_path):
    def build(x):
        y = layers.Conv2D(4, 3, padding="same")(x)
        return layers.Conv2D(2, 3)(Compressed(name="code")([x, y]))

    model, x = model_of(build), images(8, SHAPE)
    qat = quantize_on(model, x, strict=True)
    contents = export_exact(qat, x)
    loaded = save_and_load(qat, tmp_path / "qat.keras")
    assert keras_qat.export_tflite(loaded) == contents
    inner = loaded.get_layer("quant_code/in_training")
    z = np.arange(256, dtype=np.float32).reshape(1, *SHAPE)
    np.testing.assert_array_equal(inner(z, given=[z, 2 * z]), z)
    noise = inner(z, given=[z, 2 * z], training=True) + 4 * z
    assert 0 < np.abs(noise).min() <= np.abs(noise).max() <= 0.5
    assert np.any(loaded(x, training=True) != loaded(x, training=True))
    plain = keras_qat.strip_quantization(qat)
    np.testing.assert_array_equal(plain(x), model(x))


@pytest.mark.slow
def test_parts_are_overridden_by_their_names():
    model = model_of(OPENED["a block of blocks"])
    name = model.layers[-1].name
    recipe = keras_qat.recipes.int8().override(f"{name}/blocks_1", quantize=False)
    floats = keras_qat.plan(model, recipe).float_layers
    assert floats
    assert all(layer.startswith(f"{name}/blocks_1") for layer in floats)
    whole = keras_qat.plan(model, keras_qat.recipes.int8().override("Stage", quantize=False))
    assert len(whole.float_layers) > len(floats)


def test_subclassed_models_are_told_their_inputs():
    with pytest.raises(ValueError, match=r"inputs=keras.Input"):
        keras_qat.plan(Net())
    assert not keras_qat.plan(Net(), inputs=keras.Input(SHAPE)).float_layers
    built = Net()
    built.build((None, *SHAPE))
    assert keras_qat.quantize_model(built).input_shape == (None, *SHAPE)


def test_subclassed_models_that_cannot_be_opened_say_which_line():
    class ByValue(keras.Model):
        def call(self, x):
            return x if tf.reduce_sum(x) > 0 else -x

    with pytest.raises(ValueError, match=r"in `return x if tf.reduce_sum\(x\) > 0"):
        keras_qat.quantize_model(ByValue(), inputs=keras.Input(SHAPE))


def test_parts_of_several_outputs_have_plain_names():
    """The name of an output used to be appended: `distance/reduce_sum_meandistance:0`."""

    class Distance(layers.Layer):
        def call(self, a, b):
            return tf.reduce_sum(tf.square(a - b), -1), tf.reduce_sum(tf.nn.silu(a + b), -1)

    ends = keras.Input((4,)), keras.Input((4,))
    plan = keras_qat.plan(keras.Model(ends, Distance(name="distance")(*ends)))
    names = [row.tensor for row in plan.rows]
    assert {"distance:0", "distance:1"} <= set(names)
    assert [name for name in names if name.count("distance") > 1] == []
    assert len(set(names)) == len(names)


class Gates(layers.Layer):
    """A layer that passes a tensor to a Lambda as an argument."""

    def __init__(self, **options):
        super().__init__(**options)
        self.gate = layers.Dense(4, activation="sigmoid")

    def call(self, x):
        return layers.Lambda(lambda y, gate: y * gate, arguments={"gate": self.gate(x)})(x)


def test_tensors_among_the_arguments_of_a_lambda():
    model, data = build_model((4,), lambda x: layers.Dense(3)(Gates()(x))), images(32, (4,))
    qat = quantized(model)
    keras_qat.calibrate(qat, data)
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), data)
    assert report.identical == 1
    assert not report.float_operations
