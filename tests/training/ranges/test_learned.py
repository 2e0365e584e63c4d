"""Tests trained ranges: gradients as in the papers, and files like with other ranges."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat import recipes
from keras_qat.training.fake_quantization.learned import (
    fake_quantize_learned,
    fake_quantize_weights_learned,
)
from tests.helpers import export_exact, images, rng, save_and_load, scramble, train
from tests.networks.small import functional, layers, residual_net

pytestmark = pytest.mark.legacy
X = images(32, (8, 8, 1))


def ends_by_hand(x, upstream, low, high, bits, rounding):
    """Computes equation 3 of the paper for a range with two ends, times the gradient's scale."""
    levels = 2**bits - 1
    step = (high - low) / levels
    inside = (x >= low) & (x <= high)
    steps = x / step
    share = np.sum(upstream * np.where(inside, (np.round(steps) - steps) / levels, 0)) * rounding
    gain = levels**2 / np.sqrt(x[0].size * levels)
    return gain * (np.sum(upstream[x < low]) - share), gain * (np.sum(upstream[x > high]) + share)


@pytest.mark.parametrize("rounding", [True, False])
@pytest.mark.parametrize(("low", "bits"), [(0.0, 4), (-1.5, 3)])
def test_gradients_of_activations(low, bits, rounding):
    numbers, high = rng(), 2.0 if low == 0 else 2.0 * 1.5
    low = low if low == 0 else -high * 3 / 4  # Zero is a level.
    x = tf.constant(numbers.normal(size=(6, 5), scale=2), tf.float32)
    upstream = tf.constant(numbers.normal(size=(6, 5)), tf.float32)
    minimum, maximum = tf.constant(low), tf.constant(high)
    for applies in (True, tf.constant(True)):
        with tf.GradientTape() as tape:
            tape.watch([x, minimum, maximum])
            y = fake_quantize_learned(
                applies, x, minimum, maximum, bits, rounding=rounding, fixed=False
            )
        gradients = tape.gradient(y, [x, minimum, maximum], upstream)
        inside = (x.numpy() >= low) & (x.numpy() <= high)
        np.testing.assert_array_equal(gradients[0], upstream * inside)
        expected = ends_by_hand(x.numpy(), upstream.numpy(), low, high, bits, rounding)
        np.testing.assert_allclose(gradients[1:], expected, rtol=1e-4)
    with tf.GradientTape() as tape:
        tape.watch([x, minimum, maximum])
        y = fake_quantize_learned(
            tf.constant(False), x, minimum, maximum, bits, rounding=rounding, fixed=False
        )
    gradients = tape.gradient(y, [x, minimum, maximum], upstream)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(gradients[0], upstream)
    assert [float(item) for item in gradients[1:]] == [0, 0]


def test_gradients_of_weights():
    numbers = rng()
    weights = numbers.normal(size=(3, 4, 5)).astype(np.float32)
    upstream = numbers.normal(size=weights.shape).astype(np.float32)
    limits = numbers.uniform(0.5, 2, (1, 1, 5)).astype(np.float32)
    given = tf.constant(weights), tf.constant(limits)
    with tf.GradientTape() as tape:
        tape.watch(given)
        y = fake_quantize_weights_learned(True, *given, 3)
    gradients = tape.gradient(y, given, tf.constant(upstream))
    inside = np.abs(weights) <= limits
    steps = weights / (limits / 3)
    pull = np.where(inside, (np.round(steps) - steps) / 3, np.sign(weights))
    expected = np.sum(upstream * pull, (0, 1), keepdims=True) * 9 / np.sqrt(12 * 3)
    np.testing.assert_array_equal(gradients[0], upstream * inside)
    np.testing.assert_allclose(gradients[1], expected, rtol=1e-4)
    np.testing.assert_allclose(y, np.clip(np.round(steps), -3, 3) * limits / 3, rtol=1e-5)


def learned(recipe=None, model=None, x=X):
    qat = keras_qat.quantize_model(model or scramble(residual_net()), recipe or recipes.low_bits())
    keras_qat.calibrate(qat, x, method="mse")
    return qat


def ends(qat):
    return [np.ravel(item) for q in keras_qat.quantizers(qat) for item in (q.minimum, q.maximum)]


@pytest.mark.parametrize(
    "recipe",
    [
        recipes.low_bits(4, 4),
        pytest.param(recipes.low_bits(4, 4, ranges="learned_clipping"), marks=pytest.mark.slow),
        pytest.param(
            recipes.int8(4, 4, ranges="learned", per_channel=False), marks=pytest.mark.slow
        ),
    ],
    ids=["learned", "learned clipping", "learned, weights per tensor"],
)
def test_trained_ranges_are_those_of_the_file(recipe, tmp_path):
    qat = learned(recipe)
    before = ends(qat)
    train(qat, X, rate=0.001)
    changed = [np.any(one != other) for one, other in zip(ends(qat), before, strict=True)]
    assert sum(changed) >= len(changed) / 2
    export_exact(qat, X)
    again = save_and_load(qat, tmp_path / "qat.keras")
    np.testing.assert_array_equal(again.predict(X, verbose=0), qat.predict(X, verbose=0))


