"""Pictures of models and of quantizers: what is drawn is what there is."""

import re
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

import keras_qat
from keras_qat.analysis.drawing.model_graph import FLOAT_ROW, OWN, SHARED, UNSET
from keras_qat.training.quantizer_statistics import compute_statistics
from tests.browser import data_after, in_browser
from tests.helpers import images, quantize_on
from tests.networks.small import functional, layers

pytest.importorskip("matplotlib")

X = images(16, (6, 6, 2))


def two_branches(x):
    left = layers.Conv2D(4, 3, padding="same", activation="relu", name="left")(x)
    right = layers.Conv2D(4, 1, name="right")(x)
    x = layers.Concatenate(name="join")([left, right])
    x = layers.GlobalAveragePooling2D(name="mean")(x)
    x = layers.LayerNormalization(name="angle")(x)
    return layers.Dense(3, activation="softmax", name="logits")(x)


@pytest.fixture(scope="module")
def qat():
    quantized = quantize_on(functional((6, 6, 2), build=two_branches, name="two"), X)
    return quantized


def texts(picture):
    return ["".join(element.itertext()) for element in elements(picture, "text")]


def elements(picture, tag):
    return ElementTree.fromstring(picture.svg).findall(f".//{{http://www.w3.org/2000/svg}}{tag}")


def rows(picture):
    """Words of the texts that stand on one line, by the first of them: a row for each operator."""
    lines: dict[str, list[tuple[float, str]]] = {}
    for element in elements(picture, "text"):
        x, y = float(element.get("x")), float(element.get("y"))
        lines.setdefault(f"{y:.3f}", []).append((x, "".join(element.itertext())))
    words = [[text for _, text in sorted(line)] for line in lines.values()]
    return {line[0]: line for line in reversed(words)}


def colors(picture):
    """Name of a row -> the colour of its range."""
    result = {}
    for group in elements(picture, "g"):
        if (group.get("id") or "").startswith("range of "):
            (band,) = group.findall("{http://www.w3.org/2000/svg}path")
            (color,) = re.findall(r"fill: (#\w+)", band.get("style"))
            result[group.get("id").removeprefix("range of ")] = color
    return result


def test_model(qat, tmp_path):
    picture = keras_qat.plot_model(qat, tmp_path / "model.svg")
    assert (tmp_path / "model.svg").read_text() == picture.svg == picture._repr_svg_()
    drawn, color = rows(picture), colors(picture)
    assert texts(picture)[:2] == [qat.input_names[0], "input"]
    assert {"left", "right", "join", "mean", "angle", "logits"} <= set(drawn)
    assert texts(picture).count("logits") == 2  # The operator, and the output.
    assert color["left"] == color["right"] == color["join"] == SHARED[0]
    assert color["mean"] == OWN
    assert "7 operators in integers, 1 in float" in texts(picture)
    (layer,) = [layer for layer in keras_qat.summary(qat).layers if layer.name == "left"]
    ends = f"int8 [{layer.minimum:.4g}, {layer.maximum:.4g}]"
    step = f"{layer.scale:.4g}, zero {layer.zero_point}"
    assert drawn["left"] == ["left", "conv + ReLU · 8-bit per channel", ends, step, "6x6x4"]


