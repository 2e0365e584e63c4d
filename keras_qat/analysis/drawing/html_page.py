"""Reports as one HTML page: tables that sort, charts of bars; no other file, no network."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from keras_qat.analysis.drawing.svg import element, fitted, group

__all__ = ["Bar", "Cell", "Chart", "Table", "page"]

WIDTH, ROW, FOOT = 350.0, 30.0, 22.0
"""Of a chart, of a bar with its name above it, and of the axis below."""


class Cell(NamedTuple):
    """A cell of a table.

    Args:
        text: what it shows.
        value: the number by which its column is sorted, NaN where there is none; None for text.
        is_bad: whether it is shown in red.
        title: what is shown when the pointer is on it.
    """

    text: str
    value: float | None = None
    is_bad: bool = False
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table that is sorted by a click on the head of a column.

    Args:
        title: above it.
        columns: names of the columns -> what each is.
        rows: a cell for each column.
    """

    title: str
    columns: dict[str, str]
    rows: Sequence[Sequence[Cell]]


class Bar(NamedTuple):
    """A bar of a chart.

    Args:
        name: above it.
        length: 0 to 1.
        text: the number that it stands for.
        kind: its colour: "good", "bad", "rounded", "noise" or "ends".
        behind: length of a paler bar behind it, or None.
    """

    name: str
    length: float
    text: str
    kind: str
    behind: float | None = None


@dataclasses.dataclass(frozen=True)
class Chart:
    """Bars, one below the other.

    Args:
        title: above them.
        note: what is to be seen.
        bars: the bars.
        ticks: places on the axis, 0 to 1 -> what they say.
    """

    title: str
    note: str
    bars: Sequence[Bar]
    ticks: dict[float, str]


def page(
    title: str,
    verdict: str,
    is_good: bool,
    facts: dict[str, str],
    findings: Iterable[str],
    parts: Iterable[Table | list[Chart]],
) -> str:
    """A page that needs no other file.

    Args:
        title: what was looked at.
        verdict: what was found, in a few words.
        is_good: whether that is as it should be.
        facts: what -> value, each in a few words.
        findings: what is not as it should be, a sentence each.
        parts: tables, and charts that stand beside each other where there is room.
    """
    told = "".join(f"<li>{_text(each)}</li>" for each in findings)
    known = "".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in facts.items()
    )
    body = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="verdict {"good" if is_good else "bad"}">{_text(verdict)}</p>',
        f"<dl>{known}</dl>",
        f"<ul>{told}</ul>" if told else "",
        *(_table(each) if isinstance(each, Table) else _charts(each) for each in parts),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>{''.join(body)}</main><script>{SCRIPT}</script></body></html>\n"
    )


def _text(words: str) -> str:
    return html.escape(words)


