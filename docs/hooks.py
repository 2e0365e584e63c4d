"""What the site changes on pages, and on docstrings, that are also read elsewhere."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import griffe

log = logging.getLogger("mkdocs.hooks")


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """The changelog is the file of the repository, whose links begin there.

    Figures in tables, such as "89.5 ± 0.1", are not broken into lines on phones.
    """
    if page.file.src_uri == "changelog.md":
        return Path("CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
    return re.sub(r"(?<=\| )-?\d[^|`\n]{0,25}(?= \|)", unbroken, markdown)


def unbroken(match: re.Match[str]) -> str:
    """Returns the text with spaces at which no line ends."""
    return match[0].replace(" ", "\u00a0")


def on_page_content(html: str, page: Any, **kwargs: Any) -> str:
    """Notebooks link to pages by their sources, as they are read in the repository too."""
    if page.file.src_uri.endswith(".ipynb"):
        return re.sub(r'href="(?!\w+:)([^"#]+)\.(?:md|ipynb)([#"])', r'href="\1.html\2', html)
    return html


def on_post_build(config: Any) -> None:
    """Warns of links that lead nowhere; mkdocs does not look into notebooks."""
    site = Path(config.site_dir)
    for page in site.rglob("*.html"):
        for target in re.findall(r'<a [^>]*href="([^"#?]+)', page.read_text(encoding="utf-8")):
            path = page.parent / unquote(target)
            if not re.match(r"\w+:|/", target) and not path.exists():
                log.warning("%s links to %s, which does not exist", page.relative_to(site), target)


class Examples(griffe.Extension):
    """Docstrings say `Example:`; griffe knows that section by its plural, and shows it as code."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M
            )
