"""Pictures as SVG, written by hand: no library draws them, and every browser shows them."""

from __future__ import annotations

import dataclasses
import html
import os
from typing import Any

from keras_qat.io.atomic_files import check_writable, replacing

__all__ = ["Picture", "element", "fitted", "group", "label", "number", "width_of"]

FONT = "ui-sans-serif, system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', Arial, sans-serif"


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
        """Writes an `.svg` file, or an `.html` page that needs nothing else.

        Raises:
            ValueError: for another ending.
        """
        target = check_writable(path)
        if target.suffix not in (".svg", ".html"):
            raise ValueError(f"{target}: pictures are written as .svg or .html.")
        title = html.escape(self.title)
        page = (
            f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
            f'<meta name="viewport" content="width=device-width"><body>{self.svg}</body></html>'
        )
        with replacing(target) as path:
            path.write_text(page if target.suffix == ".html" else self.svg, encoding="utf-8")

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"Picture({self.title!r}, {len(self.svg)} bytes of SVG)"


def picture(title: str, body: str, width: float, height: float) -> Picture:
    """A picture of a size, on white."""
    size = {"width": width, "height": height, "viewBox": f"0 0 {number(width)} {number(height)}"}
    attributes = {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "font-family": FONT}
    back = element("rect", width=width, height=height, fill="white")
    name = f"<title>{html.escape(title)}</title>"
    return Picture(element("svg", name + back + body, **attributes, **size), title)


def element(tag: str, content: str = "", /, **attributes: Any) -> str:
    """An element of SVG. Of `stroke_width` it makes `stroke-width`; None leaves it out."""
    given = "".join(
        f' {name.rstrip("_").replace("_", "-") if name != "viewBox" else name}="{_value(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{given}>{content}</{tag}>" if content else f"<{tag}{given}/>"


def group(content: str, title: str = "", **attributes: Any) -> str:
    """Elements together, with a text that is shown when a pointer is on them."""
    name = f"<title>{html.escape(title)}</title>" if title else ""
    return element("g", name + content, **attributes)


def label(x: float, y: float, words: str, size: float = 12, **attributes: Any) -> str:
    """Words at a place, on a line that begins there."""
    style = {"fill": "#1f2933", **attributes}
    return element("text", html.escape(words), x=x, y=y, font_size=size, **style)


def width_of(words: str, size: float = 12) -> float:
    """About how wide some words are. Capitals and digits are wider than other letters."""
    wide = sum(each.isupper() or each.isdigit() or each in "mw_@" for each in words)
    return size * (0.5 * len(words) + 0.13 * wide)


def fitted(words: str, width: float, size: float = 12) -> str:
    """Words, their middle left out where they are wider."""
    if width_of(words, size) <= width:
        return words
    for kept in range(len(words) - 1, 1, -1):
        shorter = f"{words[: (kept + 1) // 2]}…{words[-(kept // 2) :]}"
        if width_of(shorter, size) <= width:
            return shorter
    return words[:1] + "…"


def number(value: float) -> str:
    """A number in few digits."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _value(value: Any) -> str:
    return number(value) if isinstance(value, float) else html.escape(str(value))