def _table(table: Table) -> str:
    head = ""
    for place, (name, what) in enumerate(table.columns.items()):
        is_number = any(row[place].value is not None for row in table.rows)
        kind = ' class="number"' if is_number else ""
        button = f"<button>{_text(name)}</button>"
        head += f'<th{kind} aria-sort="none" title="{_text(what)}">{button}</th>'
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    return (
        f'<h2>{_text(table.title)}</h2><div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _cell(cell: Cell) -> str:
    names = ["number"] * (cell.value is not None) + ["bad"] * cell.is_bad
    kind = f' class="{" ".join(names)}"' if names else ""
    value = "" if cell.value is None or math.isnan(cell.value) else f' data-value="{cell.value!r}"'
    title = f' title="{_text(cell.title)}"' if cell.title else ""
    return f"<td{kind}{value}{title}>{_text(cell.text)}</td>"


def _charts(charts: list[Chart]) -> str:
    return f'<div class="charts">{"".join(map(_chart, charts))}</div>'


def _chart(chart: Chart) -> str:
    foot = ROW * len(chart.bars) + 4
    lines = [
        element("path", d=f"M{x * WIDTH:.1f} 0V{foot:.1f}", class_="grid") for x in chart.ticks
    ]
    ends = {0.0: "start", 1.0: "end"}
    words = [
        _words(x * WIDTH, foot + 15, text, "tick", ends.get(x, "middle"))
        for x, text in chart.ticks.items()
    ]
    bars = "".join(_bar(each, place * ROW) for place, each in enumerate(chart.bars))
    height = foot + FOOT
    picture = element(
        "svg",
        "".join([*lines, bars, *words]),
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
        aria_label=chart.title,
    )
    return (
        f"<figure><figcaption><h3>{_text(chart.title)}</h3>{_text(chart.note)}</figcaption>"
        f"{picture}</figure>"
    )


def _bar(bar: Bar, y: float) -> str:
    parts = [_words(0, y + 12, fitted(bar.name, WIDTH - 90, 11), "name", "start")]
    parts.append(_words(WIDTH, y + 12, bar.text, "name", "end"))
    for length, kind, height in ((bar.behind, "behind", 12.0), (bar.length, bar.kind, 8.0)):
        if length is not None:
            size = max(length * WIDTH, 1.0) if length > 0 else 0.0
            top = y + 22 - height / 2
            parts.append(
                element("rect", x=0, y=top, width=size, height=height, rx=1.5, class_=kind)
            )
    return group("".join(parts), f"{bar.name}: {bar.text}")


def _words(x: float, y: float, words: str, kind: str, anchor: str) -> str:
    return element("text", _text(words), x=x, y=y, class_=kind, text_anchor=anchor)


STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --pale: #616e7c; --line: #d8dee6;
  --paper: #fff; --shade: #f3f5f8; --good: #2f8f6b; --bad: #d03b3b; --noise: #4a7fe0;
  --ends: #d9822b; --behind: #c5ccd6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --pale: #9aa5b1; --line: #3a4350;
  --paper: #161a20; --shade: #20262e; --behind: #4a5462; --bad: #ef6a6a; --good: #46b58b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 ui-sans-serif, system-ui, "Segoe UI", Roboto, "DejaVu Sans", Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 12px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 32px 0 8px; }
h3 { font-size: 1rem; margin: 0; color: var(--ink); }
.verdict { padding: 10px 14px; border-left: 5px solid; background: var(--shade);
  font-weight: 600; margin: 0; }
.verdict.good { border-color: var(--good); } .verdict.bad { border-color: var(--bad); }
dl { display: flex; flex-wrap: wrap; gap: 10px 28px; margin: 16px 0; }
dt { color: var(--pale); font-size: .82rem; } dd { margin: 0; font-weight: 600; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { padding: 5px 10px; text-align: left; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
tbody tr:last-child td { border-bottom: 0; } tbody tr:hover td { background: var(--shade); }
th { background: var(--shade); padding: 0; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--paper);
  max-width: 46vw; overflow: hidden; text-overflow: ellipsis; }
th:first-child { background: var(--shade); }
th button { all: unset; box-sizing: border-box; cursor: pointer; display: block; font-weight: 600;
  padding: 7px 10px; width: 100%; }
th button:focus-visible { outline: 2px solid var(--noise); }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
th.number button { text-align: right; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
td.bad { color: var(--bad); font-weight: 600; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(300px, 100%), 1fr));
  gap: 24px 36px; margin-top: 28px; }
figure { margin: 0; } figcaption { color: var(--pale); font-size: .85rem; }
@media (min-width: 700px) { figcaption { min-height: 8em; } }
svg { display: block; width: 100%; max-width: 480px; height: auto; overflow: visible; }
svg text { font-size: 11px; fill: var(--ink); } svg .tick { fill: var(--pale); font-size: 10px; }
.grid { stroke: var(--line); stroke-width: 1; }
rect.good { fill: var(--good); } rect.bad { fill: var(--bad); } rect.noise { fill: var(--noise); }
rect.ends, rect.rounded { fill: var(--ends); } rect.behind { fill: var(--behind); }
"""

SCRIPT = """
for (const button of document.querySelectorAll("th button")) button.onclick = () => {
  const head = button.parentElement, table = head.closest("table"), body = table.tBodies[0];
  const column = head.cellIndex, up = head.getAttribute("aria-sort") !== "ascending";
  for (const other of head.parentElement.cells) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const key = row => { const cell = row.cells[column];
    return cell.classList.contains("number") ? Number(cell.dataset.value ?? -Infinity)
                                             : cell.textContent; };
  const compare = (a, b) => typeof a === "number" && typeof b === "number" ? a - b
    : String(a).localeCompare(String(b), undefined, { numeric: true });
  body.append(...[...body.rows].sort((a, b) => (up ? 1 : -1) * compare(key(a), key(b))));
};
"""
