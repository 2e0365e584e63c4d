"""Shows the results of `verify` as an HTML page, as a picture, and in Model Explorer."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from keras_qat.analysis.drawing.pages import Cell, Table, fill_page, new_figure
from keras_qat.analysis.verify.results import SAME, OutputReport, TensorReport, format_share
from keras_qat.io.atomic_files import write_contents

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NINES = 6
"""Number of nines at the end of the axis of identical values: one value in a million differs."""

MOST_DECIBELS = 60.0
"""End of the axis of the SQNR in dB."""

NOTHING = Cell("-", math.nan)

COLUMNS = {
    "layer": "Name in the float model",
    "no.": "Order of computation",
    "kernel": "Operators of the file",
    "fed: same": "Identical outputs of the layer, given the model's inputs",
    "fed: LSB": "Largest difference, given the model's inputs",
    "run: same": "Identical outputs of the layer in a free run of the file",
    "run: LSB": "Largest difference in a free run of the file",
    "at ends": "Share of the values at an end of the range",
    "clipped": "Share of the float values outside the range",
    "range used": "Share of the range that the float values use",
    "SQNR dB": "Signal-to-quantization-noise ratio against the float model; a full bar is 60",
    "scale": "Float value of one step in the file",
    "zero": "Zero point in the file",
}
NOTE = (
    "fed: each layer of the file gets the model's inputs, which shows the layer that differs "
    "(orange: only by the rounding of the kernels). run: a free run of the file, where "
    "differences add up. The bars of both count nines: half a bar is 99.9 %. at ends: values that "
    "may be clipped, without the zeros of a ReLU. clipped: float values outside the range. SQNR: "
    "the closeness to the float model; 8 bits reach 30 to 50 dB. Look at layers with a much lower "
    "SQNR than the layer before."
)

RED, ORANGE, YELLOW, GREEN = "#f28b82", "#fcc28c", "#fff475", "#a8dab5"
IDENTICAL = ((99, RED), (99.9, ORANGE), (99.9999, YELLOW), (100, GREEN))
"""Ends of intervals, in percent, and their colours: only 100 % is green."""
SIGNAL = ((10, RED), (20, ORANGE), (30, YELLOW), (1000, GREEN))
"""Ends of intervals of the SQNR, in dB, and their colours."""


def build_page(
    verdict: str,
    color: str,
    facts: dict[str, str],
    findings: Iterable[str],
    outputs: Sequence[OutputReport],
    tensors: Sequence[TensorReport],
) -> str:
    """Returns an HTML page with tables of outputs and layers; see `fill_page`."""
    tables = [_tabulate_outputs(outputs)]
    tables += [_tabulate_layers(tensors)] if tensors else []
    return fill_page("TFLite file against the model", verdict, color, facts, findings, tables)


def _tabulate_outputs(outputs: Sequence[OutputReport]) -> Table:
    columns = {
        "output": "Name of the output",
        "identical": "Share of the outputs that are identical",
        "largest diff.": "In steps (LSB) of the output",
        "mean diff.": "In steps (LSB) of the output",
        "same argmax": "Share of rows with the same class as the model's",
        "float: same argmax": "Share of rows with the same class as the float model's",
        "SQNR dB": "Signal-to-quantization-noise ratio against the float model",
        "accuracy": "Share of the examples that the file classifies correctly",
        "float: accuracy": "Share of the examples that the float model classifies correctly",
    }
    rows = [
        [
            Cell(output.name),
            Cell(format_share(output.identical), output.identical),
            Cell(f"{output.max_difference:.3g} LSB", output.max_difference),
            Cell(f"{output.mean_difference:.2g} LSB", output.mean_difference),
            _percent(output.argmax_agreement),
            _percent(output.float_argmax_agreement),
            _decibels(output.float_sqnr),
            _percent(output.accuracy),
            _percent(output.float_accuracy),
        ]
        for output in outputs
    ]
    return Table("Outputs", columns, rows)


def _percent(share: float | None) -> Cell:
    return NOTHING if share is None else Cell(f"{share:.2%}", share)


def _decibels(sqnr: float | None) -> Cell:
    if sqnr is None:
        return NOTHING
    return Cell(f"{sqnr:.1f}", sqnr, bar=min(max(sqnr / MOST_DECIBELS, 0.0), 1.0), color="noise")


def count_nines(identical: float) -> float:
    """Converts a share to its number of nines, 0 to 1: 99.9 % is halfway from 0 to the end."""
    return min(-math.log10(max(1 - identical, 10.0**-NINES)) / NINES, 1.0)


def _tabulate_layers(tensors: Sequence[TensorReport]) -> Table:
    def share(value: float, color: str) -> Cell:
        text, bar = format_share(value), count_nines(value)
        return Cell(text, value, color == "bad", bar=bar, color=color)

    def cells(number: int, tensor: TensorReport) -> list[Cell]:
        fed, run, at_ends = tensor.fed, tensor.run, tensor.at_ends
        color = "good" if tensor.agrees else "rounded" if tensor.simulated == 1 else "bad"
        fed_cells = [NOTHING, NOTHING]
        if fed is not None:
            largest = Cell(f"{fed.max_difference:g}", fed.max_difference)
            fed_cells = [share(fed.identical, color), largest]
        return [
            Cell(tensor.name, title=", ".join(tensor.layers)),
            Cell(str(number), number),
            Cell(tensor.kernel_names, title=", ".join(tensor.kernels)),
            *fed_cells,
            share(run.identical, "run"),
            Cell(f"{run.max_difference:g}", run.max_difference),
            Cell(f"{at_ends:.2%}", at_ends, bar=at_ends, color="ends"),
            Cell(f"{tensor.clipped:.2%}", tensor.clipped),
            Cell(f"{tensor.range_used:.1%}", tensor.range_used),
            _decibels(tensor.sqnr),
            Cell(f"{tensor.file_scale:.6g}", tensor.file_scale, not tensor.same_range),
            Cell(str(tensor.file_zero_point), tensor.file_zero_point, not tensor.same_range),
        ]

    rows = [cells(number, tensor) for number, tensor in enumerate(tensors, start=1)]
    return Table("Layers", COLUMNS, rows, NOTE)


def draw_layers(tensors: Sequence[TensorReport], title: str) -> Figure:
    """Draws bars for each layer: identical outputs, values at the ends of the range, and SQNR.

    Raises:
        ValueError: if there are no tensors.
        ImportError: without matplotlib.
    """
    if not tensors:
        raise ValueError("The report has no layers to draw: call verify with per_layer=True.")
    rows = np.arange(len(tensors))
    figure = new_figure(12, 1.9 + 0.28 * len(tensors), layout="constrained")
    same, ends, noise = figure.subplots(1, 3, sharey=True, width_ratios=[5, 2, 3])
    run = [NINES * count_nines(tensor.run.identical) for tensor in tensors]
    fed = [1.0 if tensor.fed is None else tensor.fed.identical for tensor in tensors]
    same.barh(rows + 0.2, run, 0.38, color="0.78", label="free run")
    colors = ["tab:green" if tensor.agrees else "tab:red" for tensor in tensors]
    label = "fed the model's values (red: below 99.9 %, or 2 LSB off)"
    nines = [NINES * count_nines(share) for share in fed]
    same.barh(rows - 0.2, nines, 0.38, color=colors, label=label)
    same.axvline(NINES * count_nines(SAME), color="0.4", linewidth=0.8, linestyle="--")
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
    noise.set_xlabel("signal-to-quantization-noise ratio, dB")
    figure.suptitle(title)
    return figure


def write_node_data(tensors: Sequence[TensorReport], folder: Path) -> list[Path]:
    """Writes one Model Explorer node data file per metric.

    Raises:
        ValueError: if there are no tensors.
    """
    if not tensors:
        raise ValueError("The report has no layers: call verify with per_layer=True.")
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, tuple[Callable[[TensorReport], object], Sequence[tuple[float, str]]]] = {
        "bits": (lambda tensor: tensor.bits, ()),
        "range": (lambda tensor: "{:.4g} to {:.4g}".format(*tensor.range), ()),
        "identical_percent": (lambda tensor: 100 * tensor.run.identical, IDENTICAL),
        # Model Explorer colours the nodes by the last file.
        "signal_to_noise_db": (lambda tensor: tensor.sqnr and round(tensor.sqnr, 1), SIGNAL),
    }
    paths = []
    for name, (figure, colours) in figures.items():
        values = {tensor.tensor: figure(tensor) for tensor in tensors}
        data = {
            "results": {
                key: {"value": value} for key, value in values.items() if value is not None
            },
            "thresholds": [{"value": end, "bgColor": colour} for end, colour in colours],
            "hideInAggregatedStatsTable": True,  # Their sums and means are meaningless.
            "hideInChildrenStatsTable": True,
        }
        paths.append(folder / f"{name}.json")
        write_contents(json.dumps(data, indent=1), paths[-1])
    return paths


def show_in_model_explorer(tflite: str | os.PathLike[str], node_data: Iterable[Path]) -> None:
    """Opens a TFLite file in Model Explorer; returns when its server is stopped.

    Raises:
        ImportError: without the package `ai-edge-model-explorer`.
    """
    try:
        import model_explorer
    except ImportError as error:
        raise ImportError(
            "Opening the file needs Model Explorer: pip install ai-edge-model-explorer"
        ) from error
    config = model_explorer.config().add_model_from_path(os.fspath(tflite))
    for path in node_data:
        config.add_node_data_from_path(os.fspath(path))
    model_explorer.visualize_from_config(config)
