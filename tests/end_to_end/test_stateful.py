"""Tests recurrent layers with `stateful=True`: models and files continue from their last run."""

import functools
import types
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.ops.recurrent.kept_states import read_states
from keras_qat.training.recurrent import list_states
from tests.helpers import assert_all_equal, keras, layers, save_and_load
from tests.ops.test_versions import oldest_runtime

SLOW = [pytest.param(kernels, marks=pytest.mark.slow) for kernels in ("reference", "tflm")]
KERNELS = ["xnnpack", *SLOW]
STEPS, FEATURES = 3, 4


def lstms(x: Any, **how: Any) -> Any:
    x = layers.LSTM(6, return_sequences=True, name="first", **how)(x)
    return layers.LSTM(5, use_bias=False, name="last", **how)(x)


def unrolled(x: Any, **how: Any) -> Any:
    """Applies each kind of layer, including one with a separate range for its state."""
    x = layers.GRU(6, return_sequences=True, name="first", **how)(x)
    x = layers.SimpleRNN(5, return_sequences=True, activation="relu", name="relu", **how)(x)
    x = layers.GRU(4, reset_after=False, return_sequences=True, name="before", **how)(x)
    return layers.SimpleRNN(5, use_bias=False, go_backwards=True, name="last", **how)(x)


def build(steps: int, batch: int | None, stateful: bool, of: Any = lstms) -> Any:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((steps, FEATURES), batch, name="sound")
    x = of(inputs, stateful=stateful)
    return keras.Model(inputs, layers.Dense(3, name="logits")(x), name="listener")


def sounds(examples: int = 12) -> np.ndarray:
    return np.random.default_rng(3).normal(size=(examples, STEPS, FEATURES)).astype("float32")


@functools.cache
def trained(of: Any = lstms) -> Any:
    """Returns a network after a training step that kept states."""
    qat, x = keras_qat.quantize_model(build(STEPS, 2, True, of)), sounds()
    qat.compile(keras.optimizers.SGD(0.1), "mse")
    qat.fit(x, np.ones((len(x), 3)), 2, verbose=0)
    return qat


@functools.cache
def file(of: Any = lstms) -> bytes:
    return keras_qat.export_tflite(trained(of))


KINDS = pytest.mark.parametrize("of", [lstms, unrolled])


def needs(kernels: str) -> None:
    if kernels == "tflm":
        pytest.importorskip("tflite_micro")


