"""Tests `tune`: its steps, its budget, its errors, and continuing after an interruption."""

import dataclasses
import re

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.analysis.tune.score import Judge, Score
from tests.helpers import assert_all_equal, keras, layers, values

X = np.random.default_rng(0).normal(size=(240, 6)).astype("float32")
Y = (X[:, 0] * X[:, 1] > 0).astype("int64")
TRAIN, VALIDATION = (X[:160], Y[:160]), (X[160:], Y[160:])


@pytest.fixture(scope="module")
def classifier():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,), name="row")
    hidden = layers.Dense(16, "relu")(layers.Dense(16, "relu")(inputs))
    model = keras.Model(inputs, layers.Dense(2, "softmax", name="label")(hidden))
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", ["accuracy"])
    model.fit(*TRAIN, epochs=10, verbose=0)
    return model


@pytest.fixture(scope="module")
def regressor(classifier):
    """Returns a model without any error on its labels, which no quantized model can match."""
    model = keras.Model(classifier.inputs, classifier.outputs)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model, (X[:160], model.predict(X[:160])), (X[160:], model.predict(X[160:]))


def measure_nearness(labels, predictions):
    return 1 / (1 + np.mean((labels - predictions) ** 2))


@pytest.fixture(scope="module")
def easy_search(classifier):
    """Runs a search that ends with its first attempt."""
    return keras_qat.tune(classifier, TRAIN, VALIDATION, max_drop=100, verbose=0)


@pytest.fixture(scope="module")
def whole_search(regressor):
    """Runs a complete search with a budget that cannot be met."""
    return keras_qat.tune(*regressor, metric=measure_nearness, max_drop=0, verbose=0)


def make_detector():
    """Returns a model that concatenates boxes, with values up to hundreds, and scores up to 1."""
    keras.utils.set_random_seed(2)
    inputs = keras.Input((6,))
    boxes = layers.Dense(2, name="boxes", bias_initializer=keras.initializers.Constant(500))(inputs)
    scores = layers.Dense(3, "softmax", name="scores")(inputs)
    return keras.Model(inputs, layers.Concatenate(name="detections")([boxes, scores]))


def choose_class(labels, predictions):
    return np.mean(labels.argmax(-1) == predictions[:, 2:].argmax(-1))


def without_times(result):
    return [dataclasses.replace(attempt, seconds=0.0) for attempt in result.attempts]


def test_ranges_from_data_are_enough_for_an_easy_model(classifier, tmp_path, capsys):
    before = values(classifier.weights)
    options = {"max_drop": 100, "directory": tmp_path / "search"}
    result = keras_qat.tune(classifier, TRAIN, VALIDATION, **options)
    assert result.is_met
    assert [attempt.outcome for attempt in result.attempts] == ["kept"]
    assert result.metric == "accuracy"
    assert "ranges from data: calibrate (kept)" in capsys.readouterr().out
    contents = result.export(tmp_path / "model.tflite")
    assert len(contents) == result.best.size
    accuracy = np.mean(result.model.predict(VALIDATION[0], verbose=0).argmax(-1) == VALIDATION[1])
    assert accuracy == pytest.approx(result.best.value)
    assert_all_equal(values(classifier.weights), before)
    again = keras_qat.tune(classifier, TRAIN, VALIDATION, **options, verbose=0)
    assert again.attempts == result.attempts


@pytest.mark.slow
def test_a_directory_can_hold_attempts_for_other_models_and_data(classifier, tmp_path):
    options = {"max_drop": 100, "directory": tmp_path, "verbose": 0}
    result = keras_qat.tune(classifier, TRAIN, VALIDATION, **options)
    other = keras.models.clone_model(classifier)
    other.compile("adam", "sparse_categorical_crossentropy", ["accuracy"])
    for model, labels in ((classifier, 1 - Y[160:]), (other, Y[160:])):
        apart = keras_qat.tune(model, TRAIN, (X[160:], labels), **options)
        accuracy = np.mean(apart.model.predict(X[160:], verbose=0).argmax(-1) == labels)
        assert apart.best.value == pytest.approx(accuracy)
        assert apart.best.value != result.best.value


def test_the_whole_ladder_is_tried_for_a_budget_that_cannot_be_met(whole_search):
    result = whole_search
    assert not result.is_met
    steps = {attempt.step: attempt for attempt in result.attempts}
    assert list(steps) == [
        *("ranges from data", "corrected biases", "other ranges"),
        *("file ends before concatenated outputs", "learned rounding"),
        *("sensitive layers in float", "training", "16-bit activations"),
    ]
    assert steps["learned rounding"].outcome.endswith("weights of 8 bits")
    assert steps["training"].drop is not None
    assert result.best.drop == min(a.drop for a in result.attempts if a.drop is not None)
    assert "NOT within the budget" in str(result)


