"""Each quantizer as a histogram of what it quantizes, with its range and what that cuts off."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from keras_qat.analysis.drawing.svg import Picture, element, fitted, group, label, picture
from keras_qat.training.quantizer_statistics import QuantizerStatistics, statistics

__all__ = ["plot_quantizers"]

WIDTH, HEIGHT, GAP, COLUMNS, HEAD = 300.0, 172.0, 26.0, 3, 78.0
TOP, PLOT, STRIP = 40.0, 92.0, 22.0
"""Of a panel: where the histogram begins, how high it is, and the ranges of channels below it."""
BINS = 75
IN_RANGE, CUT, RANGE, WEIGHT = "#5b8def", "#d64545", "#eef3fb", "#3aa17e"
CHANNELS, GREY = "#a9c9bd", "#52606d"
KEYS = (
    (IN_RANGE, "activations", 100.0),
    (WEIGHT, "weights", 80.0),
    (CUT, "beyond the range", 130.0),
    (CHANNELS, "ranges of channels, sorted", 0.0),
)
"""Colour, what it means, and how far the next one is."""


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

    Example:
        >>> keras_qat.plot_quantizers(qat, x_train[:64], "ranges.html")
    """
    found = _drawn(model.name, statistics(model, data, steps, batch_size, verbose))
    if to_file is not None:
        found.save(to_file)
    return found


def _drawn(name: str, found: list[QuantizerStatistics]) -> Picture:
    columns = min(COLUMNS, max(len(found), 1))
    body = label(GAP, 28, fitted(f"Quantizers of {name}", 560, 18), 18, font_weight="700")
    body += label(GAP, 47, "Heights are square roots of counts, so that tails are seen.", fill=GREY)
    x = GAP
    for color, words, width in KEYS:
        body += element("rect", x=x, y=55.0, width=12, height=12, rx=2, fill=color)
        body += label(x + 18, 65, words, 11)
        x += width
    for place, each in enumerate(found):
        row, column = divmod(place, columns)
        at = f"translate({GAP + column * (WIDTH + GAP):g} {HEAD + row * (HEIGHT + GAP):g})"
        body += element("g", _panel(each), transform=at)
    rows = -(-len(found) // columns)
    width = max(GAP + columns * (WIDTH + GAP), 620.0)
    return picture(f"Quantizers of {name}", body, width, HEAD + rows * (HEIGHT + GAP))


def _panel(found: QuantizerStatistics) -> str:
    quantizer = found.quantizer
    is_known = quantizer.calibrated
    low, high = float(np.min(quantizer.minimum)), float(np.max(quantizer.maximum))
    ends = (low, high) if is_known else (0.0, 0.0)
    first = min(float(found.histogram.low[0]), ends[0])
    last = max(float(found.histogram.high[-1]), ends[1])
    edges = np.linspace(first, last if last > first else first + 1, BINS + 1)
    title = ", ".join(quantizer.quantizes)
    facts = str(quantizer.spec) if not is_known else f"{quantizer.spec.bits} bits"
    if is_known:
        facts += f", {low:.3g} to {high:.3g}{_cut(found.saturation)}"
        facts += f" · {found.sqnr:.1f} dB" if found.sqnr is not None else ""
    else:
        facts += ", range not set"
    parts = [label(0, 12, fitted(title, WIDTH, 12.5), 12.5, font_weight="600")]
    parts.append(label(0, 28, fitted(facts, WIDTH, 11), 11, fill=GREY))

    def place(value: float) -> float:
        return float((value - edges[0]) / (edges[-1] - edges[0]) * WIDTH)

    foot = TOP + PLOT
    if is_known:
        width = place(high) - place(low)
        parts.append(element("rect", x=place(low), y=TOP, width=width, height=PLOT, fill=RANGE))
    parts += _bars(found, edges, ends if is_known else None)
    parts.append(element("path", d=f"M0 {foot:g}H{WIDTH:g}", stroke=GREY, stroke_width=1))
    if is_known:
        for end in ends:
            d = f"M{place(end):.1f} {TOP:g}V{foot:g}"
            parts.append(element("path", d=d, stroke="#1f2933", stroke_width=1.2))
    parts += _ticks(edges, place, foot)
    if np.size(quantizer.maximum) > 1:
        parts += _channels(np.ravel(quantizer.maximum), foot + 18)
    return group("".join(parts), f"{title}\n{quantizer.spec}\n{facts}")


def _cut(share: float) -> str:
    return f" · {'< 0.01%' if share < 1e-4 else f'{share:.2%}'} cut off" if share else ""


def _bars(
    found: QuantizerStatistics, edges: np.ndarray, ends: tuple[float, float] | None
) -> list[str]:
    """The histogram; bins beyond the range in red."""
    histogram = found.histogram
    # What is at the last edge itself belongs to the last bin.
    sums = histogram.below(edges)
    sums[-1] = histogram.size
    heights = np.sqrt(np.maximum(np.diff(sums), 0.0))
    highest = 1.25 * max(float(np.sort(heights)[-2]), 1e-12)  # Zeros behind a ReLU are too many.
    heights = np.minimum(heights * PLOT / min(highest, float(heights.max())), PLOT)
    color = WEIGHT if found.is_weight else IN_RANGE
    paths: dict[str, str] = {color: "", CUT: ""}
    step, middles = WIDTH / BINS, (edges[1:] + edges[:-1]) / 2
    for place, (height, middle) in enumerate(zip(heights, middles, strict=True)):
        if height > 0:
            is_cut = ends is not None and not ends[0] <= middle <= ends[1]
            size = max(float(height), 1.0)
            x, y = place * step, TOP + PLOT - size
            bar = f"M{x:.1f} {y:.1f}h{step - 0.6:.1f}v{size:.1f}h{0.6 - step:.1f}z"
            paths[CUT if is_cut else color] += bar
    return [element("path", d=d, fill=fill) for fill, d in paths.items() if d]


def _ticks(edges: np.ndarray, place: Any, foot: float) -> list[str]:
    """The ends of the axis, and zero where there is room for it."""
    words = [label(0, foot + 13, f"{edges[0]:.3g}", 10, fill=GREY)]
    words.append(label(WIDTH, foot + 13, f"{edges[-1]:.3g}", 10, fill=GREY, text_anchor="end"))
    zero = place(0.0)
    if 40 < zero < WIDTH - 40:
        words.append(label(zero, foot + 13, "0", 10, fill=GREY, text_anchor="middle"))
    return words


def _channels(limits: np.ndarray, top: float) -> list[str]:
    """The range of each channel as a bar, from the smallest to the largest."""
    limits = np.sort(limits)
    heights = STRIP * limits / max(float(limits.max()), 1e-12)
    step = WIDTH / len(limits)
    d = "".join(
        f"M{place * step:.2f} {top + STRIP:.1f}v{-max(float(height), 0.5):.1f}h{step * 0.86:.2f}"
        f"V{top + STRIP:.1f}z"
        for place, height in enumerate(heights)
    )
    return [element("path", d=d, fill=CHANNELS)]
