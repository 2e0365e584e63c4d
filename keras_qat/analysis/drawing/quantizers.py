"""Each quantizer as a histogram of what it quantizes, with its range and what that cuts off."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from keras_qat.analysis.drawing.picture import GREY, INK, Picture, new_figure, picture, shortened
from keras_qat.training.quantizer_statistics import QuantizerStatistics, statistics

__all__ = ["plot_quantizers"]

BINS, COLUMNS = 75, 3
WIDTH, HEIGHT, HEAD, FOOT = 4.3, 2.3, 0.95, 0.2
"""In inches: the size of a panel, and what is above and below all of them."""
IN_RANGE, CUT, RANGE, WEIGHT, CHANNELS = "#5b8def", "#d64545", "#eef3fb", "#3aa17e", "#a9c9bd"
KEYS = {
    "activations": IN_RANGE,
    "weights": WEIGHT,
    "beyond the range": CUT,
    "ranges of channels, sorted": CHANNELS,
}
STRIP = -0.34
"""Where the ranges of channels end, below a histogram of height 1."""


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
        data: inputs, as for `calibrate`; some dozens of examples show what there is to see.
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
    drawn = _drawn(model.name, statistics(model, data, steps, batch_size, verbose))
    if to_file is not None:
        drawn.save(to_file)
    return drawn


def _drawn(name: str, panels: list[QuantizerStatistics]) -> Picture:
    columns = min(COLUMNS, max(len(panels), 1))
    width = max(columns * WIDTH, 8.0)
    height = HEAD + -(-len(panels) // columns) * HEIGHT + FOOT
    figure = new_figure(width, height)
    from matplotlib.patches import Patch  # Behind what says that there is no matplotlib.

    title, left = shortened(f"Quantizers of {name}", 60), 0.25 / width
    figure.text(left, 1 - 0.32 / height, title, size=15, weight="bold", color=INK)
    note = "Heights are square roots of counts, so that tails are seen."
    figure.text(left, 1 - 0.55 / height, note, size=9, color=GREY)
    keys = [Patch(color=color, label=words) for words, color in KEYS.items()]
    place = {"loc": "upper left", "bbox_to_anchor": (0.15 / width, 1 - 0.58 / height)}
    figure.legend(handles=keys, ncols=len(keys), frameon=False, fontsize=9, **place)
    for index, panel in enumerate(panels):
        row, column = divmod(index, columns)
        x, y = column * WIDTH + 0.25, height - HEAD - (row + 1) * HEIGHT + 0.3
        box = x / width, y / height, (WIDTH - 0.5) / width, (HEIGHT - 0.95) / height
        _draw(figure.add_axes(box), panel)
    return picture(figure, f"Quantizers of {name}")


def _draw(axes: Any, panel: QuantizerStatistics) -> None:
    quantizer, histogram = panel.quantizer, panel.histogram
    low, high = float(np.min(quantizer.minimum)), float(np.max(quantizer.maximum))
    if not quantizer.calibrated:
        low = high = 0.0
    first, last = min(float(histogram.low[0]), low), max(float(histogram.high[-1]), high)
    edges = np.linspace(first, last if last > first else first + 1, BINS + 1)
    if quantizer.calibrated:
        facts = f"{quantizer.spec.bits} bits, {low:.3g} to {high:.3g}{_cut(panel.saturation)}"
        facts += f" · {panel.sqnr:.1f} dB" if panel.sqnr is not None else ""
        axes.axvspan(low, high, 0.0, 1.0, color=RANGE)
        axes.vlines([low, high], 0, 1, color=INK, linewidth=1.2)
    else:
        facts = f"{quantizer.spec}, range not set"
    heights, middles = _heights(panel, edges), (edges[1:] + edges[:-1]) / 2
    is_cut = quantizer.calibrated & ((middles < low) | (middles > high))
    color = WEIGHT if panel.is_weight else IN_RANGE
    for part, fill in ((~is_cut, color), (is_cut, CUT)):
        axes.stairs(heights * part, edges, fill=True, color=fill)
    bottom = 0.0
    if np.size(quantizer.maximum) > 1:
        bottom = STRIP
        limits = np.sort(np.ravel(quantizer.maximum))
        limits = limits / max(float(limits[-1]), 1e-12) * (0.8 * -STRIP)
        places = np.linspace(edges[0], edges[-1], len(limits) + 1)
        axes.stairs(STRIP + limits, places, baseline=STRIP, fill=True, color=CHANNELS)
    axes.set(xlim=(edges[0], edges[-1]), ylim=(bottom, 1), yticks=[])
    zero = [0.0] if 0.14 < -edges[0] / (edges[-1] - edges[0]) < 0.86 else []
    ticks = [edges[0], *zero, edges[-1]]
    axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks], color=GREY, size=8)
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.spines[:].set_visible(False)
    title = shortened(", ".join(quantizer.quantizes), 50)
    axes.text(0, 1.22, title, size=10, weight="bold", color=INK, transform=axes.transAxes)
    axes.text(0, 1.06, facts, size=9, color=GREY, transform=axes.transAxes)


def _heights(panel: QuantizerStatistics, edges: np.ndarray) -> np.ndarray:
    """The square roots of the counts between edges, at most 1."""
    sums = panel.histogram.below(edges)
    sums[-1] = panel.histogram.size  # The last bin holds what is at the last edge itself.
    heights = np.sqrt(np.maximum(np.diff(sums), 0.0))
    highest = 1.25 * max(float(np.sort(heights)[-2]), 1e-12)  # Zeros behind a ReLU are too many.
    return np.minimum(heights / min(highest, float(heights.max())), 1.0)


def _cut(share: float) -> str:
    return f" · {'< 0.01%' if share < 1e-4 else f'{share:.2%}'} cut off" if share else ""
