"""The result of `sensitivity` as an HTML page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keras_qat.analysis.drawing.html_page import Cell, Table, page

if TYPE_CHECKING:
    from keras_qat.analysis.sensitivity import Sensitivity


def sensitivity_page(result: Sensitivity) -> str:
    """Writes the ranking as a table with a column for each number of bits."""
    ranked = result.ranked()
    tried = sorted({bits for layer in ranked for bits in layer.costs})
    facts = {"layers": str(len(ranked)), "bits": ", ".join(map(str, tried))}
    facts["weights"] = str(sum(layer.weights for layer in ranked))
    verdict = "No layer has weights to quantize"
    if ranked:
        verdict = f"'{ranked[0].name}' suffers most from weights of {tried[0]} bits"
    most = {bits: max(layer.costs[bits] for layer in ranked) or 1.0 for bits in tried}
    columns = {"layer": "Name in the float model", "weights": "How many it has"}
    columns |= {f"{bits} bits": f"Cost of {bits} bits in this layer alone" for bits in tried}
    rows = [
        [
            Cell(layer.name),
            Cell(str(layer.weights), layer.weights),
            *(
                Cell(f"{cost:.3g}", cost, bar=max(cost / most[bits], 0.0), color="noise")
                for bits, cost in sorted(layer.costs.items())
            ),
        ]
        for layer in ranked
    ]
    note = "The cost of so few bits in one layer alone, all else being in float."
    return page(
        "Sensitivity of layers", verdict, True, facts, [], [Table("Layers", columns, rows, note)]
    )
