"""The report of `verify` as an HTML page."""

from __future__ import annotations

import math

from keras_qat.analysis.drawing.html_page import Bar, Cell, Chart, Table, page
from keras_qat.analysis.verify.report import OutputReport, Report, TensorReport, kernel_names, share

__all__ = ["report_page"]

NINES = 6
"""Where the axis of identical codes ends: fewer than one in a million that differs."""

NOTHING = Cell("-", math.nan)


def report_page(report: Report) -> str:
    """The whole report as one page."""
    findings = report.findings()
    is_good = not findings and (bool(report.tensors) or report.identical == 1)
    verdict = f"{share(report.identical)} of the output's codes are those of the model"
    if is_good and report.tensors:
        verdict += "; every layer computes what was trained"
    facts = {
        "examples": str(report.examples),
        "kernels": report.kernels,
        "runtime": report.runtime,
        "largest difference": f"{report.max_difference:g} LSB",
    }
    if report.tensors:
        facts["layers"] = str(len(report.tensors))
    if report.arena_size is not None:
        facts["arena"] = f"{report.arena_size} bytes"
    parts: list[Table | list[Chart]] = [_outputs(report.outputs)]
    if report.tensors:
        parts += [_charts(report.tensors), _layers(report.tensors)]
    else:
        findings = [*findings, "Layers are compared by verify(..., per_layer=True)."]
    return page("TFLite file against the model", verdict, is_good, facts, findings, parts)


def _outputs(outputs: tuple[OutputReport, ...]) -> Table:
    columns = {
        "output": "Name of the output",
        "identical": "Share of codes that are the same",
        "largest diff.": "In steps (LSB) of the output",
        "mean diff.": "In steps (LSB) of the output",
        "same argmax": "Share of examples with the same class",
    }
    rows = [
        [
            Cell(each.name),
            Cell(share(each.identical), each.identical),
            Cell(f"{each.max_difference:.3g} LSB", each.max_difference),
            Cell(f"{each.mean_difference:.2g} LSB", each.mean_difference),
            NOTHING
            if each.argmax_agreement is None
            else Cell(f"{each.argmax_agreement:.2%}", each.argmax_agreement),
        ]
        for each in outputs
    ]
    return Table("Outputs", columns, rows)


def _charts(tensors: tuple[TensorReport, ...]) -> list[Chart]:
    names = [each.name for each in tensors]
    fed = [1.0 if each.fed is None else each.fed.identical for each in tensors]
    same = [
        Bar(
            each.name, nines(value), share(value), _kind(each), nines(each.run.identical),
        )
        for each, value in zip(tensors, fed, strict=True)
    ]  # fmt: skip
    most = max((each.sqnr or 0.0 for each in tensors), default=0.0) or 1.0
    noise = [
        Bar(
            each.name, (each.sqnr or 0.0) / most,
            "-" if each.sqnr is None else f"{each.sqnr:.1f} dB", "noise",
        )
        for each in tensors
    ]  # fmt: skip
    largest = max(0.01, *(each.at_ends for each in tensors))
    ends = [
        Bar(name, each.at_ends / largest, f"{each.at_ends:.2%}", "ends")
        for name, each in zip(names, tensors, strict=True)
    ]
    ticks = {place / NINES: word for place, word in enumerate(("0", "90 %", "99 %", "99.9 %"))}
    return [
        Chart(
            "Identical codes",
            "Each layer fed the model's codes, so that the one that differs is seen; orange: by "
            "the kernels' own rounding. Grey: a free run of the file, where differences add up.",
            same,
            {**ticks, 1.0: "100 %"},
        ),
        Chart(
            "Signal to quantization noise",
            "Against the model in float: the higher, the less quantization costs. A layer that "
            "falls far behind the one before it is worth a look.",
            noise,
            {0.0: "0", 0.5: f"{most / 2:.0f} dB", 1.0: f"{most:.0f} dB"},
        ),
        Chart(
            "Codes at the ends of the range",
            "What may be clipped. The zeros of a ReLU are not counted.",
            ends,
            {0.0: "0", 1.0: f"{largest:.1%}"},
        ),
    ]


def _kind(each: TensorReport) -> str:
    """The colour of a layer's bar."""
    return "good" if each.agrees else "rounded" if each.simulated == 1 else "bad"


def nines(identical: float) -> float:
    """A share as its number of nines, 0 to 1: 99.9 % and 99.99 % are as far apart as 0 and 90."""
    return min(-math.log10(max(1 - identical, 10.0**-NINES)) / NINES, 1.0)


COLUMNS = {
    "layer": "Name in the float model",
    "no.": "Order of computation",
    "kernel": "Operations of the file",
    "fed: same": "Identical codes, fed the model's own",
    "fed: LSB": "Largest difference, fed the model's codes",
    "run: same": "Identical codes in a free run of the file",
    "run: LSB": "Largest difference in a free run",
    "at ends": "Share of codes at an end of the range",
    "SQNR dB": "Signal to quantization noise against the model in float",
    "scale": "Real value of one step in the file",
    "zero": "Zero point in the file",
}


def _layers(tensors: tuple[TensorReport, ...]) -> Table:
    rows = [
        [
            Cell(each.name, title=", ".join(each.layers)),
            Cell(str(place), place),
            Cell(kernel_names(each), title=", ".join(each.kernels)),
            NOTHING if each.fed is None else _share(each.fed.identical, not each.agrees),
            NOTHING
            if each.fed is None
            else Cell(f"{each.fed.max_difference:g}", each.fed.max_difference),
            _share(each.run.identical),
            Cell(f"{each.run.max_difference:g}", each.run.max_difference),
            Cell(f"{each.at_ends:.2%}", each.at_ends),
            NOTHING if each.sqnr is None else Cell(f"{each.sqnr:.1f}", each.sqnr),
            Cell(f"{each.file_scale:.6g}", each.file_scale, not each.same_range),
            Cell(str(each.file_zero_point), each.file_zero_point, not each.same_range),
        ]
        for place, each in enumerate(tensors, start=1)
    ]
    return Table("Layers", COLUMNS, rows)


def _share(value: float, is_bad: bool = False) -> Cell:
    return Cell(share(value), value, is_bad)