@pytest.mark.sample(1)
@KINDS
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("per_layer", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_sequence_of_runs_gives_what_the_model_predicts(kernels, per_layer, of):
    needs(kernels)
    qat, x = trained(of), sounds()
    qat.kernels = kernels
    report = keras_qat.verify(qat, file(of), x, kernels=kernels, per_layer=per_layer)
    assert [tensor.identical for tensor in report.outputs] == [1.0]
    assert {tensor.run.identical for tensor in report.tensors} <= {1.0}
    assert {tensor.fed.identical for tensor in report.tensors if tensor.fed} <= {1.0}
    assert not report.notes
    assert of is unrolled or oldest_runtime(file()) == [2, 8, 0]
    simulated = keras_qat.simulate(qat, x, kernels=kernels)
    assert simulated.float_layers == ()
    qat.reset_states()
    predicted = qat.predict(x, batch_size=2, verbose=0)
    np.testing.assert_allclose(simulated.outputs["logits"].values, predicted, atol=1e-6)


@pytest.mark.sample(1)
@KINDS
@pytest.mark.parametrize("kernels", KERNELS)
def test_states_go_on_until_they_are_reset(kernels, of):
    needs(kernels)
    qat, x = trained(of), sounds(2)
    qat.kernels = kernels
    model = keras_qat.TFLiteModel(file(of), kernels)
    qat.reset_states()
    first = [variant.predict(x, batch_size=2, verbose=0) for variant in (qat, model)]
    again = [variant.predict(x, batch_size=2, verbose=0) for variant in (qat, model)]
    assert np.any(first[0] != again[0])
    np.testing.assert_allclose(first[0], first[1], atol=1e-6)
    np.testing.assert_allclose(again[0], again[1], atol=1e-6)
    for variant, before in zip((qat, model), first, strict=True):
        variant.reset_states()
        np.testing.assert_array_equal(variant.predict(x, batch_size=2, verbose=0), before)


@pytest.mark.slow
def test_verify_and_simulate_leave_the_states_of_the_model():
    qat, x = trained(), sounds()
    qat.predict(x[:2], batch_size=2, verbose=0)
    before = [state.numpy() for state in list_states(qat)]
    assert all(map(np.any, before))
    keras_qat.simulate(qat, x)
    keras_qat.verify(qat, file(), x)
    assert_all_equal(list_states(qat), before)


@pytest.mark.slow
@KINDS
def test_models_are_saved_with_their_kept_states_at_zero(tmp_path, of):
    qat, x = trained(of), sounds()
    qat.kernels = "xnnpack"
    again = save_and_load(qat, tmp_path / "qat.keras")
    qat.reset_states()
    expected = qat.predict(x, batch_size=2, verbose=0)
    np.testing.assert_array_equal(again.predict(x, batch_size=2, verbose=0), expected)
    assert keras_qat.export_tflite(again) == keras_qat.export_tflite(qat)


def test_what_does_not_go_together_is_said():
    qat = trained()
    with pytest.raises(ValueError, match=r"keeps the states of 2 examples.*set_weights"):
        keras_qat.export_tflite(qat, batch_size=1)
    with pytest.raises(ValueError, match="needs batches of 2 examples, not 3"):
        keras_qat.simulate(qat, sounds(3))
    with pytest.raises(ValueError, match="keeps states"):
        keras_qat.export_saved_model(qat, "nowhere")


@pytest.mark.slow
def test_calls_that_share_states_are_refused():
    one, other = (keras.Input((STEPS, FEATURES), 2) for _ in range(2))
    shared = layers.LSTM(3, stateful=True, name="both")
    model = keras.Model([one, other], layers.Concatenate()([shared(one), shared(other)]))
    qat = keras_qat.quantize_model(model)
    keras_qat.calibrate(qat, [sounds(), sounds()], batch_size=2)
    with pytest.raises(ValueError, match="'both' keeps its states and is called 2 times"):
        keras_qat.export_tflite(qat)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("layer", "options", "recipe", "reason"),
    [
        (layers.LSTM, {"activation": "relu"}, "int8", "are not tanh and sigmoid"),
        (layers.LSTM, {}, "int16x8", "no int16 kernel for LSTM, but with kernels="),
        (layers.GRU, {}, "int16x8", "no int16 kernel for GRU"),
    ],
)
def test_states_of_layers_in_float_are_refused(layer, options, recipe, reason):
    qat = keras_qat.quantize_model(_with(layer(3, stateful=True, **options), 2), recipe)
    keras_qat.calibrate(qat, sounds(), batch_size=2)
    with pytest.raises(ValueError, match=rf"is in float and keeps its states .*{reason}"):
        keras_qat.export_tflite(qat)


def _with(layer: Any, batch: int = 1) -> Any:
    inputs = keras.Input((STEPS, FEATURES), batch)
    return keras.Model(inputs, layers.Dense(2)(layer(inputs)))


def test_sources_say_what_begins_anew(tmp_path):
    qat = keras_qat.quantize_model(build(1, 1, True))
    qat.set_weights(trained().get_weights())
    keras_qat.export_c(qat, tmp_path / "listener.cc")
    assert "interpreter.Reset()" in (tmp_path / "listener.h").read_text()
    codes = keras_qat.simulate(qat, sounds(3)[:, :1]).outputs["logits"]
    assert len(codes.codes) == 3


@pytest.mark.parametrize("zero_point", [0, -128, 100])
def test_states_are_whole_steps_of_their_range(zero_point):
    """In float32, a multiple of a scale may be inexact. Values beyond the range are clipped."""
    q = np.arange(-300, 300)
    params = QuantParams(np.float32(0.1), zero_point, 8)
    layer = types.SimpleNamespace(states=[tf.constant(np.float32(q) * params.scale)])
    (codes,) = read_states(layer, [params])
    np.testing.assert_array_equal(codes, np.clip(q, -128 - zero_point, 127 - zero_point))


class Gate(layers.Layer):
    """A custom layer around a layer that keeps its states."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.memory = layers.LSTM(6, return_sequences=True, stateful=True)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.memory(x) * tf.nn.sigmoid(x[..., :1])


@pytest.mark.slow
def test_states_inside_a_custom_layer():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((STEPS, FEATURES), 2)
    model, x = keras.Model(inputs, layers.Dense(3)(Gate()(inputs))), sounds()
    model(x[:2])
    before = [state.numpy() for state in list_states(model)]
    qat = keras_qat.quantize_model(model)
    np.testing.assert_array_equal(before, [state.numpy() for state in list_states(model)])
    keras_qat.calibrate(qat, x)
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), x)
    assert report.identical == 1
    assert not report.float_operations
