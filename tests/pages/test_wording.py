"""The pages: words that readers know, and tables that fit their column."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]

PRIVATE = {
    "code for code": "the same integers",
    "halves up": "rounded half up",
    "halves away": "rounded half away from zero",
    "the code beside": "off by one",
    "is told": "knows, receives",
    "what is told": "warning",
    "spelled": "written, split into",
    "spelling": "form",
    "second factor": "right-hand side",
    "twins": "common subexpressions",
    "in place of": "instead of",
}
"""Words of the code's own dialect -> what a reader understands."""

COLUMN = 908
"""Pixels that a table has on the site. A character takes 6.5, and a cell 16 around its text."""


def test_words():
    for page in PAGES:
        prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.M | re.S)
        used = [word for word in PRIVATE if re.search(rf"\b{word}\b", prose, re.I)]
        assert not used, (page, {word: PRIVATE[word] for word in used})


def width(table):
    """The least width of a table, as each column is as wide as its longest word."""
    rows = [[cell.strip() for cell in line.strip("| \n").split("|")] for line in table.splitlines()]
    texts = [[re.sub(r"`[^`]*`", "12345678", cell) for cell in row] for row in rows[:1] + rows[2:]]
    plain = [[re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell) for cell in row] for row in texts]
    longest = [
        max((len(word) for cell in column for word in cell.split()), default=0)
        for column in zip(*(row for row in plain if len(row) == len(plain[0])), strict=True)
    ]
    return sum(6.5 * letters + 16 for letters in longest)


def list_tables():
    for page in PAGES:
        for table in re.findall(r"(?:^\|.*\n)+", page.read_text(), flags=re.M):
            yield page, table


def test_tables_fit_their_column():
    assert [(page, table[:60]) for page, table in list_tables() if width(table) > COLUMN] == []


def test_a_table_that_does_not_fit():
    cells = ["twelveletter"] * 10
    rows = cells, ["---"] * 10, cells
    assert width("\n".join(f"| {' | '.join(row)} |" for row in rows)) > COLUMN


SOURCE = 112
"""Characters of a program's line that the column shows."""


def test_programs_fit_their_column():
    for page in PAGES:
        blocks = re.findall(r"^( *)```\w+\n(.*?)^\1```$", page.read_text(), flags=re.M | re.S)
        lines = [line for _, block in blocks for line in block.splitlines()]
        long = [line for line in lines if len(line) > SOURCE and not line.startswith("Error: ")]
        assert not long, page


def test_rows_have_the_cells_of_their_head():
    """A vertical bar within a cell would begin another one: it is written with a backslash."""
    for page, table in list_tables():
        counts = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
        assert len(counts) == 1, (page, table)


def test_no_sentence_becomes_a_heading():
    """As one does whose line happens to begin with the number of an issue."""
    for page in PAGES:
        prose = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.M | re.S)
        assert re.findall(r"^#+[^# ].*$", prose, flags=re.M) == [], page
