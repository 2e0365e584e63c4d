"""Tests recurrent layers in integers: their plans, and cases that the forms do not test."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.ops.recurrent.step_math import find_weight_parts
from keras_qat.ops.recurrent.unrolled import SIMPLE_RNN
from keras_qat.tflite.interpreter import FileInterpreter
from tests.helpers import images, keras, layers, quantize_on, scramble
from tests.networks.forms.cells_and_convolutions import SHAPES, tiny
from tests.networks.forms.form import Form
from tests.networks.forms.recurrent import SHAPE, WORDS, masked, mixed, small
from tests.networks.small import functional
from tests.ops.harness import file_of, node_of


def test_all_hidden_states_are_packed_into_the_output():
    nodes = (node_of(SIMPLE_RNN, 8, seed)[0] for seed in range(100))
    node = next(node for node in nodes if node.attributes["sequences"])
    (name, *_), *_ = reversed(list(FileInterpreter(file_of(node)).operations()))
    assert name == "PACK"


@pytest.mark.slow
def test_a_sequence_at_each_step_beside_one_of_any_length():
    """Another input is reshaped to a size known at run time, so states must be allocated first."""
    steps, sound = keras.Input((3, 5, 4), name="steps"), keras.Input((None, 4), name="sound")
    x = layers.Flatten()(layers.TimeDistributed(layers.LSTM(6))(steps))
    y = layers.GlobalAveragePooling1D()(layers.GRU(3, return_sequences=True)(sound))
    model = keras.Model([steps, sound], layers.Dense(2)(layers.Concatenate()([x, y])))
    x = [images(8, (3, 5, 4)), images(8, (7, 4))]
    qat = quantize_on(scramble(model), x)
    (output,) = keras_qat.verify(qat, keras_qat.export_tflite(qat), x).outputs
    assert output.identical == 1.0


@pytest.mark.parametrize("kind", [layers.GRU, layers.LSTM, layers.ConvLSTM1D])
def test_gates_are_keras_hard_sigmoids_lines(kind):
    kwargs = {"kernel_size": 1} if kind is layers.ConvLSTM1D else {}
    gates = find_weight_parts(kind(3, recurrent_activation="hard_sigmoid", **kwargs))["gates"]
    x = tf.constant(np.linspace(-4, 4, 33, dtype=np.float32))
    line = tf.clip_by_value(gates.slope * (x + gates.offset), 0.0, 1.0)
    np.testing.assert_allclose(line, keras.activations.hard_sigmoid(x), atol=1e-6)


GATES = [f"{prefix}gates" for prefix in ("input_", "state_", "")]
CANDIDATE = [f"{prefix}candidate" for prefix in ("input_", "state_", "")]
INSIDE = {
    "gru": (SHAPE, small, [*GATES, *CANDIDATE]),
    "conv_lstm": (SHAPES[tiny], tiny, [*GATES[:2], *CANDIDATE[:2]]),
}


@pytest.mark.parametrize("name", INSIDE)
def test_ranges_inside_are_planned_named_and_shared_by_all_steps(name):
    shape, build, parts = INSIDE[name]
    plan = keras_qat.plan(functional(shape, build=build))
    inside = [row.tensor for row in plan.rows if row.reason.startswith("inside")]
    assert inside == [f"{name}/{part}" for part in parts]
    assert not plan.float_layers


def test_ranges_inside_are_no_wider_than_what_is_in_them():
    """Only layers with a cell state have symmetric ranges inside."""
    plan = keras_qat.plan(functional(SHAPE, build=mixed))
    assert not any(row.spec.symmetric for row in plan.rows if row.reason.startswith("inside"))


@pytest.mark.parametrize(
    ("kind", "name", "shape", "build"),
    [
        ("GRU", "gru", SHAPE, small),
        ("ConvLSTM2D", "conv_lstm", SHAPES[tiny], tiny),
        ("LSTM", "lstm", SHAPE, lambda x: layers.LSTM(3, name="lstm")(x)),
    ],
)
def test_it_may_be_left_in_float(kind, name, shape, build):
    model = functional(shape, build=build)
    recipe = keras_qat.recipes.int8().override(kind, quantize=False)
    assert list(keras_qat.plan(model, recipe).float_layers) == [name]
    assert list(keras_qat.plan(model, "int16x8").float_layers) == [name]


def test_states_that_are_kept_stay_in_float():
    x = keras.Input(SHAPES[tiny], batch_size=2)
    model = keras.Model(x, layers.ConvLSTM2D(2, 3, stateful=True)(x))
    (reason,) = keras_qat.plan(model).float_layers.values()
    assert "it is stateful or reads or returns states" in reason


def test_both_directions_have_the_name_of_the_layer():
    both = layers.Bidirectional(layers.LSTM(3), name="both")
    plan = keras_qat.plan(functional((3, 4), build=both))
    assert not plan.float_layers
    names = {row.tensor for row in plan.rows if row.role == "activation"}
    assert names == {"both_forward", "both_backward", "both"}


@pytest.mark.legacy
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [layers.GRU, layers.LSTM, layers.SimpleRNN])
def test_masked_steps_are_one_layer(kind):
    model = Form(masked(kind, False, True), (WORDS,)).model()
    assert len(keras_qat.quantize_model(model, strict=True).layers) <= 10
