"""What the site changes on pages, and on docstrings, that are also read elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """The changelog is the file of the repository, whose links begin there."""
    if page.file.src_uri == "changelog.md":
        return Path("CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
    return markdown


class Examples(griffe.Extension):
    """Docstrings say `Example:`; griffe knows that section by its plural, and shows it as code."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M
            )
