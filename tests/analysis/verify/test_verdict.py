"""Tests the verdict of `verify`: are file and model the same, and is the model good?

`benchmarks.verdicts` tests it with trained networks.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat import recipes
from keras_qat.analysis.verify.results import SignalToNoise
from keras_qat.analysis.verify.verdict import RULES, Figures, grade_figures
from tests.helpers import images, keras, layers, quantize_on, rng

# The warnings of `calibrate` about such data are not tested here.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(The data for i|I)nput", "ignore:.*outside its range", "ignore:The output of"
)

X = rng().uniform(0, 1, (256, 6, 6, 1)).astype(np.float32)


def network(head: Any = None, dead: bool = False, fresh: bool = False, scale: float = 1.0) -> Any:
    """Returns a float network whose classes follow from its input, like a trained network's."""
    keras.utils.set_random_seed(3)

    image = keras.Input((6, 6, 1), name="image")
    x = layers.Conv2D(8, 3, activation="relu", name="conv")(layers.BatchNormalization()(image))
    bias = keras.initializers.Constant(-99.0 * dead)
    x = layers.Flatten()(x)
    x = tf.concat([x, tf.zeros_like(x)], 1) if dead else x  # These zeros are not the cause.
    x = layers.Dense(16, "relu", bias_initializer=bias, name="hidden")(x)
    x = layers.Concatenate(name="both")([x, scale * layers.Dense(1, name="number")(x)])
    model = keras.Model(image, (head or layers.Dense(5, name="logits"))(x))
    if not fresh:
        (norm,) = [layer for layer in model.layers if hasattr(layer, "moving_mean")]
        norm.set_weights(np.float32([[1.0], [0.0], [0.5], [0.1]]))
    return model


def verdict(qat: Any, y: Any = None, **options: Any) -> Any:
    return keras_qat.verify(qat, keras_qat.export_tflite(qat), X, y, **options).verdict


def with_outlier() -> np.ndarray:
    x = X.copy()
    x[0, 0, 0, 0] = 1000.0
    return x


def with_other_weights() -> Any:
    qat = quantize_on(network(), X)
    kernel = qat.get_layer("quant_conv").layer.kernel
    kernel.assign(20 * kernel)
    return qat


@functools.cache
def exported(name: str) -> tuple[Any, bytes]:
    """Returns a model and its file. Tests must not change them."""
    qat = HEALTHY[name]() if name in HEALTHY else POOR[name][0]()
    return qat, keras_qat.export_tflite(qat)


def regressor() -> Any:
    return network(layers.Dense(1, name="value"))


HEALTHY: dict[str, Callable[[], Any]] = {
    "classes": lambda: quantize_on(network(), X),
    "probabilities": lambda: quantize_on(network(layers.Dense(5, "softmax", name="p")), X),
    "a number": lambda: quantize_on(regressor(), X),
    "16 bits": lambda: quantize_on(network(), X, "int16x8"),
}

