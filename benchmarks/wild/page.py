"""Print the tables of benchmarks/results/wild.md.

python -m benchmarks.wild --output wild.json
python -m benchmarks.wild.page wild.json
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["tables"]

COUNTS = """\
| | architectures |
| --- | --- |
| taken | {count} |
| no float operator, by default | {default} ({default_share:.0%}) |
| no float operator if normalizing layers are computed in integers | {ints} ({share:.0%}) |
| of these {ints}: all output integers of file and model are equal | {exact} |
| of these {ints}: all that `simulate` computes are equal | {simulated} |
"""

COLUMNS = "architecture, parameters, trains, reloads, integers, norms, codes, simulated, in float"


def tables(data: dict[str, Any]) -> str:
    """The versions, the counts and a row for each model, of what `benchmarks.zoo` saved."""
    rows = data["models"]
    ints = [row for row in rows if _has_no_float(row)]
    default = [row for row in ints if not row["normalizing"]]
    counts = COUNTS.format(
        count=len(rows),
        ints=len(ints),
        share=len(ints) / len(rows),
        default=len(default),
        default_share=len(default) / len(rows),
        exact=sum(row.get("identical") == 1 for row in ints),
        simulated=sum(row.get("simulated") == 1 for row in ints),
    )
    columns = COLUMNS.split(", ")
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows]
    versions = ", ".join(f"{name} {value}" for name, value in data["versions"].items())
    return "\n".join([f"{versions}\n", counts, *lines])


def _has_no_float(row: dict[str, Any]) -> bool:
    return "error" not in row and not row["float_layers"] and not row["float_operations"]


def _cells(row: dict[str, Any]) -> list[str]:
    total = row.get("operations", 0)
    floating = sum(row.get("float_operations", {}).values())
    said = ("-", "yes", "no")
    return [
        row["name"],
        f"{row.get('parameters', 0):,}",
        *(said[{None: 0, True: 1, False: 2}[row.get(name)]] for name in ("trains", "reloads")),
        f"{total - floating}/{total}",
        str(row.get("normalizing", 0) or ""),
        *(f"{row[name]:.2%}" if name in row else "-" for name in ("identical", "simulated")),
        _why(row),
    ]


def _why(row: dict[str, Any]) -> str:
    """What is in float, and why; or what went wrong."""
    if "error" in row:
        return str(row["error"])
    reasons = collections.Counter(map(_short, row["float_layers"].values()))
    return "; ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))


def _short(reason: str) -> str:
    """A reason in a few words."""
    for words, fewer in SHORTER.items():
        reason = reason.replace(words, fewer)
    return reason.split(": TypeError")[0].replace("|", "/")


SHORTER = {
    "no int8 rule for ": "",
    ", and it cannot be traced: it ": ", which ",
    ", and it cannot be traced": ", not traced",
    ", which takes more than 8 bits": "",
    "; its weights are int8": "",
}


if __name__ == "__main__":
    print(tables(json.loads(Path(sys.argv[1]).read_text())))
