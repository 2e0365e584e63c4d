"""ConvLSTM in integers, unrolled: files, predictions and simulation, and what trains."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import keras_qat
from keras_qat.keras2.backend import keras
from keras_qat.ops.recurrent.unrolled import MOST_STEPS
from tests.end_to_end.exact import (
    assert_exact_everywhere,
    assert_is_float_without_quantization,
    assert_trains_and_is_kept,
)
from tests.helpers import images, observe, scramble, train
from tests.networks.small import functional

layers = keras.layers


def tiny(x: Any) -> Any:
    return layers.ConvLSTM2D(2, 3, name="conv_lstm")(x)


def of_images(x: Any) -> Any:
    """Each way of convolving, both directions, with what a layer may have."""
    again = functools.partial(layers.ConvLSTM2D, return_sequences=True)
    x = again(3, 3, padding="same", strides=2, go_backwards=True, dropout=0.2)(x)
    both = layers.Bidirectional(again(2, (3, 2), recurrent_activation="sigmoid", use_bias=False))
    last = layers.ConvLSTM2D(3, 2, dilation_rate=2, padding="same", recurrent_dropout=0.2)(both(x))
    return layers.Dense(3)(layers.Flatten()(last))


def of_sequences(x: Any) -> Any:
    x = layers.ConvLSTM1D(3, 3, padding="same", return_sequences=True)(x)
    x = layers.ConvLSTM1D(3, 2, dilation_rate=2, recurrent_activation="sigmoid")(x)
    return layers.Dense(3)(layers.Flatten()(x))


def of_steps(x: Any) -> Any:
    return layers.TimeDistributed(layers.ConvLSTM2D(2, 3, return_sequences=True))(x)


def of_relu(x: Any) -> Any:
    """With other activations, which take convolutions step by step."""
    again = functools.partial(layers.ConvLSTM2D, activation="relu", return_sequences=True)
    x = again(3, 3, padding="same", strides=2, kernel_regularizer="l2", go_backwards=True)(x)
    last = layers.ConvLSTM2D(3, 2, dilation_rate=2, activation="tanh", recurrent_activation="relu")
    return layers.Dense(3)(layers.Flatten()(last(x)))


SHAPES: dict[Any, tuple[int, ...]] = {
    tiny: (3, 6, 5, 2),
    of_images: (4, 9, 8, 2),
    of_sequences: (4, 9, 2),
    of_relu: (3, 9, 8, 2),
    of_steps: (2, 3, 6, 5, 2),
}


@functools.cache
def quantized(build: Any) -> Any:
    model = scramble(functional(SHAPES[build], build=build))
    return observe(keras_qat.quantize_model(model), images(24, SHAPES[build]))


@pytest.mark.parametrize(
    ("build", "kernels", "per_layer"),
    [
        (tiny, "xnnpack", False),
        *(
            pytest.param(build, kernels, per_layer, marks=pytest.mark.slow)
            for build in SHAPES
            for kernels in ("xnnpack", "reference", "tflm")
            for per_layer in (False, True)
        ),
    ],
)
def test_files_give_what_the_model_predicts(build, kernels, per_layer):
    assert not keras_qat.plan(functional(SHAPES[build], build=build)).float_layers
    assert_exact_everywhere(quantized(build), images(24, SHAPES[build]), kernels, per_layer)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["xnnpack", "reference", "tflm"])
@pytest.mark.parametrize(
    "recipe",
    [
        keras_qat.recipes.int8(per_channel=False),
        keras_qat.recipes.int8(weight_bits=4),
        keras_qat.recipes.int8(activation_bits=5),
        keras_qat.recipes.int8(weight_bits=2, activation_bits=2),
    ],
)
def test_other_recipes(recipe, kernels):
    x = images(24, SHAPES[of_images])
    model = scramble(functional(SHAPES[of_images], build=of_images))
    assert_exact_everywhere(observe(keras_qat.quantize_model(model, recipe), x), x, kernels)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["xnnpack", "tflm"])
def test_the_longest_sequence(kernels):
    shape = MOST_STEPS, 4, 3, 2
    model = scramble(functional(shape, build=layers.ConvLSTM2D(2, 2, return_sequences=True)))
    x = images(6, shape)
    assert_exact_everywhere(observe(keras_qat.quantize_model(model), x), x, kernels)


@pytest.mark.slow
def test_for_a_microcontroller():
    x = images(16, SHAPES[tiny])
    model = scramble(functional(SHAPES[tiny], build=tiny))
    assert not keras_qat.plan(model, target="tflm").problems
    qat = observe(keras_qat.quantize_model(model, target="tflm"), x)
    pytest.importorskip("tflite_micro")
    contents = keras_qat.export_tflite(qat, target="tflm")
    (output,) = keras_qat.verify(qat, contents, x, kernels="tflm").outputs
    assert output.identical == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("build", [tiny, pytest.param(of_sequences, marks=pytest.mark.slow)])
def test_it_stays_close_to_the_float_layer(build):
    """Cell states that add up over steps: in 8 bits trained networks had 10 to 14 dB."""
    model, x = scramble(functional(SHAPES[build], build=build)), images(64, SHAPES[build])
    qat = keras_qat.quantize_model(model)
    keras_qat.calibrate(qat, x)
    expected = model.predict(x, verbose=0)
    error = np.square(qat.predict(x, verbose=0) - expected).sum()
    assert error < 0.003 * np.square(expected).sum()


@pytest.mark.slow
@pytest.mark.parametrize("build", [of_images, of_sequences, of_relu])
def test_without_quantization_it_is_the_float_layer(build):
    model = scramble(functional(SHAPES[build], build=build))
    assert_is_float_without_quantization(model, images(24, SHAPES[build]))


@pytest.mark.slow
@pytest.mark.parametrize("build", [of_images, of_sequences, of_relu])
def test_models_train_are_saved_and_exported_to_saved_models(build, tmp_path):
    qat = keras_qat.quantize_model(functional(SHAPES[build], build=build))
    assert_trains_and_is_kept(qat, images(32, SHAPES[build]), tmp_path)


@pytest.mark.slow
def test_half_precision():
    x = images(32, SHAPES[of_images])
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        model = functional(SHAPES[of_images], build=of_images)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert_exact_everywhere(train(keras_qat.quantize_model(model), x), x, "xnnpack")


def test_ranges_inside_are_planned_and_named():
    plan = keras_qat.plan(functional(SHAPES[tiny], build=tiny))
    inside = [row.tensor for row in plan.rows if row.reason.startswith("inside")]
    parts = ("input_gates", "state_gates", "input_candidate", "state_candidate")
    assert inside == [f"conv_lstm/{part}" for part in parts]


SHAPE = SHAPES[tiny]

STAYS = {
    "are kept, given or read": lambda x: layers.ConvLSTM2D(2, 3, return_state=True)(x)[1],
    "are not tanh and sigmoid": lambda x: layers.ConvLSTM2D(2, 3, activation="relu", dropout=0.2)(
        x
    ),
    "its channels come first": lambda x: layers.ConvLSTM2D(2, 2, data_format="channels_first")(x),
    "along three axes": lambda x: layers.ConvLSTM3D(2, 2)(layers.Reshape((*SHAPE, 1))(x)),
    f"more than {MOST_STEPS} steps": lambda x: layers.ConvLSTM2D(2, 2)(
        layers.ZeroPadding3D(((0, MOST_STEPS), 0, 0))(x)
    ),
}


@pytest.mark.parametrize("reason", STAYS)
def test_the_plan_says_why_one_stays_in_float(reason):
    plan = keras_qat.plan(functional(SHAPE, build=STAYS[reason]))
    assert any(reason in item for item in plan.float_layers.values()), plan.float_layers


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((None, 6, 5, 2), "its number of steps is not known"),
        ((3, None, None, 2), "its images are of any size"),
    ],
)
def test_open_sizes_stay_in_float(shape, reason):
    (result,) = keras_qat.plan(functional(shape, build=tiny)).float_layers.values()
    assert reason in result


@pytest.mark.slow
def test_channels_first_in_float():
    x = images(8, SHAPE)
    model = scramble(functional(SHAPE, build=STAYS["its channels come first"]))
    qat = observe(keras_qat.quantize_model(model), x)
    (output,) = keras_qat.verify(qat, keras_qat.export_tflite(qat), x).outputs
    assert output.max_difference <= 1


def test_states_that_are_kept_stay_in_float():
    x = keras.Input(SHAPE, batch_size=2)
    model = keras.Model(x, layers.ConvLSTM2D(2, 3, stateful=True)(x))
    (reason,) = keras_qat.plan(model).float_layers.values()
    assert "its states are kept, given or read" in reason


def test_it_may_be_left_in_float():
    model = functional(SHAPE, build=tiny)
    recipe = keras_qat.recipes.int8().override("ConvLSTM2D", quantize=False)
    assert list(keras_qat.plan(model, recipe).float_layers) == ["conv_lstm"]
    assert list(keras_qat.plan(model, "int16x8").float_layers) == ["conv_lstm"]
