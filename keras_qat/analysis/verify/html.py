"""The report of `verify` as an HTML page."""

from __future__ import annotations

import math

from keras_qat.analysis.drawing.html_page import Cell, Table, page
from keras_qat.analysis.verify.report import OutputReport, Report, TensorReport
from keras_qat.analysis.verify.report_text import kernel_names, share

NINES = 6
"""End of the axis of identical codes: less than one in a million differs."""

MOST_DECIBELS = 60.0
"""End of the axis of signal to noise: what is better makes no difference."""

NOTHING = Cell("-", math.nan)


def report_page(report: Report) -> str:
    """Writes the report as one HTML page."""
    findings = report.findings()
    facts = {
        "examples": str(report.examples),
        "kernels": report.kernels,
        "runtime": report.runtime,
        "identical outputs": share(report.identical),
        "largest difference": f"{report.max_difference:g} LSB",
    }
    if report.tensors:
        facts["layers"] = str(len(report.tensors))
    if report.arena_size is not None:
        facts["arena"] = f"{report.arena_size} bytes"
    tables = [_outputs(report.outputs)]
    if report.tensors:
        tables.append(_layers(report.tensors))
    else:
        findings = [*findings, "verify(..., per_layer=True) compares each layer."]
    color = "good" if report.verdict.is_good else "poor" if report.verdict.is_same else "bad"
    verdict = str(report.verdict)
    return page("TFLite file against the model", verdict, color, facts, findings, tables)


def _outputs(outputs: tuple[OutputReport, ...]) -> Table:
    columns = {
        "output": "Name of the output",
        "identical": "Share of the outputs that are identical",
        "largest diff.": "In steps (LSB) of the output",
        "mean diff.": "In steps (LSB) of the output",
        "same argmax": "Share of rows with the same class as the model's",
        "float: same argmax": "Share of rows with the same class as the float model's",
        "SQNR dB": "Signal to quantization noise ratio, against the float model",
        "accuracy": "Share of the examples that the file classifies correctly",
        "float: accuracy": "Share of the examples that the float model classifies correctly",
    }
    rows = [
        [
            Cell(output.name),
            Cell(share(output.identical), output.identical),
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


def _percent(part: float | None) -> Cell:
    return NOTHING if part is None else Cell(f"{part:.2%}", part)


def _decibels(sqnr: float | None) -> Cell:
    if sqnr is None:
        return NOTHING
    return Cell(f"{sqnr:.1f}", sqnr, bar=min(max(sqnr / MOST_DECIBELS, 0.0), 1.0), color="noise")


def nines(identical: float) -> float:
    """Converts a share to its number of nines, 0 to 1: 99.9 % is halfway from 0 to the end."""
    return min(-math.log10(max(1 - identical, 10.0**-NINES)) / NINES, 1.0)


COLUMNS = {
    "layer": "Name in the float model",
    "no.": "Order of computation",
    "kernel": "Operations of the file",
    "fed: same": "Identical outputs of the layer, given the model's inputs",
    "fed: LSB": "Largest difference, given the model's inputs",
    "run: same": "Identical outputs of the layer in a free run of the file",
    "run: LSB": "Largest difference in a free run of the file",
    "at ends": "Share of the values at an end of the range",
    "clipped": "Share of the float values outside the range",
    "range used": "Share of the range that the float values use",
    "SQNR dB": "Signal to quantization noise ratio, against the float model; a full bar is 60",
    "scale": "Float value of one step in the file",
    "zero": "Zero point in the file",
}
NOTE = (
    "fed: each layer of the file gets the model's inputs, which shows the layer that differs "
    "(orange: only rounding of the kernels). run: a free run of the file, in which differences add "
    "up. The bars of both count nines: half a bar is 99.9 %. at ends: values that may be clipped, "
    "without the zeros of a ReLU. clipped: float values outside the range. SQNR: the distance "
    "from the float model; higher is better. 8 bits have 30 to 50 dB. Look at layers whose SQNR is "
    "much lower than that of the layer before."
)


def _layers(tensors: tuple[TensorReport, ...]) -> Table:
    def cells(number: int, tensor: TensorReport) -> list[Cell]:
        fed, run, at_ends = tensor.fed, tensor.run, tensor.at_ends
        color = "good" if tensor.agrees else "rounded" if tensor.simulated == 1 else "bad"
        if fed is None:
            of_fed = [NOTHING, NOTHING]
        else:
            of_fed = [
                _share(fed.identical, color),
                Cell(f"{fed.max_difference:g}", fed.max_difference),
            ]
        return [
            Cell(tensor.name, title=", ".join(tensor.layers)),
            Cell(str(number), number),
            Cell(kernel_names(tensor), title=", ".join(tensor.kernels)),
            *of_fed,
            _share(run.identical, "run"),
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


def _share(value: float, color: str) -> Cell:
    return Cell(share(value), value, color == "bad", bar=nines(value), color=color)
