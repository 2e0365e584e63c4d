"""The pages: a table of figures names the command that prints it, and when or with what it ran."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT.glob("benchmarks/results/*.md")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *RESULTS]

UNITS = r"±|%|x\b|ms|s\b|kB|MB|bytes|LSB|dB|k\b|M\b|\(|of \d"
FIGURE = re.compile(rf"[-~]?\d[\d.,]*( ?({UNITS}).*)?")
COMMAND = re.compile(r"python -m [\w.]+|python tutorials/\w+|make [a-z]+-?\w*|\bno command\b", re.I)
WHEN = re.compile(r"\b(November|December) 20\d\d|\b20\d\d-\d\d-\d\d|\bversion \d\.\d")


def sections(text):
    """Yields the text below each heading, and all below the headings above it and its own."""
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
    """The tables of which most cells behind the first column are figures."""
    for table in re.findall(r"(?:^\|.*(?:\n|$))+", text, flags=re.M):
        rows = [re.split(r"(?<!\\)\|", row)[2:-1] for row in table.splitlines()[2:]]
        cells = [cell.strip(" *") for row in rows for cell in row if cell.strip()]
        if 2 * sum(bool(FIGURE.fullmatch(cell)) for cell in cells) > len(cells):
            yield table.splitlines()[0]


def figures(page):
    """Each table of figures of a page, with the text that may tell where it is from."""
    for below, all_above in sections(page.read_text()):
        for table in tables_of_figures(below):
            yield table, all_above


def test_figures_name_their_command_and_when_it_ran():
    tables = [(page, *table) for page in PAGES for table in figures(page)]
    assert [(page, table) for page, table, text in tables if not COMMAND.search(text)] == []
    assert [(page, table) for page, table, text in tables if not WHEN.search(text)] == []


def test_a_table_has_the_commands_of_its_section_and_above():
    page = "# A\nmake lint\n## B\npython -m b.c\n### D\n| | a |\n| - | - |\n| b | 1 % |\n## E\n"
    ((table, text),) = (
        (t, above) for below, above in sections(page) for t in tables_of_figures(below)
    )
    assert (table, COMMAND.findall(text)) == ("| | a |", ["make lint", "python -m b.c"])


def test_targets_of_make_and_tests_are_there():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    for page in PAGES:
        text = page.read_text()
        assert set(re.findall(r"[`\n]make ([a-z][\w-]*)", text)) <= set(targets), page
        paths = re.findall(r"`(tests/[\w/.]*\w)", text)
        assert [path for path in paths if not (ROOT / path).exists()] == [], page
