"""Tests recurrent layers with states as inputs or outputs: files, predictions, streaming."""

import functools
from typing import Any

import numpy as np
import pytest

import keras_qat
from keras_qat.tflite.interpreter import FileInterpreter
from tests.helpers import keras, layers, quantize_on, scramble
from tests.networks.forms.cells_and_convolutions import MODELS, SHAPE
from tests.networks.forms.form import decibels

pytestmark = pytest.mark.legacy

STEPS, FEATURES, UNITS = 3, 4, 3


def of(kind: Any, **options: Any) -> Any:
    """Returns a model of one layer whose states are inputs, outputs, or both."""

    def build(given: bool = True, read: bool = True) -> Any:
        sound = keras.Input((STEPS, FEATURES), name="sound")
        state = keras.Input((UNITS,), name="state")
        x = layers.Dense(FEATURES, name="features")(sound)
        layer = kind(UNITS, return_state=read, name="cell", **options)
        outputs = layer(x, initial_state=state) if given else layer(x)
        outputs = [*outputs] if read else [outputs]
        outputs[0] = layers.Dense(2, name="words")(outputs[0])
        return keras.Model([sound, state] if given else sound, outputs)

    return build


GRU = of(layers.GRU, return_sequences=True)
BUILDS = {
    "gru": GRU,
    "last": of(layers.GRU, reset_after=False, go_backwards=True),
    "simple": of(layers.SimpleRNN, return_sequences=True, use_bias=False),
    "relu": of(layers.SimpleRNN, activation="relu", return_sequences=True),
    "relu_last": of(layers.SimpleRNN, activation="relu"),
    "given": functools.partial(GRU, read=False),
    "read": functools.partial(GRU, given=False),
    "read_last": functools.partial(of(layers.SimpleRNN), given=False),
}


def both_ways(merge: str | None = "concat") -> Any:
    """Returns a bidirectional layer that starts with the states of another."""
    sound = keras.Input((STEPS, FEATURES), name="sound")
    options = {"return_sequences": True, "return_state": True}
    first = layers.Bidirectional(layers.GRU(UNITS, **options), merge)
    second = layers.Bidirectional(layers.SimpleRNN(UNITS, **options), merge)
    *ways, forth, back = first(sound)
    *ways, forth, back = second(ways[-1], initial_state=[back, forth])
    return keras.Model(sound, [layers.Dense(2)(ways[0]), forth, back])


def translator() -> Any:
    """Returns an encoder and a decoder: a layer with two calls, and states with other scales."""
    words, others = keras.Input((STEPS, FEATURES)), keras.Input((2, FEATURES))
    shared = layers.GRU(UNITS, return_sequences=True, return_state=True)
    x, state = shared(words)
    y, state = shared(others, initial_state=state)
    z = layers.GRU(UNITS)(x, initial_state=layers.Dense(UNITS, "relu")(state))
    relu = layers.SimpleRNN(UNITS, activation="relu")(y, initial_state=layers.Dense(UNITS)(z))
    return keras.Model([words, others], [layers.Dense(2)(y), relu])


BUILDS |= {"both_ways": both_ways, "apart": lambda: both_ways(None), "translator": translator}


def data(model: Any, examples: int = 24) -> Any:
    numbers = np.random.default_rng(3)
    result = [
        (numbers.normal(size=(examples, *tensor.shape[1:])) * (0.4, 1)[len(tensor.shape) > 2])
        for tensor in model.inputs
    ]
    result = [item.astype(np.float32) for item in result]
    return result if len(result) > 1 else result[0]


@functools.cache
def quantized(name: str) -> Any:
    return calibrated(scramble(BUILDS[name]()))


def calibrated(model: Any, recipe: Any = "int8") -> Any:
    return quantize_on(model, data(model), recipe)


def test_a_relu_keeps_negative_given_states():
    """The layer's states are never negative, but an initial state can change the first step."""
    keras.utils.set_random_seed(1)
    model = scramble(BUILDS["relu_last"]())
    x = data(model)
    assert np.min(x[1]) < -1
    assert decibels(model(x), calibrated(model).predict(x, verbose=0)) > 35


def listener(layer: Any, steps: int, batch: int | None = None) -> Any:
    """Returns a network of two recurrent layers, with their states as inputs and outputs."""
    keras.utils.set_random_seed(3)
    x = sound = keras.Input((steps, FEATURES), batch, name="sound")
    states = [keras.Input((UNITS,), batch, name=name) for name in ("first", "last")]
    result = []
    for state in states:
        how = {"return_sequences": True, "return_state": True}
        x, state = layer(UNITS, **how)(x, initial_state=state)
        result.append(state)
    return keras.Model([sound, *states], [layers.Dense(2)(x), *result])


