"""Draws each quantizer as a histogram of its values, with its range and the clipped values."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from keras_qat.analysis.drawing.pages import GREY, INK, Picture, new_figure, render, shorten
from keras_qat.keras2.backend import keras
from keras_qat.training.quantizer_statistics import QuantizerStatistics, compute_statistics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BINS, COLUMNS = 75, 3
WIDTH, HEIGHT, GAP = 3.8, 2.3, 0.5
"""Width of a histogram, height of a panel and gap between two panels, in inches."""
HEAD, TOP, FOOT, STRIP = 0.85, 0.55, 1.9, 0.35
"""Height above all panels; top and foot of the histogram in a panel; height of the channels' ranges
at its foot, in inches."""
IN_RANGE, CUT, RANGE, WEIGHT, CHANNELS = "#5b8def", "#d64545", "#eef3fb", "#3aa17e", "#a9c9bd"
KEYS = {
    "activations": IN_RANGE,
    "weights": WEIGHT,
    "outside the range": CUT,
    "ranges of channels, sorted": CHANNELS,
}


def plot_quantizers(
    model: keras.Model,
    data: Any,
    to_file: str | os.PathLike[str] | None = None,
    *,
    steps: int | None = None,
    batch_size: int | None = None,
    verbose: int = 0,
) -> Picture:
    """Draws a histogram for each quantizer: its values, its range, and the clipped values.

    The values are those of the float model at inference. For weights with a range per channel, the
    ranges are drawn below the histogram in ascending order. If a few ranges are much larger than
    the others, one range for the entire tensor would lose accuracy.

    Args:
        model: the result of `quantize_model`, trained or calibrated.
        data: inputs, as for `calibrate`; a few dozen examples are enough.
        to_file: where to write the picture: `.svg`, or `.html`.
        steps: number of batches to read; all by default.
        batch_size: examples per batch, 32 by default.
        verbose: 1 shows progress.

    Returns:
        The picture; notebooks show it.

    Raises:
        ValueError: if the model is not quantized, the data does not match it, or for another
            suffix.
        ImportError: without matplotlib: `pip install 'keras-qat[plot]'`.

    Example:
        >>> keras_qat.plot_quantizers(qat, x_train[:64], "ranges.html")
    """
    picture = _draw_panels(model.name, compute_statistics(model, data, steps, batch_size, verbose))
    if to_file is not None:
        picture.save(to_file)
    return picture


def _draw_panels(name: str, panels: list[QuantizerStatistics]) -> Picture:
    columns = min(COLUMNS, max(len(panels), 1))
    width = max(columns * (WIDTH + GAP), 8.0)
    height = HEAD + -(-len(panels) // columns) * HEIGHT + 0.2
    figure = new_figure(width, height)
    from matplotlib.collections import PolyCollection  # After the error for a missing matplotlib.

    axes = figure.add_axes((0, 0, 1, 1), xlim=(-GAP / 2, width - GAP / 2), ylim=(height, 0))
    axes.set_axis_off()
    title = shorten(f"Quantizers of {name}", 60)
    axes.text(0, 0.3, title, size=15, weight="bold", color=INK)
    note = "Heights are square roots of counts, which makes tails visible."
    axes.text(0, 0.53, note, size=9, color=GREY)
    shapes: list[tuple[NDArray, str]] = []
    x = 0.0
    for text, color in KEYS.items():
        shapes.append((_outline_bars(np.array([0.11]), x, x + 0.2, 0.77), color))
        axes.text(x + 0.26, 0.77, text, size=9, color=INK)
        x += 0.5 + 0.075 * len(text)
    for index, panel in enumerate(panels):
        row, column = divmod(index, columns)
        shapes += _draw_panel(axes, panel, column * (WIDTH + GAP), HEAD + row * HEIGHT)
    polygons, colors = zip(*shapes, strict=True)
    axes.add_collection(PolyCollection(polygons, facecolors=colors, linewidth=0))
    return render(figure, f"Quantizers of {name}")


def _draw_panel(
    axes: Axes, panel: QuantizerStatistics, left: float, top: float
) -> list[tuple[NDArray, str]]:
    """Draw the text and lines of a panel, and return its areas with their colours."""
    quantizer, histogram = panel.quantizer, panel.histogram
    low, high = float(np.min(quantizer.minimum)), float(np.max(quantizer.maximum))
    facts = f"{quantizer.spec}, range not set"
    if quantizer.calibrated:
        facts = f"{quantizer.spec.bits} bits, {low:.3g} to {high:.3g}"
        share = panel.saturation
        facts += f" · {'< 0.01%' if share < 1e-4 else f'{share:.2%}'} cut off" if share else ""
        facts += f" · {panel.sqnr:.1f} dB" if panel.sqnr is not None else ""
    else:
        low = high = 0.0
    title = shorten(", ".join(quantizer.quantizes), 50)
    axes.text(left, top + 0.28, title, size=10, weight="bold", color=INK)
    axes.text(left, top + 0.48, facts, size=9, color=GREY)
    first, last = min(float(histogram.low[0]), low), max(float(histogram.high[-1]), high)
    last = last if last > first else first + 1
    edges = np.linspace(first, last, BINS + 1)

    def to_x(value: float) -> float:
        return left + WIDTH * (value - first) / (last - first)

    right, foot, shapes = left + WIDTH, top + FOOT, []
    if np.size(quantizer.maximum) > 1:
        limits = np.sort(np.ravel(quantizer.maximum))
        limits = limits / max(float(limits[-1]), 1e-12) * 0.8 * STRIP
        shapes.append((_outline_bars(limits, left, right, foot), CHANNELS))
        foot -= STRIP
    if quantizer.calibrated:
        full = np.array([foot - top - TOP])
        shapes.append((_outline_bars(full, to_x(low), to_x(high), foot), RANGE))
        axes.vlines([to_x(low), to_x(high)], top + TOP, foot, color=INK, linewidth=1.2)
    heights, middles = (
        _compute_heights(panel, edges) * (foot - top - TOP),
        (edges[1:] + edges[:-1]) / 2,
    )
    is_cut = quantizer.calibrated & ((middles < low) | (middles > high))
    color = WEIGHT if panel.is_weight else IN_RANGE
    shapes += [
        (_outline_bars(heights * mask, left, right, foot), fill)
        for mask, fill in ((~is_cut, color), (is_cut, CUT))
        if np.any(heights * mask)
    ]
    axes.hlines(foot, left, right, color=GREY, linewidth=0.8)
    zero = {0.0: "center"} if 0.14 < -first / (last - first) < 0.86 else {}
    for tick, side in {first: "left", **zero, last: "right"}.items():
        y = top + FOOT + 0.15
        axes.text(to_x(tick), y, f"{tick:.3g}", size=8, color=GREY, ha=side)
    return shapes


def _outline_bars(heights: NDArray, left: float, right: float, foot: float) -> NDArray:
    """Return the outline of bars side by side."""
    x = np.repeat(np.linspace(left, right, len(heights) + 1), 2)
    return np.stack([x, foot - np.pad(np.repeat(heights, 2), 1)], 1)


def _compute_heights(panel: QuantizerStatistics, edges: NDArray) -> NDArray:
    """Return the square roots of the counts between edges, scaled to at most 1."""
    sums = panel.histogram.below(edges)
    sums[-1] = panel.histogram.size  # The last bin includes its upper edge.
    heights = np.sqrt(np.maximum(np.diff(sums), 0.0))
    highest = 1.25 * max(float(np.sort(heights)[-2]), 1e-12)  # A ReLU yields too many zeros.
    return np.minimum(heights / min(highest, float(heights.max())), 1.0)
