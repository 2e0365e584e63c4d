"""Tests the text of pages: known words, tables that fit, correct links and commands."""

import re
import runpy
from pathlib import Path

import keras_qat

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]


def list_tables():
    for page in PAGES:
        for table in re.findall(r"(?:^\|.*\n)+", page.read_text(), flags=re.M):
            yield page, table


def test_rows_have_the_cells_of_their_head():
    """A vertical bar within a cell starts a new cell, unless a backslash precedes it."""
    for page, table in list_tables():
        counts = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
        assert len(counts) == 1, (page, table)


def test_no_sentence_becomes_a_heading():
    """A line that begins with the number of an issue becomes a heading."""
    for page in PAGES:
        prose = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.M | re.S)
        assert re.findall(r"^#+[^# ].*$", prose, flags=re.M) == [], page


GLOBS = ("*.md", "docs/**/*.md", "docs/tutorials/*.py", "benchmarks/results/*.md")
LINKED = [page for glob in GLOBS for page in ROOT.glob(glob)]


def anchors(page):
    """Returns the targets of links to a page's headings, as GitHub creates them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.M)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {word.strip().replace(" ", "-") for word in words}


def list_links():
    for page in LINKED:
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
    """A new public name needs a line in a page of docs/reference."""
    pages = "\n".join(page.read_text() for page in ROOT.glob("docs/reference/*.md"))
    named = set(re.findall(r"^(?:::: |      heading: )keras_qat\.(\w+)$", pages, flags=re.M))
    assert set(keras_qat.__all__) - {"__version__", "keras"} == named & set(keras_qat.__all__)


RESULTS = ROOT.glob("benchmarks/results/*.md")
WITH_FIGURES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *RESULTS]

UNITS = r"±|%|x\b|ms|s\b|kB|MB|bytes|LSB|dB|k\b|M\b|\(|of \d"
FIGURE = re.compile(rf"[-~]?\d[\d.,]*( ?({UNITS}).*)?")
COMMAND = re.compile(r"python -m [\w.]+|python tutorials/\w+|make [a-z]+-?\w*|\bno command\b", re.I)
WHEN = re.compile(r"\b(November|December) 20\d\d|\b20\d\d-\d\d-\d\d|\bversion \d\.\d")


def sections(text):
    """Yields the text below each heading, with the headings above it."""
    above, lines, is_program = {}, [], False
    for line in [*text.splitlines(), "# end"]:
        is_program ^= line.startswith("```")
        if is_program or not (level := len(re.match("#*", line)[0])):
            lines.append(line)
            continue
        depth = max(above, default=0)
        above[depth] = "\n".join(lines)
        yield above[depth], "\n".join(above.values())
        above = {key: value for key, value in above.items() if key < level} | {level: ""}
        lines = []


def tables_of_figures(text):
    """Returns the tables in which most cells after the first column are figures."""
    for table in re.findall(r"(?:^\|.*(?:\n|$))+", text, flags=re.M):
        rows = [re.split(r"(?<!\\)\|", row)[2:-1] for row in table.splitlines()[2:]]
        cells = [cell.strip(" *") for row in rows for cell in row if cell.strip()]
        if 2 * sum(bool(FIGURE.fullmatch(cell)) for cell in cells) > len(cells):
            yield table.splitlines()[0]


def figures(page):
    """Returns each table of figures of a page, with the text that may state its source."""
    for below, all_above in sections(page.read_text()):
        for table in tables_of_figures(below):
            yield table, all_above


def test_figures_name_their_command_and_when_it_ran():
    tables = [(page, *table) for page in WITH_FIGURES for table in figures(page)]
    assert [(page, table) for page, table, text in tables if not COMMAND.search(text)] == []
    assert [(page, table) for page, table, text in tables if not WHEN.search(text)] == []


def test_targets_of_make_and_tests_are_there():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    for page in WITH_FIGURES:
        text = page.read_text()
        assert set(re.findall(r"[`\n]make ([a-z][\w-]*)", text)) <= set(targets), page
        paths = re.findall(r"`(tests/[\w/.]*\w)", text)
        assert [path for path in paths if not (ROOT / path).exists()] == [], page


def test_the_page_of_operators_is_made_of_the_rows():
    page = runpy.run_path(ROOT / "docs/operators.py")["page"]()
    assert (ROOT / "docs/operators.md").read_text() == page