def test_edges_lead_to_what_reads(qat):
    """The ends of the lines are the dots of two rows, one of which reads the other."""
    picture = keras_qat.plot_model(qat)
    ways = [re.findall(r"[\d.]+", element.get("d") or "") for element in elements(picture, "path")]
    ends = [(way[:2], way[-2:]) for way in ways if len(way) == 10]
    dots = [(element.get("x"), element.get("y")) for element in elements(picture, "use")]
    dots = dots[-len(set(dots)) :]
    places = {f"{float(y):.3f}": index for index, (_, y) in enumerate(dots)}
    edges = {tuple(places[f"{float(y):.3f}"] for _, y in pair) for pair in ends}
    #   input 0, left 1, right 2, join 3, mean 4, angle 5, its quantizer 6, logits 7, softmax 8
    assert edges >= {(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (4, 5)}
    assert all(start < end for start, end in edges) and len(edges) == len(ends)


def test_float_islands(qat):
    picture = keras_qat.plot_model(qat)
    fills = [
        re.findall(r"fill: (#\w+)", element.get("style") or "")
        for element in elements(picture, "path")
    ]
    assert fills.count([FLOAT_ROW]) == 3  # The row, its type and what the colour means.
    assert colors(picture)["angle"] != SHARED[0]
    assert any(text.startswith("float: ") for text in texts(picture))


def test_model_without_ranges():
    picture = keras_qat.plot_model(
        keras_qat.quantize_model(functional((4,), build=layers.Dense(2, name="a>b")))
    )
    assert rows(picture)["a>b"][2] == "8 bits, range not set"
    assert colors(picture)["a>b"] == UNSET


@pytest.mark.parametrize("verb", ["plot_model", "plot_quantizers"])
def test_pictures_say_what_they_need(qat, verb, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'keras-qat\[plot\]'"):
        getattr(keras_qat, verb)(qat, *([X] if verb == "plot_quantizers" else []))


def test_pages_and_other_endings(qat, tmp_path):
    keras_qat.plot_model(qat, tmp_path / "model.html")
    page = (tmp_path / "model.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and "<svg" in page
    with pytest.raises(ValueError, match=r"\.svg or \.html"):
        keras_qat.plot_model(qat, tmp_path / "model.png")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        keras_qat.plot_model(qat, tmp_path / "none" / "model.svg")
    assert {path.name for path in tmp_path.iterdir()} == {"model.html"}


def test_statistics_are_those_of_numpy(qat):
    x = images(16, (6, 6, 2), seed=9) * 1.5
    result = {statistic.quantizer.name: statistic for statistic in compute_statistics(qat, x)}
    assert list(result) == [quantizer.name for quantizer in keras_qat.quantizers(qat)]
    image = result[f"{qat.input_names[0]}_quant/output"]
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
    assert result["quant_left/kernel"].sqnr == pytest.approx(expected, abs=0.01)
    assert result["quant_left/kernel"].saturation == 0
    assert {item.is_weight for item in result.values()} == {True, False}


def test_quantizers(qat, tmp_path):
    picture = keras_qat.plot_quantizers(qat, 2 * X, tmp_path / "ranges.html", batch_size=8)
    assert "<svg" in (tmp_path / "ranges.html").read_text()
    words = texts(picture)
    for quantizer in keras_qat.quantizers(qat):
        assert any(word.startswith(quantizer.quantizes[0]) for word in words)
    assert any("cut off" in word for word in words)
    assert any(word.endswith("dB") for word in words)
    # Fixed ranges, as that of a softmax, are quantizers too.
    assert any(word.startswith("8 bits, 0 to 0.996") for word in words)


@pytest.mark.slow
@in_browser
def test_pages_have_search_and_zoom(qat, tmp_path):
    script = """
        const [field, zoom] = document.querySelectorAll('input');
        const svg = document.querySelector('svg'), width = svg.getBoundingClientRect().width;
        field.value = 'LOGITS'; field.dispatchEvent(new Event('input'));
        document.querySelector('form').dispatchEvent(new Event('submit', {cancelable: true}));
        document.body.dataset.found = document.querySelector('output').value;
        zoom.value = 2; zoom.dispatchEvent(new Event('input'));
        document.body.dataset.zoom = (svg.getBoundingClientRect().width / width).toFixed(1);
    """
    keras_qat.plot_model(qat, tmp_path / "model.html")
    data = data_after((tmp_path / "model.html").read_text(), script, tmp_path)
    assert data == {"found": "2 of 3", "zoom": "2.0"}