def test_files_end_before_outputs_that_share_a_range():
    model = make_detector()
    labels = np.eye(3)[model.predict(X, verbose=0)[:, 2:].argmax(-1)]
    data = (X[:160], labels[:160]), (X[160:], labels[160:])
    result = keras_qat.tune(model, *data, metric=choose_class, max_drop=2, verbose=0)
    assert result.is_met
    assert result.best.step == "file ends before concatenated outputs"
    assert "outputs=['boxes', 'scores']" in result.best.settings


def test_without_labels_the_float_model_is_the_reference(classifier):
    train = tf.data.Dataset.from_tensor_slices(TRAIN[0]).batch(32)
    result = keras_qat.tune(classifier, train, VALIDATION[0], max_drop=100, verbose=0)
    same = classifier.predict(VALIDATION[0], verbose=0).argmax(-1)
    agreement = np.mean(result.model.predict(VALIDATION[0], verbose=0).argmax(-1) == same)
    assert result.metric == "agreement with the float model"
    assert result.float_value == 1
    assert result.best.value == pytest.approx(agreement)


@pytest.mark.slow
def test_smaller_files(classifier, easy_search):
    size = easy_search.best.size
    options = {"max_drop": 100, "max_size": size - 1, "verbose": 0}
    result = keras_qat.tune(classifier, TRAIN, VALIDATION, **options)
    assert result.best.size < size
    assert len(result.export(None)) == result.best.size
    sizes = [attempt.size for attempt in result.smallest]
    assert sizes == sorted(sizes)


@pytest.mark.slow
def test_a_search_that_was_interrupted_continues(regressor, whole_search, tmp_path):
    calls, limit = 0, 3 * 21

    def interrupted(labels, predictions):
        nonlocal calls
        calls += 1
        if calls > limit:
            raise KeyboardInterrupt
        return measure_nearness(labels, predictions)

    def search():
        options = {"max_drop": 0, "verbose": 0, "directory": tmp_path / "search"}
        return keras_qat.tune(*regressor, metric=interrupted, **options)

    first = search()
    assert first.interrupted
    assert 0 < len(first.attempts) < len(whole_search.attempts)
    limit = 10**9
    second = search()
    assert not second.interrupted
    assert without_times(second) == without_times(whole_search)
    np.testing.assert_array_equal(second.model(X), whole_search.model(X))


@pytest.mark.slow
def test_the_search_ends_within_the_budget_even_if_the_interval_is_wide(classifier, monkeypatch):
    scores = iter([Score(0.8, 10.0, 50.0, 20.0), Score(0.9, 0.1, 50.0, 20.0)])
    monkeypatch.setattr(Judge, "score", lambda *_: next(scores))
    result = keras_qat.tune(classifier, TRAIN, VALIDATION, max_drop=0.5, verbose=0)
    assert [a.outcome for a in result.attempts] == ["kept", "kept: within the budget"]
    assert result.best == result.attempts[1]


@pytest.mark.slow
def test_memory_counts_for_microcontrollers(classifier):
    pytest.importorskip("tflite_micro")
    result = keras_qat.tune(classifier, TRAIN, VALIDATION, target="tflm", max_drop=100, verbose=0)
    report = keras_qat.verify(result.model, result.export(None), VALIDATION[0])
    assert result.best.arena == report.arena_size
    larger = dataclasses.replace(result.best, size=result.best.size - 1, arena=10**6)
    worse = dataclasses.replace(larger, size=result.best.size)
    both = dataclasses.replace(result, attempts=(result.best, larger, worse))
    assert both.smallest == (larger, result.best)


MISTAKES = {
    "is quantized already": lambda m: {"model": keras_qat.quantize_model(m)},
    "max_drop=-1": lambda m: {"max_drop": -1},
    "minutes=0": lambda m: {"minutes": 0},
    "max_size=0": lambda m: {"max_size": 0},
    "min_bits=1": lambda m: {"min_bits": 1},
    "80 of 80 validation examples": lambda m: {"train": VALIDATION},
    "is empty": lambda m: {"validation": (X[:0], Y[:0])},
    "80 examples but 79 labels": lambda m: {"validation": (X[160:], Y[161:])},
    "needs labels": lambda m: {"validation": X[160:], "metric": measure_nearness},
    "target='cortex'": lambda m: {"target": "cortex"},
    "no recipe 'int7'": lambda m: {"recipe": "int7"},
    "not compiled": lambda m: {"model": make_detector()},
    "never ends": lambda m: {"train": tf.data.Dataset.from_tensors(TRAIN).repeat()},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_get_an_answer(message, classifier):
    arguments = {"model": classifier, "train": TRAIN, "validation": VALIDATION, "verbose": 0}
    arguments |= MISTAKES[message](classifier)
    with pytest.raises(ValueError, match=re.escape(message)):
        keras_qat.tune(**arguments)


def test_targets_decide_what_is_tried(regressor):
    options = {"max_drop": 0, "target": "ethos_u55", "minutes": 0.001, "verbose": 0}
    result = keras_qat.tune(*regressor, metric=measure_nearness, **options)
    assert result.model.target.name == "ethos_u55"
    assert result.attempts[-1].outcome == "no time is left"