POOR: dict[str, tuple[Callable[[], Any], str, str]] = {
    "another scale": (lambda: quantize_on(network(), 255 * X), "image", "range is 0 to 255.2, but"),
    "of a number": (lambda: quantize_on(regressor(), 255 * X), "image", "range is 0 to 255.2, but"),
    "an outlier": (lambda: quantize_on(network(), with_outlier()), "image", "without outliers"),
    "part of the range": (lambda: quantize_on(network(), X / 20), "image", "outside its range of"),
    "2 bits": (lambda: quantize_on(network(), X, recipes.low_bits(2, 2)), "conv", "only 2 bits"),
    "later weights": (with_other_weights, "conv", "after the last change of the weights"),
    "dead": (lambda: quantize_on(network(dead=True), X), "hidden", "same for all examples"),
    "a large number": (
        lambda: quantize_on(network(scale=3000.0), X),
        "hidden",
        "shares one range, ",
    ),
    "no statistics": (lambda: quantize_on(network(fresh=True), X), "", "statistics of a new layer"),
}
"""What is wrong -> a model, its weakest layer, and words of the cause."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", HEALTHY)
def test_good(name):
    result = keras_qat.verify(*exported(name), X).verdict
    assert str(result).startswith("Same and good: ") and result.is_same and result.is_good
    assert (result.words, result.weakest_layer, result.likely_cause) == ("same and good", "", "")


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", POOR)
def test_poor(name):
    _, weakest, cause = POOR[name]
    result = keras_qat.verify(*exported(name), X).verdict
    assert result.words == "same but poor" and result.is_same and not result.is_good
    assert result.weakest_layer == weakest
    assert cause in result.likely_cause and result.likely_cause.endswith(".")
    assert str(result).startswith("Same but poor: ") and result.likely_cause[1:] in str(result)


@pytest.mark.parametrize(
    ("model", "rows", "share"), [(network, 2, "1%"), (regressor, 1, "less than 1%")]
)
def test_a_few_values_far_beyond_a_range_are_the_cause(model, rows, share):
    """Anomalies, for example, are less than 2 % of the values, but large."""
    x = X[:32].copy()
    x[5, :rows] *= 200
    qat = quantize_on(model(), X)
    result = keras_qat.verify(qat, keras_qat.export_tflite(qat), x).verdict
    assert not result.is_good
    assert result.weakest_layer == "image"
    assert result.likely_cause.startswith(f"{share} of its values are outside its range of 0 to 1")


def test_what_is_the_same_for_all_examples_beside_others_is_no_cause():
    """Position embeddings may be far larger than the values that they are added to."""
    x = keras.Input((4, 3))
    ends = np.linspace(-50, 50, 12, dtype=np.float32).reshape(1, 4, 3)
    positions = tf.tile(ends, [tf.shape(x)[0], 1, 1])
    model = keras.Model(x, layers.Dense(2)(layers.Add(name="sum")([x, positions])))
    x = rng(0).normal(size=(32, 4, 3)).astype(np.float32) * 0.3
    qat = quantize_on(model, x)
    result = keras_qat.verify(qat, keras_qat.export_tflite(qat), x).verdict
    assert (result.words, result.weakest_layer) == ("same but poor", "sum")
    assert "too coarse for values that vary" in result.likely_cause


def test_some_examples_tell_that_a_model_is_good():
    qat, file = exported("classes")
    (of_all,), (of_some,) = (
        keras_qat.verify(qat, file, X, float_examples=count).outputs for count in (None, 8)
    )
    assert (of_all.float_examples, of_some.float_examples) == (None, 8)
    assert " on 8 examples (set float_examples for more): " in of_some.against_float()
    few = X[np.linspace(0, len(X) - 1, 8).astype(int)]
    (of_few,) = keras_qat.verify(qat, file, few).outputs
    assert of_some.float_sqnr == pytest.approx(of_few.float_sqnr)
    (labelled,) = keras_qat.verify(qat, file, X, np.zeros(len(X)), float_examples=8).outputs
    assert labelled.float_examples is None  # The float accuracy is the accuracy on all examples.


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", POOR)
def test_more_examples_tell_that_a_model_is_poor(name):
    """Four times as many examples are run if fewer are inconclusive."""
    qat, file = exported(name)
    reports = [keras_qat.verify(qat, file, X, float_examples=n) for n in (None, 8, 100)]
    assert [report.outputs[0].float_examples for report in reports] == [None, 32, None]
    assert len({report.verdict for report in reports}) == 1


def test_poor_from_data_without_content():
    """Ranges of zeros do not depend on the data that follows."""
    with pytest.warns(UserWarning, match="All values of the calibration data are 0"):
        qat = quantize_on(network(), 0 * X)
    assert verdict(qat).words == "same but poor"


def test_not_the_same():
    qat, other = quantize_on(network(), X), quantize_on(network(), X)
    other.get_layer("quant_hidden").layer.bias.assign(np.arange(16) / 8)
    with pytest.warns(UserWarning, match="other weights"):
        report = keras_qat.verify(qat, keras_qat.export_tflite(other), X)
    assert report.verdict.words == "not the same" and not report.verdict.is_same
    cause = report.verdict.likely_cause
    assert "exported from other weights" in cause and "random" not in cause


def test_other_kernels_round_in_another_way():
    """Other rounding changes single values by one step. The model stays the same."""
    assert keras_qat.verify(*exported("classes"), X, kernels="reference").verdict.is_good


def test_does_not_judge_by_examples_that_are_all_the_same():
    report = keras_qat.verify(*exported("classes"), np.zeros_like(X))
    assert report.verdict.words == "same"


def test_does_not_judge_by_examples_that_hardly_differ():
    """Images of a static camera cannot show that a model is good, but can show a wrong scale."""
    alike = X[:1] + rng().normal(0, 0.002, (20, *X.shape[1:]))
    report = keras_qat.verify(*exported("classes"), alike)
    assert report.verdict.words == "same" and report.outputs[0].float_argmax_agreement == 1
    assert keras_qat.verify(*exported("another scale"), X[:20]).verdict.words == "same but poor"


def test_does_not_judge_a_rare_event_by_examples_without_it():
    rare = layers.Dense(1, "sigmoid", bias_initializer=keras.initializers.Constant(-9.0))
    assert verdict(quantize_on(network(rare), X)).words == "same"


@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_few_examples_of_a_good_model(count):
    """Single entries of the outputs may hardly differ."""
    qat, file = exported("classes")
    verdicts = {keras_qat.verify(qat, file, X[at : at + count]).verdict.words for at in range(8)}
    assert verdicts == {"same and good"}


def test_is_where_people_look():
    report = keras_qat.verify(*exported("another scale"), X, per_layer=True)
    assert "Same but poor: the file computes the same as the model, but the model" in str(report)
    data = json.loads(report.to_json())["verdict"]
    assert (data["words"], data["weakest_layer"]) == ("same but poor", "image")
    (image,) = [tensor for tensor in report.tensors if tensor.name == "image"]
    assert image.range_used == pytest.approx(np.ptp(X) / np.ptp(255 * X), rel=0.05)
    assert image.clipped == 0


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.zeros(3), "3 labels of 'logits' for 256 examples"),
        (np.full(256, 0.5), "neither classes"),
        (np.zeros((256, 4)), "neither classes"),
        ({"p": np.zeros(256)}, "labels for 'p', which is not an output"),
    ],
)
def test_labels_that_do_not_fit(labels, message):
    with pytest.raises(ValueError, match=message):
        keras_qat.verify(*exported("classes"), X, labels)


@pytest.mark.filterwarnings("ignore:These layers compute in float")
def test_random_numbers_at_inference_are_named():
    noise = layers.Lambda(lambda x: x + 3.0 * tf.random.normal(tf.shape(x)), name="noise")
    report = verdict(quantize_on(network(lambda x: layers.Dense(5)(noise(x))), X))
    assert not report.is_same
    assert "draws random numbers at inference" in report.likely_cause


@pytest.mark.sample(1)
@pytest.mark.parametrize("target", [None, "ethos_u55"])
def test_examples_that_depend_on_others_are_named(target):
    """Such as a layer that normalizes by the batch's statistics. TFLite Micro has no EXP."""
    centered = layers.Lambda(lambda x: tf.exp(x - tf.reduce_mean(x, axis=0, keepdims=True)))
    inputs, x = keras.Input((4,)), images(16, (4,))
    qat = quantize_on(keras.Model(inputs, centered(inputs)), x, target=target)
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat, batch_size=1), x)
    assert "computes over all examples of a batch" in report.verdict.likely_cause
    if target is None:
        whole = keras_qat.verify(qat, keras_qat.export_tflite(qat, batch_size=16), x)
        assert whole.identical == 1 and not whole.notes


