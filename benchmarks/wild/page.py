"""docs/wild.md, made of what was measured.

python -m benchmarks.wild --output wild.json
python -m benchmarks.wild.page wild.json > docs/wild.md
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["page"]

INTRODUCTION = """\
# Architectures in the wild

`python -m benchmarks.wild` takes {count} architectures that are not Keras' own through everything,
each in a process of its own: {packages} of other packages and {by_hand} written by hand
(`benchmarks/wild`), with random weights. It takes hours.

Each is planned, quantized, trained for a step, saved as `.keras` and loaded again (what was loaded
has to export the same file), exported, simulated in integers, and compared with the model on 8
examples, with XNNPACK.

| | architectures |
| --- | --- |
| taken | {count} |
| no float operator, by default | {default} ({default_share:.0%}) |
| no float operator if normalizing layers are computed in integers | {ints} ({share:.0%}) |
| of these {ints}: all output integers of file and model are equal | {exact} |
| of these {ints}: all that `simulate` computes are equal | {simulated} |

LayerNormalization and GroupNormalization are in float by default, as TFLite's kernels of 16 bits
are slow. An override, or a target without float, has them [in integers](layers.md), as in the
table below.

```
{command}
```

{versions}

## The table

* integers: operators of the file that compute in integers, of all.
* norms: LayerNormalization and GroupNormalization, in integers here and in float by default.
* codes: those of the file's outputs that the model gives too; simulated: and `simulate`.
* in float: how many layers, and why.
"""

COLUMNS = "architecture, parameters, trains, reloads, integers, norms, codes, simulated, in float"


def page(data: dict[str, Any]) -> str:
    """The page, of what `benchmarks.zoo` saved."""
    rows = data["models"]
    ints = [row for row in rows if _has_no_float(row)]
    default = [row for row in ints if not row["normalizing"]]
    by_hand = sum(row["name"].startswith("by hand") for row in rows)
    head = INTRODUCTION.format(
        count=len(rows),
        packages=len(rows) - by_hand,
        by_hand=by_hand,
        ints=len(ints),
        share=len(ints) / len(rows),
        default=len(default),
        default_share=len(default) / len(rows),
        exact=sum(row.get("identical") == 1 for row in ints),
        simulated=sum(row.get("simulated") == 1 for row in ints),
        command=_command(),
        versions=", ".join(f"{name} {value}" for name, value in data["versions"].items()),
    )
    columns = COLUMNS.split(", ")
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows]
    return "\n".join([head, *lines])


def _command() -> str:
    """How to install and to run it, as the package says."""
    from benchmarks import wild

    assert wild.__doc__ is not None
    return wild.__doc__.split("\n\n")[1].strip()


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
    ", and it cannot be opened: it ": ", which ",
    ", and it cannot be opened": ", not opened",
    ", which takes more than 8 bits": "",
    "; its weights are int8": "",
}


if __name__ == "__main__":
    print(page(json.loads(Path(sys.argv[1]).read_text())))
