"""The report of `verify` as a picture. Needs matplotlib, the extra `keras-qat[plot]`."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_qat.verify.report import SAME, Report

__all__ = ["draw"]


def draw(report: Report) -> Any:
    """A figure with bars per layer: on the left the codes that differ, on the right the noise."""
    tensors = report.tensors
    if not tensors:
        raise ValueError("There are no layers to draw: call verify with per_layer=True.")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Pictures need matplotlib: pip install 'keras-qat[plot]'.") from error
    rows = np.arange(len(tensors))
    figure = Figure(figsize=(10, 1.5 + 0.28 * len(tensors)), layout="constrained")
    differing, noise = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    run = [1 - each.run.identical for each in tensors]
    fed = [0.0 if each.fed is None else 1 - each.fed.identical for each in tensors]
    differing.barh(rows + 0.2, np.multiply(100, run), 0.4, color="0.75", label="free run")
    colors = ["tab:blue" if each.agrees else "tab:red" for each in tensors]
    label = "fed the model's codes (red: more than 0.1 % or 1 LSB)"
    differing.barh(rows - 0.2, np.multiply(100, fed), 0.4, color=colors, label=label)
    differing.axvline(100 * (1 - SAME), color="0.5", linewidth=0.8, linestyle="--")
    differing.set_xscale("symlog", linthresh=0.1)
    differing.set_xlim(0, 100)
    differing.set_xlabel("codes that differ, %")
    differing.set_yticks(rows, [each.name for each in tensors])
    differing.set_ylim(len(tensors) - 0.5, -0.5)
    figure.legend(loc="outside lower left", ncols=2, fontsize="small")
    noise.barh(rows, [each.sqnr or 0.0 for each in tensors], 0.6, color="tab:green")
    noise.set_xlabel("signal to quantization noise, dB")
    title = f"TFLite ({report.kernels} kernels) against the model, {report.examples} examples"
    figure.suptitle(title)
    return figure
