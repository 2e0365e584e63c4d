"""The pages: their links lead somewhere."""

import re
from pathlib import Path

import keras_qat

ROOT = Path(__file__).parent.parent.parent
GLOBS = ("*.md", "docs/**/*.md", "docs/tutorials/*.py", "benchmarks/results/*.md")
PAGES = [page for glob in GLOBS for page in ROOT.glob(glob)]


def anchors(page):
    """What links to a page's headings may name, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.M)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {word.strip().replace(" ", "-") for word in words}


def list_links():
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" not in target:
                yield page, target


def test_links():
    for page, target in list_links():
        path, _, anchor = target.partition("#")
        result = (page.parent / path) if path else page
        assert result.exists(), (page, target)
        assert not anchor or anchor in anchors(result), (page, target)


def test_reference_has_all_that_is_public():
    """A new public name gets a line in a page of docs/reference."""
    pages = "\n".join(page.read_text() for page in ROOT.glob("docs/reference/*.md"))
    named = set(re.findall(r"^(?:::: |      heading: )keras_qat\.(\w+)$", pages, flags=re.M))
    assert set(keras_qat.__all__) - {"__version__", "keras"} == named & set(keras_qat.__all__)
