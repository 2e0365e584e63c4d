"""Draws each quantizer as a histogram of its values, with its range and what that cuts off."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from keras_qat.analysis.drawing.picture import GREY, INK, Picture, new_figure, picture, shortened
from keras_qat.training.quantizer_statistics import QuantizerStatistics, compute_statistics

BINS, COLUMNS = 75, 3
WIDTH, HEIGHT, GAP = 3.8, 2.3, 0.5
"""Width of a histogram, height of a panel and gap between two panels, in inches."""
HEAD, TOP, FOOT, STRIP = 0.85, 0.55, 1.9, 0.35
"""What is above all panels; in a panel the ends of the histogram, and the height of the ranges of
channels at its foot."""
IN_RANGE, CUT, RANGE, WEIGHT, CHANNELS = "#5b8def", "#d64545", "#eef3fb", "#3aa17e", "#a9c9bd"
KEYS = {
    "activations": IN_RANGE,
    "weights": WEIGHT,
    "outside the range": CUT,
    "ranges of channels, sorted": CHANNELS,
}


def plot_quantizers(
    model: Any,
    data: Any,
    to_file: str | os.PathLike[str] | None = None,
    *,
    steps: int | None = None,
    batch_size: int | None = None,
    verbose: int = 0,
) -> Picture:
    """Draws a histogram for each quantizer: what it quantizes, its range, what is cut off.

    Numbers are those of the model in float at inference. Below the weights that have a range for
    each channel are those ranges, from the smallest to the largest: where a few are much larger
    than the rest, one range for all of them would lose accuracy.

    Args:
        model: what `quantize_model` returned, trained or calibrated.
        data: inputs, as for `calibrate`; a few dozen examples are enough.
        to_file: where to write the picture: `.svg`, or `.html`.
        steps: how many batches of the data to look at; all by default.
        batch_size: examples per batch, 32 by default.
        verbose: 1 shows progress.

    Returns:
        The picture; notebooks show it.

    Raises:
        ValueError: if the model is not quantized, the data is not what it takes, or for a file
            with another ending.
        ImportError: without matplotlib: `pip install 'keras-qat[plot]'`.

    Example:
        >>> keras_qat.plot_quantizers(qat, x_train[:64], "ranges.html")
    """
    drawn = _drawn(model.name, compute_statistics(model, data, steps, batch_size, verbose))
    if to_file is not None:
        drawn.save(to_file)
    return drawn


def _drawn(name: str, panels: list[QuantizerStatistics]) -> Picture:
    columns = min(COLUMNS, max(len(panels), 1))
    width = max(columns * (WIDTH + GAP), 8.0)
    height = HEAD + -(-len(panels) // columns) * HEIGHT + 0.2
    figure = new_figure(width, height)
    from matplotlib.collections import PolyCollection  # Behind what says that there is none.

    axes = figure.add_axes((0, 0, 1, 1), xlim=(-GAP / 2, width - GAP / 2), ylim=(height, 0))
    axes.set_axis_off()
    title = shortened(f"Quantizers of {name}", 60)
    axes.text(0, 0.3, title, size=15, weight="bold", color=INK)
    note = "Heights are square roots of counts, which makes tails visible."
    axes.text(0, 0.53, note, size=9, color=GREY)
    shapes: list[tuple[np.ndarray, str]] = []
    x = 0.0
    for words, color in KEYS.items():
        shapes.append((_steps(np.array([0.11]), x, x + 0.2, 0.77), color))
        axes.text(x + 0.26, 0.77, words, size=9, color=INK)
        x += 0.5 + 0.075 * len(words)
    for index, panel in enumerate(panels):
        row, column = divmod(index, columns)
        shapes += _draw(axes, panel, column * (WIDTH + GAP), HEAD + row * HEIGHT)
    polygons, colors = zip(*shapes, strict=True)
    axes.add_collection(PolyCollection(polygons, facecolors=colors, linewidth=0))
    return picture(figure, f"Quantizers of {name}")


def _draw(
    axes: Any, panel: QuantizerStatistics, left: float, top: float
) -> list[tuple[np.ndarray, str]]:
    """Writes the words and lines of a panel; returns its areas with their colours."""
    quantizer, histogram = panel.quantizer, panel.histogram
    low, high = float(np.min(quantizer.minimum)), float(np.max(quantizer.maximum))
    facts = f"{quantizer.spec}, range not set"
    if quantizer.calibrated:
        facts = f"{quantizer.spec.bits} bits, {low:.3g} to {high:.3g}{_cut(panel.saturation)}"
        facts += f" · {panel.sqnr:.1f} dB" if panel.sqnr is not None else ""
    else:
        low = high = 0.0
    title = shortened(", ".join(quantizer.quantizes), 50)
    axes.text(left, top + 0.28, title, size=10, weight="bold", color=INK)
    axes.text(left, top + 0.48, facts, size=9, color=GREY)
    first, last = min(float(histogram.low[0]), low), max(float(histogram.high[-1]), high)
    last = last if last > first else first + 1
    edges = np.linspace(first, last, BINS + 1)

    def x_of(value: float) -> float:
        return left + WIDTH * (value - first) / (last - first)

    right, foot, shapes = left + WIDTH, top + FOOT, []
    if np.size(quantizer.maximum) > 1:
        limits = np.sort(np.ravel(quantizer.maximum))
        limits = limits / max(float(limits[-1]), 1e-12) * 0.8 * STRIP
        shapes.append((_steps(limits, left, right, foot), CHANNELS))
        foot -= STRIP
    if quantizer.calibrated:
        full = np.array([foot - top - TOP])
        shapes.append((_steps(full, x_of(low), x_of(high), foot), RANGE))
        axes.vlines([x_of(low), x_of(high)], top + TOP, foot, color=INK, linewidth=1.2)
    heights, middles = _heights(panel, edges) * (foot - top - TOP), (edges[1:] + edges[:-1]) / 2
    is_cut = quantizer.calibrated & ((middles < low) | (middles > high))
    color = WEIGHT if panel.is_weight else IN_RANGE
    shapes += [
        (_steps(heights * part, left, right, foot), fill)
        for part, fill in ((~is_cut, color), (is_cut, CUT))
        if np.any(heights * part)
    ]
    axes.hlines(foot, left, right, color=GREY, linewidth=0.8)
    zero = {0.0: "center"} if 0.14 < -first / (last - first) < 0.86 else {}
    for tick, side in {first: "left", **zero, last: "right"}.items():
        y = top + FOOT + 0.15
        axes.text(x_of(tick), y, f"{tick:.3g}", size=8, color=GREY, ha=side)
    return shapes


def _steps(heights: np.ndarray, left: float, right: float, foot: float) -> np.ndarray:
    """Returns the outline of bars side by side."""
    x = np.repeat(np.linspace(left, right, len(heights) + 1), 2)
    return np.stack([x, foot - np.pad(np.repeat(heights, 2), 1)], 1)


def _heights(panel: QuantizerStatistics, edges: np.ndarray) -> np.ndarray:
    """Returns the square roots of the counts between edges, scaled to at most 1."""
    sums = panel.histogram.below(edges)
    sums[-1] = panel.histogram.size  # The last bin holds what is at the last edge itself.
    heights = np.sqrt(np.maximum(np.diff(sums), 0.0))
    highest = 1.25 * max(float(np.sort(heights)[-2]), 1e-12)  # Zeros behind a ReLU are too many.
    return np.minimum(heights / min(highest, float(heights.max())), 1.0)


def _cut(share: float) -> str:
    return f" · {'< 0.01%' if share < 1e-4 else f'{share:.2%}'} cut off" if share else ""
