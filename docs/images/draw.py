"""Draws the pictures of the pages: `python docs/images/draw.py`, with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("svg")
mpl.rcParams |= {
    "svg.fonttype": "none",  # Text stays text: small files that can be searched.
    "svg.hashsalt": "keras_qat",  # The same bytes each time.
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
from matplotlib import pyplot as plt  # noqa: E402

BLUE, ORANGE, GREEN, GREY = "#3f51b5", "#e65100", "#2e7d32", "#757575"


def save(figure: Any, name: str) -> None:
    """Writes a picture beside this file."""
    path = Path(__file__).with_name(f"{name}.svg")
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def fake_quantization() -> None:
    """What a fake quantizer computes, and its gradient."""
    low, high, bits = -1.0, 2.0, 3
    scale = (high - low) / (2**bits - 1)
    zero_point = round(-low / scale)
    x = np.linspace(-2, 3, 1001)
    codes = np.clip(np.round(x / scale) + zero_point, 0, 2**bits - 1)
    values = scale * (codes - zero_point)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    left.plot(x, x, color=GREY, lw=1, ls=":", label="float")
    left.plot(x, values, color=BLUE, label="fake-quantized, 3 bits")
    left.set(xlabel="value", title="forwards: rounded and clipped")
    left.legend(loc="upper left")
    ends = values.min(), values.max()
    right.plot(x, (x >= ends[0]) & (x <= ends[1]), color=ORANGE)
    right.set(xlabel="value", title="backwards: gradient 1 within the range", yticks=[0, 1])
    for axes in (left, right):
        for end in ends:
            axes.axvline(end, color=GREY, lw=0.8, ls="--")
    save(figure, "fake_quantization")


def ranges() -> None:
    """How moving averages begin, and what extremes cost."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    steps = np.arange(0, 5001, 100)
    left.plot(steps, 1 + 5 * 0.999**steps, color=ORANGE, label="begins at 6 (tfmot)")
    left.plot(steps, np.ones(len(steps)), color=BLUE, label="begins with data (keras_qat)")
    left.set(xlabel="training step", title="maximum of a tensor that is 1\n", ylim=(0, 6.2))
    left.legend()
    numbers = np.random.default_rng(0).normal(size=20_000)
    numbers[0] = 7.5
    right.hist(numbers, 60, histtype="stepfilled", color="#c5cae9")
    right.set_yscale("log")
    ends = ((numbers.max(), ORANGE, "minmax"), (np.percentile(numbers, 99.99), GREEN, "percentile"))
    for value, color, label in ends:
        right.axvline(value, color=color)
        right.text(value, 1500, label, color=color, ha="center")
    right.set(xlabel="value", title="one outlier, and where ranges end\n")
    save(figure, "ranges")