def test_rows_that_are_not_those_of_the_examples_are_named():
    inputs, x = keras.Input((3, 4)), images(8, (3, 4))
    model = keras.Model(
        inputs, layers.Lambda(lambda x: x[0], name="first")(layers.Dense(5)(inputs))
    )
    qat = quantize_on(model, x, target="ethos_u55")
    with pytest.raises(ValueError, match="has 3 rows in the model and 24 in the file"):
        keras_qat.verify(qat, keras_qat.export_tflite(qat), x)


def describe(figures: Figures, decisions: str) -> str:
    least = f" (of {figures.rows} or more)" * bool(figures.rows)
    share = "" if figures.same is None else f" and {100 * figures.same:g} % of the {decisions}"
    return f"{figures.sqnr:g} dB{share}{least}"


def test_the_page_shows_the_rules():
    page = (Path(__file__).parents[3] / "docs" / "reading.md").read_text("utf-8")
    for use, (recognized, decisions, good, poor) in RULES.items():
        ends = [", or ".join(describe(x, decisions) for x in good)]
        ends += [", or ".join(f"below {describe(x, decisions)}" for x in poor)]
        assert f"| {use} | {recognized} | {ends[0]} | {ends[1]} |\n" in page


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        (("values", 17.1, None, 100), "same and good"),
        (("values", 16.9, None, 100), "same"),
        (("values", 4.9, None, 100), "same but poor"),
        (("signals", 17.1, None, 100), "same"),
        (("values", None, None, 100), None),
        (("classes", 9.6, 0.99, 200), "same and good"),
        (("classes", 9.6, 0.99, 20), "same"),
        (("classes", 9.6, 0.7, 200), "same but poor"),
        (("classes or values", 9.6, 0.97, 200), "same"),
        (("classes", 20.0, 0.5, 200), "same"),
        (("classes", 22.5, 0.952, 400), "same"),
        (("decisions", 4.0, None, 200), "same but poor"),
        (("embeddings", 12.0, 0.99, 200), "same and good"),
        (("embeddings", 25.0, 0.99, 4), "same and good"),
    ],
)
def test_figures_without_labels(figures, words):
    assert grade_figures(*figures) == words


