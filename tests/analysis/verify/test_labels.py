"""Tests that labels decide the verdict of `verify`, by accuracy or error."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import keras_qat
from keras_qat.analysis.verify.labels import interpret_labels
from keras_qat.analysis.verify.scores import score_output
from keras_qat.keras2.losses import find_losses
from tests.helpers import build_model, keras, layers, quantize_on, rng

pytestmark = pytest.mark.filterwarnings(
    "ignore:(The data for i|I)nput", "ignore:.*outside its range", "ignore:The output of"
)

X = rng(0).normal(size=(300, 6)).astype(np.float32)


def dense(units: int, activation: Any = None, outside: float = 0.0) -> Any:
    """Returns a layer with known weights, which answers correctly."""
    model = build_model((6,), layers.Dense(units, activation, name="out"))
    weights = np.linspace(-1, 1, 6 * units).reshape(6, units) ** 3 + np.eye(6, units)
    model.set_weights([weights, np.full(units, outside)])
    return model


def report(model: Any, y: Any, data: np.ndarray = X, loss: Any = None) -> Any:
    qat = quantize_on(model, data)
    if loss is not None:
        qat.compile("sgd", loss)
    return keras_qat.verify(qat, keras_qat.export_tflite(qat), X, y)


def answers(model: Any) -> np.ndarray:
    return model.predict(X, verbose=0)


KINDS: dict[str, tuple[dict[str, Any], Callable[[np.ndarray], np.ndarray]]] = {
    "one_linear": ({"units": 1}, lambda y: np.rint(20 * y) / 20),
    "integers": ({"units": 1, "outside": 20.0}, lambda y: np.rint(y).astype(int)[:, 0]),
    "several_integers": ({"units": 3, "outside": 9.0}, lambda y: np.rint(y).astype(int)),
    "one_sigmoid": ({"units": 1, "activation": "sigmoid"}, lambda y: (y > 0.5).astype(int)),
    "several_labels": ({"units": 4, "activation": "sigmoid"}, lambda y: (y > 0.5).astype(int)),
    "one_hot": ({"units": 4, "activation": "softmax"}, lambda y: np.eye(4)[y.argmax(-1)]),
    "class_numbers": ({"units": 4}, lambda y: y.argmax(-1)[:, None]),
}
"""Name -> options of the layer, and labels that follow from its answers."""
ERRORS = ("one_linear", "integers", "several_integers")


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_labels_of_each_kind(kind):
    """By its labels, a good model is good, and a model with the ranges of other data is poor."""
    options, labels = KINDS[kind]
    measure = "mean squared error" if kind in ERRORS else "accuracy"
    y = labels(answers(model := dense(**options)))
    good = report(model, y)
    (output,) = good.outputs
    assert output.score.measure == measure and output.score.lost_points < 0.02
    assert good.is_good and "According to the labels of 'out'" in str(good)
    assert (output.accuracy is None) == (measure != "accuracy")
    assert report(model, y, data=500 * X).verdict.words == "same but poor"


def test_a_regression_of_zeros_and_ones_is_told_by_its_loss():
    model = dense(1, outside=0.5)
    y = (answers(model) > 0.5).astype(int)
    (by_error,) = report(model, y, loss="mse").outputs
    (by_answers,) = report(model, y, loss=keras.losses.BinaryCrossentropy(True)).outputs
    (unknown,) = report(model, y).outputs
    assert by_error.score.measure == "mean squared error" and by_error.accuracy is None
    assert by_answers.accuracy < 0.9 < unknown.accuracy  # The threshold for logits is 0.


def test_the_error_is_that_of_the_own_loss():
    def pinball(y: Any, predicted: Any) -> Any:
        return keras.backend.mean(keras.backend.maximum(0.9 * (y - predicted), predicted - y), -1)

    model = dense(1, outside=20.0)
    result = report(model, answers(model) + 0.1, loss=pinball)
    (output,) = result.outputs
    assert output.score.measure == "pinball" and result.is_good
    assert output.score.float_value == pytest.approx(0.09, rel=1e-3)
    (output,) = report(model, answers(model) + 0.1, loss="mae").outputs
    assert output.score.measure == "mean absolute error"


def test_what_speaks_against_a_model_only_explains_what_its_labels_say():
    """An untrained BatchNormalization does not matter if the model's answers are right."""
    model = build_model((6,), lambda image: layers.Dense(3)(layers.BatchNormalization()(image)))
    truth = answers(model).argmax(-1)
    assert report(model, truth).is_good
    assert "statistics of a new layer" in report(model, None).verdict.likely_cause