@pytest.mark.sample(1)
@pytest.mark.parametrize("kernels", ["xnnpack", "reference", "tflm"])
@pytest.mark.parametrize(
    "layer", [layers.GRU, pytest.param(layers.SimpleRNN, marks=pytest.mark.slow)]
)
def test_trained_on_whole_sequences_and_run_step_by_step(layer, kernels):
    """A file of one step that reads its last states returns the quantized values of a sequence."""
    if kernels == "tflm":
        pytest.importorskip("tflite_micro")
    whole = keras_qat.quantize_model(listener(layer, STEPS))
    sounds = data(whole)[0]
    zeros = np.zeros((len(sounds), UNITS), np.float32)
    keras_qat.calibrate(whole, [sounds, zeros, zeros])
    whole.kernels = kernels
    step = keras_qat.quantize_model(listener(layer, 1, batch=1))
    step.set_weights(whole.get_weights())
    file = keras_qat.TFLiteModel(keras_qat.export_tflite(step), kernels)
    expected = whole.predict([sounds, zeros, zeros], verbose=0)
    for place in range(3):
        states = [zeros[:1], zeros[:1]]
        for time in range(STEPS):
            words, *states = file.predict([sounds[place, time][None, None], *states])
            np.testing.assert_array_equal(words[0, 0], expected[0][place, time])
        for state, last in zip(states, expected[1:], strict=True):
            np.testing.assert_array_equal(state[0], last[place])


@pytest.mark.slow
def test_a_state_goes_from_output_to_input_as_it_is():
    file = keras_qat.TFLiteModel(keras_qat.export_tflite(quantized("gru")))
    given, result = file.inputs["state"], list(file.outputs.values())[1]
    assert (given.scale, given.zero_point) == (result.scale, result.zero_point) == (1 / 128, 0)


def test_a_state_that_nobody_reads_is_in_no_file():
    result = []
    for read in (False, True):
        x = keras.Input((2, FEATURES))
        y = layers.SimpleRNN(UNITS, return_sequences=True, return_state=read)(x)
        model = keras.Model(x, y[0] if read else y)
        file = FileInterpreter(keras_qat.export_tflite(calibrated(model)), "optimized")
        result.append([name for name, *_ in file.operations()])
    assert result[0] == result[1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [layers.GRU, layers.SimpleRNN])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_first_states_beyond_what_the_layer_returns_are_not_clipped(kind, activation):
    """For example, a decoder that starts with a `Dense` of an image's features."""
    x, features = keras.Input((STEPS, FEATURES)), keras.Input((5,))
    outputs = kind(8, activation=activation)(x, initial_state=layers.Dense(8)(features))
    model, rng = scramble(keras.Model([x, features], outputs)), np.random.default_rng(0)
    data = [rng.normal(size=(32, *i.shape[1:])).astype(np.float32) * 3 for i in model.inputs]
    qat = quantize_on(model, data, strict=True)
    error = np.std(qat(data) - model(data)) / np.std(model(data))
    assert -20 * np.log10(error) > 25
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), data).identical == 1


def carry(features):
    return layers.LSTM(UNITS, return_state=True)(layers.Reshape((1, 5))(features))[2]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("state", [layers.Dense(UNITS, "tanh"), carry], ids=["tanh", "carry"])
def test_first_states_within_its_range_leave_the_layer_whole(state):
    x, features = keras.Input((STEPS, FEATURES)), keras.Input((5,))
    given = layers.Reshape((UNITS,))(state(features))
    model = keras.Model([x, features], layers.GRU(UNITS)(x, initial_state=given))
    calls = keras_qat.plan(model).graph.calls
    assert any(isinstance(call.layer, layers.GRU) for call in calls) == (state is not carry)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [layers.LSTM, layers.GRU])
def test_a_shared_layer_that_is_given_a_state_in_one_call_alone(kind):
    x, features = keras.Input((STEPS, FEATURES)), keras.Input((5,))
    states = [layers.Dense(UNITS)(features) for _ in range(1 + (kind is layers.LSTM))]
    shared = kind(UNITS)
    model = keras.Model([x, features], shared(x) + shared(x, initial_state=states))
    qat = keras_qat.quantize_model(model, strict=True)
    assert len(qat.trainable_variables) == len(model.trainable_variables)


def model_of(name, shape=SHAPE):
    keras.utils.set_random_seed(3)
    x = keras.Input(shape, name="x")
    return keras.Model(x, MODELS[name](x))
