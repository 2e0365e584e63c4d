"""Pictures of models and of quantizers: what is drawn is what there is."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.analysis.drawing.layout import laid_out
from keras_qat.analysis.drawing.model_graph import ISLAND, OWN, SHARED
from keras_qat.analysis.drawing.svg import fitted, width_of
from keras_qat.training.calibration.histogram import Histogram, counts_of, folded
from keras_qat.training.quantizer_statistics import statistics
from tests.helpers import images
from tests.networks.small import functional, layers

X = images(16, (6, 6, 2))


def two_branches(x):
    left = layers.Conv2D(4, 3, padding="same", activation="relu", name="left")(x)
    right = layers.Conv2D(4, 1, name="right")(x)
    x = layers.Concatenate(name="join")([left, right])
    x = layers.Lambda(tf.math.atan, name="angle")(layers.GlobalAveragePooling2D(name="mean")(x))
    return layers.Dense(3, activation="softmax", name="logits")(x)


@pytest.fixture(scope="module")
def qat():
    found = keras_qat.quantize_model(functional((6, 6, 2), build=two_branches, name="two"))
    keras_qat.calibrate(found, X)
    return found


def texts(picture):
    return ["".join(each.itertext()) for each in elements(picture, "text")]


def elements(picture, tag):
    return ElementTree.fromstring(picture.svg).findall(f".//{{http://www.w3.org/2000/svg}}{tag}")


def boxes(picture):
    """Name of each box -> the lines that it tells of, and the colour of its range."""
    found = {}
    for group in elements(picture, "g"):
        told = group.find("{http://www.w3.org/2000/svg}title")
        if told is not None:
            band = group.find("{http://www.w3.org/2000/svg}path")
            lines = told.text.split("\n")
            found[lines[0]] = lines, None if band is None else band.get("fill")
    return found


def test_model(qat, tmp_path):
    picture = keras_qat.plot_model(qat, tmp_path / "model.svg")
    assert (tmp_path / "model.svg").read_text() == picture.svg == picture._repr_svg_()
    drawn = boxes(picture)
    assert list(drawn)[:1] == [f"input {qat.input_names[0]}"]
    assert {"left", "right", "join", "mean", "angle", "logits", "output logits"} <= set(drawn)
    colors = {name: color for name, (_, color) in drawn.items()}
    assert colors["left"] == colors["right"] == colors["join"] == SHARED[0]
    assert colors["mean"] == OWN
    assert "7 operators in integers, 1 in float" in " ".join(texts(picture))
    (layer,) = [each for each in keras_qat.summary(qat).layers if each.name == "left"]
    assert f"int8 [{layer.minimum:.4g}, {layer.maximum:.4g}], 6x6x4" in drawn["left"][0]
    assert drawn["left"][0][1] == "conv + ReLU · 8-bit per channel"


def test_float_islands(qat):
    picture = keras_qat.plot_model(qat)
    islands = [each for each in elements(picture, "rect") if each.get("fill") == ISLAND]
    assert len(islands) == 2  # That of the layer, and what the colour means.
    assert any(each.startswith("float: ") for each in texts(picture))


def test_model_without_ranges():
    picture = keras_qat.plot_model(
        keras_qat.quantize_model(functional((4,), build=layers.Dense(2, name="a>b")))
    )
    assert "8 bits, range not set" in " ".join(texts(picture))
    assert "a>b" in texts(picture)


def test_pages_and_other_endings(qat, tmp_path):
    keras_qat.plot_model(qat, tmp_path / "model.html")
    page = (tmp_path / "model.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and "<svg" in page
    with pytest.raises(ValueError, match=r"\.svg or \.html"):
        keras_qat.plot_model(qat, tmp_path / "model.png")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        keras_qat.plot_model(qat, tmp_path / "none" / "model.svg")
    assert {each.name for each in tmp_path.iterdir()} == {"model.html"}


def test_float_model():
    model = functional((4,), build=layers.Dense(2))
    for verb in (keras_qat.plot_model, lambda each: keras_qat.plot_quantizers(each, X)):
        with pytest.raises(ValueError, match=r"not quantization-aware: call .*quantize_model"):
            verb(model)


def test_nodes_do_not_overlap():
    widths = dict(zip("abcdgefh", (120.0, 80, 200, 90, 300, 60, 60, 100), strict=True))
    edges = ["ab", "ac", "ad", "be", "ce", "ah", "df", "dg", "ge", "eh", "fh"]
    layout = laid_out(widths, [(start, end) for start, end in edges])
    rows: dict[int, list[str]] = {}
    for key, (_, row) in layout.places.items():
        rows.setdefault(row, []).append(key)
    for start, end in edges:
        assert layout.places[start][1] < layout.places[end][1]
        way = layout.ways[start, end]
        assert len(way) == 1 + layout.places[end][1] - layout.places[start][1]
    for line in rows.values():
        ends = sorted((layout.places[key][0], widths[key]) for key in line)
        for (x, width), (y, other) in itertools.pairwise(ends):
            assert y - x >= (width + other) / 2 + 10
    assert min(x - widths[key] / 2 for key, (x, _) in layout.places.items()) >= 0


def test_words_that_fit():
    assert fitted("short", 100) == "short"
    name = fitted("block_12_expand_convolution", 90)
    assert width_of(name) <= 90 and "…" in name
    assert name.startswith("block") and name.endswith("tion")


def test_statistics_are_those_of_numpy(qat):
    x = images(16, (6, 6, 2), seed=9) * 1.5
    found = {each.quantizer.name: each for each in statistics(qat, x)}
    assert list(found) == [each.name for each in keras_qat.quantizers(qat)]
    image = found[f"{qat.input_names[0]}_quant/output"]
    low, high = image.quantizer.minimum, image.quantizer.maximum
    assert image.below == pytest.approx(np.mean(x < low), abs=2e-3)
    assert image.above == pytest.approx(np.mean(x > high), abs=2e-3)
    step = (high - low) / 255
    error = np.clip(np.round(x / step) * step, low, high) - x
    noise = 10 * np.log10(np.sum(x**2) / np.sum(error**2))
    assert image.sqnr == pytest.approx(noise, abs=0.3)
    kernel = qat.get_layer("quant_left").layer.kernel.numpy()
    steps = np.abs(kernel).max((0, 1, 2)) / 127
    error = np.round(kernel / steps) * steps - kernel
    expected = 10 * np.log10(np.sum(kernel**2) / np.sum(error**2))
    assert found["quant_left/kernel"].sqnr == pytest.approx(expected, abs=0.01)
    assert found["quant_left/kernel"].saturation == 0
    assert {each.is_weight for each in found.values()} == {True, False}


def test_energy_of_a_histogram():
    x = images(1, (4000,))
    histogram = Histogram.of(folded(counts_of(tf.constant(x)).numpy()), x.min(), x.max())
    assert histogram.energy == pytest.approx(np.sum(x.astype(np.float64) ** 2), rel=1e-3)


def test_quantizers(qat, tmp_path):
    picture = keras_qat.plot_quantizers(qat, 2 * X, tmp_path / "ranges.html", batch_size=8)
    assert "<svg" in (tmp_path / "ranges.html").read_text()
    words = texts(picture)
    for quantizer in keras_qat.quantizers(qat):
        assert any(each.startswith(quantizer.quantizes[0]) for each in words)
    assert any("cut off" in each for each in words)
    assert any(each.endswith("dB") for each in words)
    # Fixed ranges, as that of a softmax, are quantizers too.
    assert any(each.startswith("8 bits, 0 to 0.996") for each in words)


def test_quantizers_without_ranges():
    fresh = keras_qat.quantize_model(functional((4,), build=layers.Dense(2)))
    assert "range not set" in " ".join(texts(keras_qat.plot_quantizers(fresh, images(4, (4,)))))
