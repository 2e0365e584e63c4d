"""Changes that the site makes to pages and docstrings, which are also read in the repository."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import griffe
from mkdocs.structure.files import File

log = logging.getLogger("mkdocs.hooks")

RESULTS = Path("benchmarks/results")
SHIM = "iframe-worker.js"
"""Search without a server needs this script, which the theme would load from a CDN."""
CDN = re.compile(r"https://(?:unpkg\.com|cdnjs\.cloudflare\.com|cdn\.jsdelivr\.net)")
REMOTE_SCRIPT = re.compile(
    rf'<script[^>]*src="{CDN.pattern}[^"]*"[^>]*></script>'
    rf'|<script type="module">(?:(?!</script>).)*{CDN.pattern}.*?</script>',
    re.S,
)


def on_config(config: Any) -> None:
    """Uses the copy of the search shim in docs/ instead of the theme's."""
    config.extra["polyfills"] = [SHIM]


def on_files(files: Any, config: Any) -> Any:
    """Adds the results of the benchmarks to the site, as `results/<name>.html`."""
    for path in sorted(RESULTS.glob("*.md")):
        uri = f"results/{path.name}"
        files.append(File.generated(config, uri, content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Adapts links to files outside of docs/, and keeps figures in tables on one line."""
    uri = page.file.src_uri
    if uri == "changelog.md":
        return Path("CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
    if uri.startswith("results/"):
        page.meta["search"] = {"exclude": True}
        markdown = markdown.replace("](../../docs/", "](../")
    markdown = markdown.replace("](../benchmarks/results/", "](results/")
    return re.sub(r"(?<=\| )-?\d[^|`\n]{0,25}(?= \|)", _replace_spaces, markdown)


def _replace_spaces(match: re.Match[str]) -> str:
    return match[0].replace(" ", "\u00a0")


def on_page_content(html: str, page: Any, **kwargs: Any) -> str:
    """Points the links of notebooks at pages instead of their sources."""
    if page.file.src_uri.endswith(".ipynb"):
        return re.sub(r'href="(?!\w+:)([^"#]+)\.(?:md|ipynb)([#"])', r'href="\1.html\2', html)
    return html


def on_post_page(output: str, **kwargs: Any) -> str:
    """Removes scripts of notebooks that would be loaded from elsewhere; no page needs them."""
    return REMOTE_SCRIPT.sub("", output)


def on_post_build(config: Any) -> None:
    """Warns about links that lead nowhere, also in notebooks, and about remote scripts."""
    site = Path(config.site_dir)
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        name = page.relative_to(site)
        if found := CDN.search(text):
            log.warning("%s loads a script from %s", name, found[0])
        for target in re.findall(r'<a [^>]*href="([^"#?]+)', text):
            path = page.parent / unquote(target)
            if not re.match(r"\w+:|/", target) and not path.exists():
                log.warning("%s links to %s, which does not exist", name, target)


class Examples(griffe.Extension):
    """Renames the section `Example:` of docstrings, which griffe knows by its plural."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M
            )
