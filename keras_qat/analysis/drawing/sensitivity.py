"""What `sensitivity` found as an HTML page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keras_qat.analysis.drawing.html_page import Bar, Cell, Chart, Table, page

if TYPE_CHECKING:
    from keras_qat.analysis.sensitivity import LayerSensitivity, Sensitivity

__all__ = ["sensitivity_page"]


def sensitivity_page(found: Sensitivity) -> str:
    """The ranking as charts, one for each number of bits, and as a table."""
    ranked = found.ranked()
    bits = sorted({each for layer in ranked for each in layer.costs})
    facts = {"layers": str(len(ranked)), "bits": ", ".join(map(str, bits))}
    facts["weights"] = str(sum(each.weights for each in ranked))
    verdict = "No layer has weights to quantize"
    if ranked:
        verdict = f"'{ranked[0].name}' suffers most from weights of {bits[0]} bits"
    charts = [_chart(found.ranked(each), each) for each in bits]
    return page("Sensitivity of layers", verdict, True, facts, [], [charts, _table(ranked, bits)])


def _chart(ranked: list[LayerSensitivity], bits: int) -> Chart:
    most = max((each.costs[bits] for each in ranked), default=0.0) or 1.0
    bars = [
        Bar(each.name, max(each.costs[bits], 0.0) / most, f"{each.costs[bits]:.3g}", "noise")
        for each in ranked
    ]
    note = "The cost of so few bits in this layer alone, all else being in float."
    return Chart(f"{bits} bits", note, bars, {0.0: "0", 1.0: f"{most:.3g}"})


def _table(ranked: list[LayerSensitivity], bits: list[int]) -> Table:
    columns = {"layer": "Name in the float model", "weights": "How many it has"}
    columns |= {f"{each} bits": f"The cost of {each} bits in this layer alone" for each in bits}
    rows = [
        [
            Cell(each.name),
            Cell(str(each.weights), each.weights),
            *(Cell(f"{each.costs[b]:.3g}", each.costs[b]) for b in bits),
        ]
        for each in ranked
    ]
    return Table("Layers", columns, rows)
