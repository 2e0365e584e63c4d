"""Measure size, types and language of the package, and fail if one got worse.

    python -m benchmarks.bars            print the table; exit with 1 if a limit is exceeded
    python -m benchmarks.bars --worst    also list the lines with most unusual phrases

Limits only go down: when a figure has improved, lower its limit. `make test` prints the figure of
time.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent

LIMITS = {
    "lines of keras_qat": 49_452,
    "lines of tests": 41_777,
    "longest file, lines": 400,
    "parameters typed Any, %": 8.0,
    "function names that are not verbs, %": 1.4,
    "unusual phrases in code, per 1000 words": 1.6,
    "unusual phrases on pages, per 1000 words": 1.8,
    "time in the slowest tenth of tests, %": 75.0,
}

PHRASES = (
    r"\bnumbers\b(?! of\b)",
    r"\b(?:whole|real) numbers?\b|\breals\b",
    r"(?<!error )(?<!exit )\bcodes\b",
    r"\b(?:that|those) (?:of|that|which)\b",
    r"\b(?:of|in|with|from|by) which\b|\bwhose\b",
    r"(?:^|[ (])what (?!to\b)[a-z]+",
    r"\bbehind\b|\bin front of\b",
    r"\bas (?:they|it) (?:are|is|was|were)\b|\bas before\b",
    r"\b(?:one's|their|your) own\b|\bof (?:one's|your) own\b",
    r"\btold\b|\btells?\b|\bsays?\b",
    r"\bgives?\b|\btakes?\b",
    r"\bparts\b|\bmade of\b|\bwhole\b",
    r"\bbut for\b|\belse\b[,. ](?!:)",
    r"(?<=, )where\b|\bso that\b",
    r"\bislands?\b|\bpictures?\b|\bwritten out\b|\bopened\b",
)
"""Phrases with a plainer alternative (CONTRIBUTING.md). Some of their uses are fine, so they are
counted, not forbidden."""

UNUSUAL = re.compile("|".join(PHRASES), re.IGNORECASE)

NO_VERB = re.compile(
    r"^_?(?!is_|has_|add|embed|feed|need|seed|read|spread|shed)"
    r"[a-z]+(?:ed|ken|wn|ught|ung|ven)(?:_|$)"
    r"|^_?(?!from_config|from_keras_3|as_|in_shape)"
    r"(?:of|in|with|without|behind|before|after|as|by|from|on|at|to_be|what|why|how)_"
    r"|_of$|_in$|_behind$|_by$|_with$"
)
"""Names of functions that begin with a participle or a preposition, or end with a preposition."""


class Line(NamedTuple):
    """A line of prose: where it is, its text and how many unusual phrases it has."""

    path: Path
    number: int
    text: str

    @property
    def hits(self) -> int:
        return len(UNUSUAL.findall(self.text))


def list_files(*folders: str, suffix: str = ".py") -> list[Path]:
    """Return the files of some folders, or the files themselves."""
    paths = [ROOT / folder for folder in folders]
    inside = [file for path in paths for file in sorted(path.rglob(f"*{suffix}"))]
    return inside + [path for path in paths if path.is_file()]


def read_prose(path: Path) -> Iterator[Line]:
    """Yield the lines of a page, or of the docstrings, comments and messages of a module."""
    text = path.read_text("utf-8")
    if path.suffix != ".py":
        fenced = False
        for number, line in enumerate(text.splitlines(), 1):
            fence = line.startswith("```")
            fenced ^= fence
            if not fenced and not fence:
                yield Line(path, number, re.sub(r"`[^`]*`", "", line))
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield Line(path, token.start[0], token.string)
        elif token.type == tokenize.STRING and " " in token.string:
            for offset, line in enumerate(token.string.splitlines()):
                yield Line(path, token.start[0] + offset, re.sub(r"`[^`]*`", "", line))
        elif token.type == getattr(tokenize, "FSTRING_MIDDLE", -1):  # from Python 3.12
            yield Line(path, token.start[0], token.string)


def count_lines(paths: list[Path]) -> int:
    """Return how many lines the files have together."""
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def measure_phrases(lines: list[Line]) -> float:
    """Return the unusual phrases per 1000 words."""
    return 1000 * sum(line.hits for line in lines) / sum(len(line.text.split()) for line in lines)


def measure_functions(paths: list[Path]) -> tuple[float, float]:
    """Return the percentages of parameters typed `Any` and of names that are not verbs."""
    parameters, names = [], []
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names.append(node.name)
                given = node.args
                for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs):
                    if argument.annotation is not None:
                        parameters.append(ast.unparse(argument.annotation))
    untyped = sum(annotation == "Any" for annotation in parameters)
    odd = sum(NO_VERB.search(name) is not None for name in names)
    return 100 * untyped / len(parameters), 100 * odd / len(names)


def print_rooms() -> None:
    """Print lines, files, `Any` and phrases of each folder of the package."""
    print(f"{'folder':24}{'files':>6}{'lines':>8}{'Any, %':>8}{'names, %':>10}{'phrases':>9}")
    for folder in sorted(path for path in (ROOT / "keras_qat").iterdir() if path.is_dir()):
        paths = sorted(folder.rglob("*.py"))
        if not paths:
            continue
        untyped, odd = measure_functions(paths)
        phrases = measure_phrases([line for path in paths for line in read_prose(path)])
        size = f"{len(paths):6}{count_lines(paths):8}"
        print(f"{folder.name:24}{size}{untyped:8.1f}{odd:10.1f}{phrases:9.1f}")


def format_figure(name: str, figure: float) -> str:
    """Return a line with a figure and its limit, marked if it is exceeded."""
    mark = "  EXCEEDED" if figure > LIMITS[name] else ""
    return f"{name:44}{figure:10,.1f} of {LIMITS[name]:,}{mark}"


def measure_slowest(seconds: list[float]) -> float:
    """Return the percentage of the time that the slowest tenth of the tests takes."""
    slowest = sorted(seconds, reverse=True)[: max(len(seconds) // 10, 1)]
    return 100 * sum(slowest) / max(sum(seconds), 1e-9)


def main() -> int:
    """Print the tables; return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worst", action="store_true", help="list lines with unusual phrases")
    arguments = parser.parse_args()
    package = list_files("keras_qat", "keras_qat_cli")
    code = [line for path in package for line in read_prose(path)]
    pages = list_files("docs", suffix=".md")
    pages += list_files("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
    text = [line for path in pages for line in read_prose(path)]
    untyped, odd = measure_functions(package)
    figures = {
        "lines of keras_qat": count_lines(list_files("keras_qat")),
        "lines of tests": count_lines(list_files("tests")),
        "longest file, lines": max(count_lines([path]) for path in package),
        "parameters typed Any, %": untyped,
        "function names that are not verbs, %": odd,
        "unusual phrases in code, per 1000 words": measure_phrases(code),
        "unusual phrases on pages, per 1000 words": measure_phrases(text),
    }
    print_rooms()
    print()
    for name, figure in figures.items():
        print(format_figure(name, figure))
    if arguments.worst:
        for line in sorted((*code, *text), key=lambda line: -line.hits)[:100]:
            print(f"{line.hits} {line.path.relative_to(ROOT)}:{line.number}: {line.text.strip()}")
    return int(any(figure > LIMITS[name] for name, figure in figures.items()))


if __name__ == "__main__":
    sys.exit(main())