def test_labels_that_are_too_few_leave_it_to_the_figures():
    model = dense(2)
    result = report(model, rng(3).integers(0, 2, 300)).verdict
    assert result.words == "same but poor" and "no better than guessing" in result.likely_cause
    qat = quantize_on(model, X)
    few = keras_qat.verify(qat, keras_qat.export_tflite(qat), X[:4], [0, 1, 1, 0])
    assert few.is_good  # At least 25 dB.


def scored(labels: Any, exact: Any, values: Any, gates: bool = False, **options: Any) -> Any:
    exact, values = (np.asarray(y, np.float32) for y in (exact, values))
    options = {"use": "classes or values", "loss": None, **options}
    read = interpret_labels(np.asarray(labels), exact, **options)
    return score_output("out", read, exact, values, gates, [])


def test_a_rare_class_is_not_forgotten():
    """Always answering "never" is right for 99 % of the examples."""
    truth = np.zeros((2000, 1), int)
    truth[:40] = 1
    exact = 0.9 * truth + 0.05
    exact[:50] = 0.9
    never = scored(truth, exact, np.full_like(exact, 0.1, np.float32), gates=True)
    assert never.accuracy == 0.98 and never.lost_gain == 1
    exact[:100] = 0.9  # Right less often than "never", but more useful.
    never = scored(truth, exact, np.full_like(exact, 0.1, np.float32), gates=True)
    assert never.measure == "balanced accuracy" and never.guess == 0.5 == pytest.approx(never.value)
    assert never.float_value == pytest.approx((1 + 1900 / 1960) / 2)


def test_one_channel_of_targets_that_is_lost():
    truth = rng(1).normal(size=(200, 3)) * [100, 100, 0.1]
    values = np.round(truth)
    result = scored(truth, truth, values)
    assert result.channel == 2 and result.lost_points > 0.5
    assert scored(truth, truth, np.round(truth, 3)).lost_points < 0.02


def test_vectors_are_scored_by_their_neighbours():
    classes = rng(2).integers(0, 12, 240)
    centers = rng(3).normal(size=(12, 8))
    vectors = centers[classes] + 0.1 * rng(4).normal(size=(240, 8))
    vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
    for use in ("embeddings", "classes or values"):
        result = scored(classes % 6, vectors, vectors, use=use)
        assert result.measure == "accuracy of the nearest neighbour" and result.value > 0.9
    result = scored(classes, vectors, vectors, use="embeddings")
    assert result.measure == "accuracy of the nearest neighbour" and result.value > 0.98
    shuffled = scored(classes, vectors, np.roll(vectors, 1, 0)[::-1], use="embeddings")
    assert shuffled.lost > 0.5


def test_a_denoiser_has_to_be_better_than_what_goes_in():
    clean = rng(5).normal(size=(50, 64))
    noisy = clean + 0.1 * rng(6).normal(size=clean.shape)
    truth = clean[..., None]
    labels = interpret_labels(truth, truth, "values", None)
    figures = score_output("out", labels, 0.99 * truth, noisy[..., None], False, [noisy[..., None]])
    assert figures.guess == pytest.approx(0.01, rel=0.1) and figures.lost_gain > 0.9


def test_labels_of_a_segmentation_may_leave_out_pixels():
    exact = rng(7).normal(size=(10, 4, 4, 3))
    truth = exact.argmax(-1)
    truth[:, 0] = 255
    assert scored(truth, exact, exact).value == 1


def test_a_class_that_an_output_does_not_have_is_wrong():
    exact = rng(8).normal(size=(40, 3))
    assert scored(exact.argmax(-1) + 1, exact, exact, use="classes").value < 0.1


def test_losses_of_several_outputs():
    image = keras.Input((6,))
    outputs = {"b": layers.Dense(2, name="b")(image), "a": layers.Dense(1, name="a")(image)}
    qat = keras_qat.quantize_model(keras.Model(image, outputs))
    assert find_losses(qat, ["a", "b"]) == [None, None]
    qat.compile("sgd", {"a": "mse", "b": keras.losses.CategoricalCrossentropy()})
    kinds = [loss and (loss.name, loss.kind) for loss in find_losses(qat, qat.output_names)]
    assert dict(zip(qat.output_names, kinds, strict=True)) == {
        "a": ("mean_squared_error", "values"),
        "b": ("categorical_crossentropy", "classes"),
    }
