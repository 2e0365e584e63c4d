"""Pictures as SVG, drawn with matplotlib, which the extra `keras-qat[plot]` installs."""

from __future__ import annotations

import dataclasses
import html
import io
import os
from pathlib import Path
from string import Template
from typing import Any

from keras_qat.io.atomic_files import check_writable, write_contents

PAGE = Template(Path(__file__).with_name("picture.html").read_text(encoding="utf-8"))

INK, GREY = "#1f2933", "#52606d"
"""Colours of text."""


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture as SVG. Notebooks show it; `save` writes it.

    Args:
        svg: the picture, one `<svg>` element.
        title: what it shows.
    """

    svg: str
    title: str

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes an `.svg` file, or an `.html` page with a search field and zoom.

        Args:
            path: where to write it; the ending decides. An existing file is replaced.

        Raises:
            ValueError: for another ending.
        """
        target = check_writable(path)
        if target.suffix not in (".svg", ".html"):
            raise ValueError(f"{target}: pictures can be saved as .svg or .html only.")
        text = self.svg
        if target.suffix == ".html":
            text = PAGE.substitute(title=html.escape(self.title), svg=self.svg)
        write_contents(text, target)

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"Picture({self.title!r}, {len(self.svg)} bytes of SVG)"


def new_figure(width: float, height: float, **options: Any) -> Any:
    """Makes an empty matplotlib figure.

    Args:
        width, height: in inches.
        options: other arguments of `matplotlib.figure.Figure`.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Pictures need matplotlib: pip install 'keras-qat[plot]'.") from error
    return Figure(figsize=(width, height), **options)


def picture(figure: Any, title: str) -> Picture:
    """Renders a figure. Text stays text, so that browsers find words in it."""
    import matplotlib as mpl

    file = io.StringIO()
    options = {"svg.fonttype": "none", "svg.hashsalt": "keras_qat"}
    with mpl.rc_context({**options, "font.sans-serif": ["DejaVu Sans", "Arial"]}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Title": title})
    svg = file.getvalue()
    return Picture(svg[svg.index("<svg") :], title)


def shortened(words: str, length: int) -> str:
    """Leaves out the middle of words that are longer than `length` letters."""
    if len(words) <= length:
        return words
    return f"{words[: length // 2]}…{words[len(words) - (length - 1) // 2 :]}"
