"""GRU and SimpleRNN in integers, unrolled: files, predictions and simulation, and what trains."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from keras_qat.ops.recurrent.step_math import parts
from keras_qat.ops.recurrent.unrolled import MOST_STEPS, SIMPLE_RNN
from keras_qat.tflite.interpreter import FileInterpreter
from tests.end_to_end.exact import (
    assert_exact_everywhere,
    assert_is_float_without_quantization,
    assert_trains_and_is_kept,
)
from tests.helpers import images, observe, scramble, train
from tests.networks.small import functional
from tests.ops.harness import file_of, node_of

layers = keras.layers

SHAPE = (3, 4)


def tiny(x: Any) -> Any:
    return layers.SimpleRNN(3)(x)


def small(x: Any) -> Any:
    return layers.Dense(3)(layers.GRU(3, name="gru")(x))


def mixed(x: Any) -> Any:
    """Each kind, both ways, with what a layer may have."""
    x = layers.GRU(4, return_sequences=True, go_backwards=True, dropout=0.2)(x)
    hard = {"recurrent_activation": "hard_sigmoid", "return_sequences": True}
    both = layers.Bidirectional(layers.GRU(3, reset_after=False, **hard), "sum")
    x = layers.SimpleRNN(4, return_sequences=True, recurrent_dropout=0.2)(both(x))
    relu = functools.partial(layers.SimpleRNN, 3, activation="relu", use_bias=False)
    last = layers.Bidirectional(relu())(x)
    sequence = layers.Flatten()(relu(return_sequences=True, unroll=True)(x))
    return layers.Dense(3)(layers.Concatenate()([last, sequence]))


@functools.cache
def quantized(build: Any) -> Any:
    model = scramble(functional(SHAPE, build=build))
    return observe(keras_qat.quantize_model(model), images(24, SHAPE))


@pytest.mark.parametrize(
    ("build", "kernels", "per_layer"),
    [
        (tiny, "xnnpack", False),
        *(
            pytest.param(build, kernels, per_layer, marks=pytest.mark.slow)
            for build in (small, mixed)
            for kernels in ("xnnpack", "reference", "tflm")
            for per_layer in (False, True)
        ),
    ],
)
def test_files_give_what_the_model_predicts(build, kernels, per_layer):
    assert_exact_everywhere(quantized(build), images(24, SHAPE), kernels, per_layer)


def test_all_hidden_states_are_packed_into_the_output():
    nodes = (node_of(SIMPLE_RNN, 8, seed)[0] for seed in range(100))
    node = next(node for node in nodes if node.attributes["sequences"])
    (name, *_), *_ = reversed(list(FileInterpreter(file_of(node)).operations()))
    assert name == "PACK"


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["xnnpack", "tflm"])
def test_the_longest_sequence(kernels):
    shape = MOST_STEPS, 2
    model = scramble(functional(shape, build=layers.GRU(3, return_sequences=True)))
    x = images(6, shape)
    assert_exact_everywhere(observe(keras_qat.quantize_model(model), x), x, kernels)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["xnnpack", "tflm"])
@pytest.mark.parametrize("layer", [layers.GRU, layers.LSTM])
@pytest.mark.parametrize("sequences", [False, True])
def test_a_sequence_at_each_step_of_another(layer, sequences, kernels):
    build = layers.TimeDistributed(layer(3, return_sequences=sequences))
    model, x = scramble(functional((2, *SHAPE), build=build)), images(8, (2, *SHAPE))
    assert_exact_everywhere(observe(keras_qat.quantize_model(model), x), x, kernels)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [pytest.param("xnnpack", marks=pytest.mark.slow), "tflm"])
def test_a_model_with_a_recurrent_layer_at_each_step_of_a_sequence(kernels):
    """Its examples and steps are folded, so that a state begins with zeros for each of both."""
    sequence = keras.Input(SHAPE)
    x = layers.LSTM(6, return_sequences=True)(layers.Dense(5, activation="relu")(sequence))
    inner = keras.Model(sequence, layers.Dense(2)(layers.LSTM(3)(x)))

    def build(x):
        return layers.LSTM(4)(layers.TimeDistributed(inner)(x))

    model, x = scramble(functional((2, *SHAPE), build=build)), images(8, (2, *SHAPE))
    assert_exact_everywhere(observe(keras_qat.quantize_model(model), x), x, kernels)


@pytest.mark.slow
def test_a_sequence_at_each_step_beside_one_of_any_length():
    """Where the other input is reshaped to a size known at run time, states come first."""
    steps, sound = keras.Input((3, 5, 4), name="steps"), keras.Input((None, 4), name="sound")
    x = layers.Flatten()(layers.TimeDistributed(layers.LSTM(6))(steps))
    y = layers.GlobalAveragePooling1D()(layers.GRU(3, return_sequences=True)(sound))
    model = keras.Model([steps, sound], layers.Dense(2)(layers.Concatenate()([x, y])))
    x = [images(8, (3, 5, 4)), images(8, (7, 4))]
    qat = keras_qat.quantize_model(scramble(model))
    keras_qat.calibrate(qat, x)
    (output,) = keras_qat.verify(qat, keras_qat.export_tflite(qat), x).outputs
    assert output.identical == 1.0


@pytest.mark.slow
def test_half_precision():
    x = images(32, SHAPE)
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        model = functional(SHAPE, build=mixed)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert_exact_everywhere(train(keras_qat.quantize_model(model), x), x, "xnnpack")


@pytest.mark.slow
@pytest.mark.parametrize("build", [small, mixed])
def test_without_quantization_it_is_the_float_layer(build):
    model = scramble(functional(SHAPE, build=build))
    assert_is_float_without_quantization(model, images(24, SHAPE))


@pytest.mark.slow
def test_models_train_are_saved_and_exported_to_saved_models(tmp_path):
    qat = keras_qat.quantize_model(functional(SHAPE, build=mixed))
    assert_trains_and_is_kept(qat, images(32, SHAPE), tmp_path)


@pytest.mark.parametrize("kind", [layers.GRU, layers.LSTM, layers.ConvLSTM1D])
def test_gates_are_keras_hard_sigmoids_lines(kind):
    kwargs = {"kernel_size": 1} if kind is layers.ConvLSTM1D else {}
    gates = parts(kind(3, recurrent_activation="hard_sigmoid", **kwargs))["gates"]
    x = tf.constant(np.linspace(-4, 4, 33, dtype=np.float32))
    line = tf.clip_by_value(gates.slope * (x + gates.offset), 0.0, 1.0)
    np.testing.assert_allclose(line, keras.activations.hard_sigmoid(x), atol=1e-6)


def test_ranges_inside_are_planned_named_and_shared_by_all_steps():
    plan = keras_qat.plan(functional(SHAPE, build=small))
    inside = [row.tensor for row in plan.rows if row.reason.startswith("inside")]
    parts = [f"gru/{prefix}{part}" for part in ("gates", "candidate") for prefix in PREFIXES]
    assert inside == parts
    assert not plan.float_layers
    result = {
        quantizer.quantizes: quantizer for quantizer in keras_qat.quantizers(quantized(small))
    }
    assert all(result[(name,)].calibrated for name in parts)


def test_ranges_inside_are_no_wider_than_what_is_in_them():
    """Only those of a layer with a cell state are symmetric."""
    plan = keras_qat.plan(functional(SHAPE, build=mixed))
    assert not any(row.spec.symmetric for row in plan.rows if row.reason.startswith("inside"))


PREFIXES = ("input_", "state_", "")

longer = layers.ZeroPadding1D((0, 32))
"""More steps than are calls of a cell."""

STAYS = {
    "its states are read or given": lambda x: layers.LSTM(3, return_state=True)(longer(x))[1],
    "are not tanh and sigmoid or hard_sigmoid": lambda x: layers.GRU(3, "relu")(longer(x)),
    "are not tanh and relu": lambda x: layers.SimpleRNN(3, activation="selu")(longer(x)),
    "it has more than 32 steps": lambda x: layers.RNN(layers.GRUCell(3))(longer(x)),
    f"more than {MOST_STEPS} steps": lambda x: layers.GRU(3)(
        layers.ZeroPadding1D((0, MOST_STEPS))(x)
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("reason", STAYS)
def test_the_plan_says_why_one_stays_in_float(reason):
    plan = keras_qat.plan(functional(SHAPE, build=STAYS[reason]))
    assert any(reason in item for item in plan.float_layers.values()), plan.float_layers


def test_a_length_that_is_not_known_stays_in_float():
    (reason,) = keras_qat.plan(functional((None, 4), build=small)).float_layers.values()
    assert "its number of steps is not known" in reason


def test_it_may_be_left_in_float():
    model = functional(SHAPE, build=small)
    recipe = keras_qat.recipes.int8().override("GRU", quantize=False)
    assert list(keras_qat.plan(model, recipe).float_layers) == ["gru"]
    assert list(keras_qat.plan(model, "int16x8").float_layers) == ["gru"]