def box(axes: Any, x: float, y: float, text: str, color: str = BLUE, width: float = 1.6) -> None:
    """A box with a text."""
    face = plt.matplotlib.patches.FancyBboxPatch(
        (x, y), width, 0.7, boxstyle="round,pad=0.05", fc="white", ec=color, lw=1.5
    )
    axes.add_patch(face)
    axes.text(x + width / 2, y + 0.35, text, ha="center", va="center", fontsize=10)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    """An arrow from here to there."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": GREY, "lw": 1.3})


def blank(width: float, height: float) -> tuple[Any, Any]:
    """A picture without axes, in units of boxes."""
    figure, axes = plt.subplots(figsize=(width, height))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def folding() -> None:
    """A convolution, its BatchNormalization and its ReLU: in training, and in the file."""
    figure, axes = blank(10, 3.4)
    axes.text(0, 3.1, "training", color=GREY)
    parts = ("weights,\nrounded", "Conv2D", "BatchNorm", "ReLU and\nfake quantizer")
    for i, text in enumerate(parts):
        box(axes, 0.1 + 2.5 * i, 2.05, text, ORANGE if i in (0, 3) else BLUE)
        if i:
            arrow(axes, (2.5 * i - 0.7, 2.4), (2.5 * i, 2.4))
    axes.text(0, 1.35, "file", color=GREY)
    box(axes, 0.1, 0.35, "int8 weights\nint32 biases", GREEN)
    box(
        axes,
        2.6,
        0.35,
        "one CONV_2D, int8 in and out: scales and biases hold the BatchNorm",
        GREEN,
        6.6,
    )
    arrow(axes, (1.8, 0.7), (2.5, 0.7))
    save(figure, "folding")


def delays() -> None:
    """What happens at which training step."""
    figure, axes = plt.subplots(figsize=(7, 2.2))
    rows = (
        ("weights train", 0, 10_000, GREY),
        ("ranges are observed", 0, 9_000, BLUE),
        ("values are rounded", 2_000, 10_000, ORANGE),
        ("BatchNorm uses moving statistics", 5_000, 10_000, GREEN),
    )
    for i, (text, start, end, color) in enumerate(reversed(rows)):
        axes.barh(i, end - start, left=start, color=color, height=0.55)
        axes.text(-150, i, text, ha="right", va="center")
    for step, text in ((2_000, "QuantDelay"), (5_000, "FreezeBatchNorm"), (9_000, "FreezeRanges")):
        axes.axvline(step, color=GREY, lw=0.8, ls="--")
        axes.text(step, 3.6, f"{text}({step:_})", ha="center", fontsize=9)
    axes.set(xlabel="training step", yticks=[], xlim=(0, 10_500))
    axes.spines["left"].set_visible(False)
    save(figure, "delays")


def exact() -> None:
    """Where the same integers are computed."""
    figure, axes = blank(10, 3.6)
    box(axes, 0.1, 1.4, "fit: float values,\nrounded to ranges", ORANGE, 2.2)
    box(axes, 3.4, 1.4, "resolved graph:\noperators, scales,\ninteger weights", GREY, 2.2)
    for y, text in ((2.7, "predict, evaluate"), (1.4, "simulate"), (0.1, "the .tflite file")):
        box(axes, 6.7, y, text, GREEN, 2.2)
        arrow(axes, (5.7, 1.75), (6.6, y + 0.35))
    arrow(axes, (2.4, 1.75), (3.3, 1.75))
    axes.text(9.05, 1.75, "the same\nintegers", color=GREEN, va="center")
    save(figure, "exact")


def growth() -> None:
    """Time and memory of a training step, from the table in speed.md."""
    text = Path(__file__).parent.with_name("speed.md").read_text()
    lines = text.split("| | | float, ms")[1].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    figure, panels = plt.subplots(2, 3, sharey="row", figsize=(10, 5.2))
    titles = {
        "layers": "blocks of a chain",
        "pixels": "width and height, MobileNetV2",
        "examples": "examples, MobileNetV2",
    }
    for column, (series, title) in enumerate(titles.items()):
        found = [[float(cell) for cell in cells] for name, *cells in rows if name == series]
        sizes, *figures = zip(*found, strict=True)
        for place in range(2):
            axes = panels[place][column]
            for form, color, values in zip(
                ("float", "int8"), (GREY, BLUE), figures[2 * place :], strict=False
            ):
                axes.loglog(sizes, values, "o-", color=color, ms=4, label=form)
            axes.set_xticks(sizes, [f"{size:.0f}" for size in sizes])
            axes.minorticks_off()
        panels[1][column].set_xlabel(title)
    panels[0][0].set_ylabel("ms a step")
    panels[1][0].set_ylabel("MB at most")
    panels[0][0].legend()
    figure.tight_layout()
    save(figure, "growth")


def equal() -> None:
    """README's program, run: float against model, and model against file."""
    import contextlib
    import re
    import tempfile

    import keras_qat

    readme = (Path(__file__).parents[2] / "README.md").read_text()
    program = re.search(r"```python\n(.*?)```", readme, flags=re.S)[1]
    names: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        names["keras_qat"] = keras_qat
        keras_qat.keras.utils.set_random_seed(1)
        exec(program, names)
        file = keras_qat.TFLiteModel(Path(folder, "model.tflite"))
        x = names["x_test"]
        outputs = [np.asarray(m.predict(x, verbose=0)) for m in (names["model"], names["qat"])]
        outputs.append(np.asarray(file.predict(x)))
    of_float, of_model, of_file = (values.ravel() for values in outputs)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    left.plot(of_float, of_model, ".", ms=3, color=ORANGE, alpha=0.5, rasterized=True)
    left.set(xlabel="float model", ylabel="int8 model (Keras)", title="trained on, rounded to int8")
    right.plot(of_file, of_model, ".", ms=3, color=GREEN, alpha=0.5, rasterized=True)
    same = int((of_file == of_model).sum())
    right.set(xlabel="model.tflite", title=f"{same} of {of_file.size} outputs are equal")
    figure.tight_layout()
    save(figure, "equal")


if __name__ == "__main__":
    for draw in (fake_quantization, ranges, folding, delays, exact, growth, equal):
        draw()
