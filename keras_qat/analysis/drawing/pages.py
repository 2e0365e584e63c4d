"""Pictures as SVG, drawn with matplotlib, and reports as self-contained HTML pages."""

from __future__ import annotations

import dataclasses
import html
import io
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Literal, NamedTuple

from keras_qat.io.atomic_files import check_writable, write_contents

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _read_template(name: str) -> Template:
    return Template(Path(__file__).with_name(name).read_text(encoding="utf-8"))


PAGE, PICTURE = _read_template("page.html"), _read_template("picture.html")

INK, GREY = "#1f2933", "#52606d"
"""Colours of text."""


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture as SVG. Notebooks show it; `save` writes it.

    Args:
        svg: the picture, one `<svg>` element.
        title: the title.
    """

    svg: str
    title: str

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes an `.svg` file, or an `.html` page with a search field and zoom.

        Args:
            path: where to write it; the suffix decides. An existing file is replaced.

        Raises:
            ValueError: for another suffix.

        Example:
            >>> keras_qat.plot_model(qat).save("model.html")
        """
        target = check_writable(path)
        if target.suffix not in (".svg", ".html"):
            raise ValueError(f"{target}: pictures can be saved as .svg or .html only.")
        text = self.svg
        if target.suffix == ".html":
            text = PICTURE.substitute(title=html.escape(self.title), svg=self.svg)
        write_contents(text, target)

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"Picture({self.title!r}, {len(self.svg)} bytes of SVG)"


def new_figure(width: float, height: float, layout: Literal["constrained"] | None = None) -> Figure:
    """Creates an empty matplotlib figure.

    Args:
        width, height: in inches.
        layout: the layout engine.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Pictures need matplotlib: pip install 'keras-qat[plot]'.") from error
    return Figure(figsize=(width, height), layout=layout)


def render(figure: Figure, title: str) -> Picture:
    """Renders a figure as SVG. Text remains text, which browsers can search."""
    import matplotlib as mpl

    file = io.StringIO()
    options = {"svg.fonttype": "none", "svg.hashsalt": "keras_qat"}
    with mpl.rc_context({**options, "font.sans-serif": ["DejaVu Sans", "Arial"]}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Title": title})
    svg = file.getvalue()
    return Picture(svg[svg.index("<svg") :], title)


def shorten(text: str, length: int) -> str:
    """Shortens a text to `length` letters by removing its middle."""
    if len(text) <= length:
        return text
    return f"{text[: (length - 1) // 2]}…{text[len(text) - length // 2 :]}"


class Cell(NamedTuple):
    """A cell of a table.

    Args:
        text: the text.
        value: the sort key in its column, NaN for an empty cell; None for text.
        is_wrong: whether it is shown in red.
        title: text that is shown when the pointer is on it.
        bar: length of the bar at its foot, 0 to 1; None for no bar.
        color: the bar's colour: "good", "bad", "rounded", "noise", "ends" or "run".
    """

    text: str
    value: float | None = None
    is_wrong: bool = False
    title: str = ""
    bar: float | None = None
    color: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table. A click on the head of a column sorts it.

    Args:
        title: the heading above the table.
        columns: names of the columns -> descriptions, shown when the pointer is on the head.
        rows: a cell for each column.
        note: a sentence below the title.
    """

    title: str
    columns: dict[str, str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


def fill_page(
    title: str,
    verdict: str,
    color: str,
    facts: dict[str, str],
    findings: Iterable[str],
    tables: Iterable[Table],
) -> str:
    """Returns an HTML page that needs no other file.

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
    return PAGE.substitute(
        title=html.escape(title),
        verdict=html.escape(verdict),
        verdict_class=color,
        facts="".join(terms),
        findings=f"<ul>{items}</ul>" if items else "",
        tables="".join(map(_format_table, tables)),
    )


def _format_table(table: Table) -> str:
    head = ""
    for index, (name, meaning) in enumerate(table.columns.items()):
        is_number = any(row[index].value is not None for row in table.rows)
        kind = ' class="number"' if is_number else ""
        button = f"<button>{html.escape(name)}</button>"
        head += f'<th{kind} aria-sort="none" title="{html.escape(meaning)}">{button}</th>'
    rows = "".join(f"<tr>{''.join(map(_format_cell, row))}</tr>" for row in table.rows)
    note = f"<p>{html.escape(table.note)}</p>" if table.note else ""
    return (
        f'<h2>{html.escape(table.title)}</h2>{note}<div class="wide"><table><thead><tr>{head}</tr>'
        f"</thead><tbody>{rows}</tbody></table></div>"
    )


def _format_cell(cell: Cell) -> str:
    names = ["number"] * (cell.value is not None) + ["wrong"] * cell.is_wrong
    style = ""
    if cell.bar is not None:
        names += ["bar", cell.color]
        style = f' style="--length: {cell.bar:.1%}"'
    kind = f' class="{" ".join(names)}"' if names else ""
    value = "" if cell.value is None or math.isnan(cell.value) else f' data-value="{cell.value!r}"'
    title = f' title="{html.escape(cell.title)}"' if cell.title else ""
    return f"<td{kind}{style}{value}{title}>{html.escape(cell.text)}</td>"