def test_weights_start_with_the_least_error():
    """Weights outside of learned limits are clipped, in training and in the file."""
    model = functional((6,), build=layers.Dense(3, name="y"))
    qat = learned(recipes.int8(4, ranges="learned"), model, images(16, (6,)))
    (result,) = (
        quantizer for quantizer in keras_qat.quantizers(qat) if quantizer.name.endswith("kernel")
    )
    kernel = model.get_layer("y").kernel.numpy()
    assert result.maximum.shape == (3,)
    assert np.all(result.maximum <= np.abs(kernel).max(0) + 1e-6)
    wrapper = qat.get_layer("quant_y")
    wrapper.weight_quantizers["kernel"].set_limits(0.5 * result.maximum[None])
    resolved = keras_qat.resolve(qat)
    weights = resolved.nodes[-1].weights
    assert (
        np.abs(
            np.clip(kernel, -0.5 * result.maximum, 0.5 * result.maximum) - weights.q * weights.scale
        ).max()
        < 0.5 * result.maximum.max() / 13
    )
    x = images(16, (6,))
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), x).identical == 1


def test_zeros_alone_have_a_range():
    """Zeros once had no range, as if there had been no data. Random models revealed it."""
    model = functional((6,), build=lambda x: layers.Subtract(name="y")([x, x]))
    qat = learned(model=model, x=images(8, (6,)))
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), images(8, (6,))).identical == 1


def test_they_start_from_data():
    qat = keras_qat.quantize_model(residual_net(), recipes.low_bits())
    with pytest.raises(ValueError, match=r"learned ranges? without an initial value\. Call"):
        train(qat, X)
    with pytest.raises(ValueError, match="seen no data yet"):
        keras_qat.export_tflite(qat)
    with pytest.raises(ValueError, match="ranges='best': use one of 'moving_average'"):
        recipes.int8(ranges="best")


def test_first_and_last_layers():
    def build(x, y):
        x = layers.Rescaling(2.0)(x)
        x = layers.Conv2D(3, 3, name="first")(x)
        x = layers.BatchNormalization()(layers.DepthwiseConv2D(3, name="inner")(x))
        x = layers.Dense(4, name="also_inner")(layers.Flatten()(x))
        x = layers.Concatenate()([x, layers.Dense(2, name="other_first")(y)])
        x = layers.Dense(5, activation="relu", name="hidden")(x)
        return [layers.Dense(2, name="last")(x), layers.Softmax()(layers.Dense(2, name="end")(x))]

    model = functional((8, 8, 1), (3,), build=build)
    recipe = recipes.low_bits(3, 4).override("end", weight_bits=6)
    result = {
        row.tensor.split("/")[0]: row.spec.bits
        for row in keras_qat.plan(model, recipe).rows
        if row.role == "weight" and row.tensor.endswith("kernel")
    }
    assert result == {
        "first": 8, "inner": 3, "also_inner": 3, "other_first": 8, "hidden": 3, "last": 8, "end": 6
    }  # fmt: skip
    assert recipes.Recipe.from_config(recipe.to_config()) == recipe
    with pytest.raises(ValueError, match="bits=1"):
        recipes.low_bits(end_bits=1)


def test_few_bits_are_for_what_is_multiplied():
    def build(x):
        x = layers.Conv2D(4, 3, activation="relu", name="first")(x)
        y = layers.Conv2D(4, 3, padding="same", activation="relu", name="branch")(x)
        y = layers.Conv2D(4, 3, padding="same", name="linear")(y)
        x = layers.ReLU(name="sum")(layers.Add()([x, y]))
        x = layers.MaxPooling2D(name="pool")(x)
        x = layers.Conv2D(4, 1, activation="relu", name="head")(x)
        return layers.Dense(3, name="last")(layers.GlobalAveragePooling2D(name="mean")(x))

    model = functional((8, 8, 1), build=build)
    planned = keras_qat.plan(model, recipes.low_bits(2, 3))
    result = {spec.observed[0].name: spec.spec.bits for spec in planned.ranges}
    few = dict.fromkeys(["first", "branch", "sum"], 3)
    wide = dict.fromkeys([model.input.name, "linear", "head", "mean", "last"], 8)
    assert result == wide | few
    everywhere = keras_qat.plan(model, recipes.low_bits(2, 3, end_bits=None))
    assert {spec.spec.bits for spec in everywhere.ranges} == {3}
