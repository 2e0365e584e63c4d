"""Tests that `quantize_model` notices if it computes differently from the float model."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.lowering.expand_call import make_symbol, trace_in_place
from keras_qat.lowering.expansions import OF_FLOATS
from keras_qat.lowering.split_layers import LOWERINGS
from tests.helpers import build_model, keras, layers, quantize_on, rng
from tests.networks.forms.attention import CHOOSING


@pytest.fixture
def model():
    inputs = keras.Input((4, 3))
    hidden = layers.Lambda(lambda x: tf.abs(x) + 1.0, name="own")(inputs)
    return keras.Model(inputs, layers.Dense(2, name="scores")(hidden))


def misunderstand(patch):
    """Replaces `tf.abs` by a LeakyReLU."""

    def wrong(call, context):
        compute = lambda: layers.LeakyReLU(-0.5)(make_symbol(call.inputs[0]))  # noqa: E731
        return trace_in_place(call, compute, context)

    patch.delitem(OF_FLOATS, "abs")
    patch.setitem(LOWERINGS, "abs", wrong)


def test_what_is_understood_otherwise_is_warned_of(model, monkeypatch):
    misunderstand(monkeypatch)
    with pytest.warns(UserWarning, match="differs from the float model.*scores.*own"):
        keras_qat.quantize_model(model)
    inputs = keras.Input((4, 3))
    functional = keras.Model(inputs, layers.Dense(2, name="scores")(tf.abs(inputs) + 1.0))
    with pytest.warns(UserWarning, match="from the float model.*scores.*math.abs"):
        keras_qat.quantize_model(functional)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mask", ["padding and later steps", "padding beside copies"])
def test_rows_that_see_nothing_are_no_difference(mask):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keras_qat.quantize_model(CHOOSING[mask].model())


@pytest.mark.parametrize("examples", [1, None])
def test_numbers_that_are_a_little_off_are_no_difference(examples):
    """One value per example has no deviation, and masked scores change the sum a little."""
    x, seen = keras.Input((8,), batch_size=examples), keras.Input((8,), batch_size=examples)
    hidden = tf.where(seen > 0.0, layers.Dense(8)(x), -1e9)
    sums = tf.reduce_logsumexp(hidden, -1, keepdims=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keras_qat.quantize_model(keras.Model([x, seen], sums))


def test_states_are_those_of_before():
    inputs = keras.Input((4, 3), batch_size=2)
    hidden = layers.Lambda(lambda x: 2.0 * x)(inputs)
    model = keras.Model(inputs, layers.GRU(2, stateful=True)(hidden))
    model.predict(tf.ones((2, 4, 3)), verbose=0)
    before = model.layers[-1].states[0].numpy()
    keras_qat.quantize_model(model)
    assert (model.layers[-1].states[0].numpy() == before).all() and before.any()


X = rng().normal(size=(64, 4, 3)).astype(np.float32)
SAID = "differs from its float model even without rounding"


@pytest.fixture
def misunderstood(monkeypatch):
    """Returns a function that quantizes a model whose `tf.abs` is misunderstood."""

    def quantize(after=None, **options):
        inputs = keras.Input((4, 3), name="x")
        scores = layers.Dense(2, name="scores")(tf.abs(inputs) + 1.0)
        model = keras.Model(inputs, after(scores) if after else scores)

        with monkeypatch.context() as patch:
            misunderstand(patch)
            with pytest.warns(UserWarning, match="differs from the float model"):
                qat = keras_qat.quantize_model(model, **options)
        keras_qat.calibrate(qat, X)
        return qat

    return quantize


def check(qat):
    with pytest.warns(UserWarning, match=SAID):
        contents = keras_qat.export_tflite(qat)
    labels = qat.predict(X, verbose=0).argmax(-1)
    for y in (None, labels):
        with pytest.warns(UserWarning, match=SAID):
            report = keras_qat.verify(qat, contents, X, y)
        assert report.identical == 1 and report.verdict.is_same and not report.is_good
        assert SAID in report.verdict.likely_cause and "scores differed" in report.notes[0]


def test_a_model_that_is_not_the_float_model_is_not_good(misunderstood):
    check(misunderstood())


@pytest.mark.parametrize(
    "name", ["model.keras", *(pytest.param(x, marks=pytest.mark.slow) for x in ("q.h5", "folder"))]
)
def test_saved_and_loaded_models_still_know_it(misunderstood, tmp_path, name):
    qat = misunderstood()
    if name == "folder":
        qat.save(tmp_path / name, save_format="tf")
    else:
        qat.save(tmp_path / name)
    check(keras.models.load_model(tmp_path / name))


def test_files_that_end_inside_know_it(misunderstood):
    qat = misunderstood(layers.Softmax(name="p"), outputs=["scores"])
    with pytest.warns(UserWarning, match=SAID):
        contents = keras_qat.export_tflite(qat)
    with pytest.warns(UserWarning, match=SAID):
        assert not keras_qat.verify(qat, contents, X).is_good


def test_nothing_is_said_of_models_that_are_understood():
    qat = quantize_on(build_model((4, 3), lambda inputs: layers.Dense(2)(tf.abs(inputs) + 1.0)), X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = keras_qat.verify(qat, keras_qat.export_tflite(qat), X)
    assert report.is_good and "differing_outputs" not in qat.get_config()