def test_values_beyond_the_range_leave_a_good_figure_open():
    """Most values are clipped, but no result depends on them. Labels then decide."""
    image = keras.Input((6, 6, 1), name="image")
    model = keras.Model(image, layers.Dense(1)(layers.Flatten()(tf.nn.relu6(image))))
    within = np.minimum(12 * X, 6)
    qat = quantize_on(model, within)
    file = keras_qat.export_tflite(qat)
    assert keras_qat.verify(qat, file, within).verdict.is_good
    result = keras_qat.verify(qat, file, 12 * X)
    assert result.verdict.words == "same" and result.outputs[0].float_sqnr > 17
    assert "outside its range" in result.verdict.likely_cause
    targets = model.predict(12 * X, verbose=0)
    assert keras_qat.verify(qat, file, 12 * X, targets).verdict.is_good


def test_many_values_are_added_in_blocks():
    exact = rng().normal(1, 0.1, (300, 70, 11)).astype(np.float32)
    q = np.rint(exact * 50).astype(np.int8)
    ratio = SignalToNoise()
    for rows in (slice(200), slice(200, 300)):
        ratio.add(exact[rows], q[rows], lambda codes: codes / 50)
    noise = np.sum((q / 50 - exact.astype(np.float64)) ** 2)
    signal = np.sum((exact - exact.mean(0, dtype=np.float64)) ** 2)
    assert ratio.in_decibels == pytest.approx(10 * np.log10(signal / noise), rel=1e-9)


@pytest.mark.slow
def test_the_weakest_layer_does_not_depend_on_the_memory_for_it(monkeypatch):
    qat = quantize_on(network(), with_outlier())
    expected = verdict(qat)
    monkeypatch.setattr("keras_qat.analysis.verify.layers.MOST_VALUES", 1)
    assert verdict(qat) == expected and expected.weakest_layer
