"""Reports as one HTML page: tables that sort, with bars in their cells; it needs no network."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template
from typing import NamedTuple

TEMPLATE = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))


class Cell(NamedTuple):
    """A cell of a table.

    Args:
        text: what it shows.
        value: the number by which its column is sorted, NaN where there is none; None for text.
        is_wrong: whether it is shown in red.
        title: what is shown when the pointer is on it.
        bar: length of the bar at its foot, 0 to 1; None for no bar.
        color: the bar's: "good", "bad", "rounded", "noise", "ends" or "run".
    """

    text: str
    value: float | None = None
    is_wrong: bool = False
    title: str = ""
    bar: float | None = None
    color: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table that is sorted by a click on the head of a column.

    Args:
        title: above it.
        columns: names of the columns -> what is in them, shown when the pointer is on the head.
        rows: a cell for each column.
        note: a sentence below the title.
    """

    title: str
    columns: dict[str, str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


def page(
    title: str,
    verdict: str,
    color: str,
    facts: dict[str, str],
    findings: Iterable[str],
    tables: Iterable[Table],
) -> str:
    """Fills the template: a page that needs no other file.

    Args:
        title: the subject of the report.
        verdict: the result, in a few words.
        color: "good", "poor" or "bad".
        facts: names -> values, each in a few words.
        findings: problems, a sentence each.
        tables: the tables.
    """
    items = "".join(f"<li>{html.escape(finding)}</li>" for finding in findings)
    terms = (
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
        for name, value in facts.items()
    )
    return TEMPLATE.substitute(
        title=html.escape(title),
        verdict=html.escape(verdict),
        verdict_class=color,
        facts="".join(terms),
        findings=f"<ul>{items}</ul>" if items else "",
        tables="".join(map(_table, tables)),
    )


def _table(table: Table) -> str:
    head = ""
    for index, (name, meaning) in enumerate(table.columns.items()):
        is_number = any(row[index].value is not None for row in table.rows)
        kind = ' class="number"' if is_number else ""
        button = f"<button>{html.escape(name)}</button>"
        head += f'<th{kind} aria-sort="none" title="{html.escape(meaning)}">{button}</th>'
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    note = f"<p>{html.escape(table.note)}</p>" if table.note else ""
    return (
        f'<h2>{html.escape(table.title)}</h2>{note}<div class="wide"><table><thead><tr>{head}</tr>'
        f"</thead><tbody>{rows}</tbody></table></div>"
    )


def _cell(cell: Cell) -> str:
    names = ["number"] * (cell.value is not None) + ["wrong"] * cell.is_wrong
    style = ""
    if cell.bar is not None:
        names += ["bar", cell.color]
        style = f' style="--length: {cell.bar:.1%}"'
    kind = f' class="{" ".join(names)}"' if names else ""
    value = "" if cell.value is None or math.isnan(cell.value) else f' data-value="{cell.value!r}"'
    title = f' title="{html.escape(cell.title)}"' if cell.title else ""
    return f"<td{kind}{style}{value}{title}>{html.escape(cell.text)}</td>"
