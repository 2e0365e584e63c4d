"""The report of `verify` as a picture. Needs matplotlib, the extra `keras-qat[plot]`."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_qat.analysis.drawing.picture import new_figure
from keras_qat.analysis.verify.html import MOST_DECIBELS, NINES, nines
from keras_qat.analysis.verify.report import SAME, Report


def draw(report: Report) -> Any:
    """Draws bars for each layer: identical codes, codes at the ends of the range, and noise."""
    tensors = report.tensors
    if not tensors:
        raise ValueError("There are no layers to draw: call verify with per_layer=True.")
    rows = np.arange(len(tensors))
    figure = new_figure(12, 1.9 + 0.28 * len(tensors), layout="constrained")
    same, ends, noise = figure.subplots(1, 3, sharey=True, width_ratios=[5, 2, 3])
    run = [tensor.run.identical for tensor in tensors]
    fed = [1.0 if tensor.fed is None else tensor.fed.identical for tensor in tensors]
    same.barh(
        rows + 0.2, [NINES * nines(tensor) for tensor in run], 0.38, color="0.78", label="free run"
    )
    colors = ["tab:green" if tensor.agrees else "tab:red" for tensor in tensors]
    label = "fed the model's values (red: below 99.9 %, or 2 LSB off)"
    same.barh(
        rows - 0.2, [NINES * nines(tensor) for tensor in fed], 0.38, color=colors, label=label
    )
    same.axvline(NINES * nines(SAME), color="0.4", linewidth=0.8, linestyle="--")
    same.set_xlim(0, NINES)
    ticks = ["0", "90 %", "99 %", "99.9 %", "99.99 %", "99.999 %", "100 %"]
    same.set_xticks(range(NINES + 1), ticks, fontsize="small")
    same.set_xlabel("identical outputs")
    same.set_yticks(rows, [tensor.name for tensor in tensors])
    same.set_ylim(len(tensors) - 0.5, -0.5)
    same.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, fontsize="small", frameon=False)
    ends.barh(rows, [100 * tensor.at_ends for tensor in tensors], 0.6, color="tab:orange")
    ends.set_xlim(0, 100)
    ends.set_xlabel("values at the ends of the range, %")
    noise.barh(rows, [tensor.sqnr or 0.0 for tensor in tensors], 0.6, color="tab:blue")
    noise.set_xlim(0, MOST_DECIBELS)
    noise.set_xlabel("signal to quantization noise, dB")
    figure.suptitle(
        f"TFLite ({report.kernels} kernels) against the model, {report.examples} examples: "
        f"{report.verdict.words}"
    )
    return figure
