"""Would the tests see a fault? Small changes of the code, each with the tests that execute it.

    python -m benchmarks.covering                which tests execute which lines; once
    python -m benchmarks.mutants --count 100     the score and the survivors
    python -m benchmarks.mutants --count 300     goes on where the last run ended

A mutant is one changed operator, number, condition or statement of a file in `ROOMS`. The tests are
collected once, and each mutant is a fork, in which the functions of a module get changed code. What
runs before the first test is imported anew instead. Tests that saw other mutants of a file run
first. Command lines and other processes run the unchanged code.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import importlib.machinery
import itertools
import json
import os
import resource
import shlex
import signal
import time
import types
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.covering import ROOT, Covering, prepare
from benchmarks.equivalent_mutants import EQUIVALENT

ROOMS = (
    *("arithmetic", "ops", "integer_graph", "export/tflite.py", "export/tflite_writer.py"),
    *("tflite/builder.py", "tflite/op_versions.py", "tflite/weight_packing.py"),
)
"""Folders and files of keras_qat that are changed."""

ROUND = 40
"""Tests that are collected first, if a mutant is imported; most end there."""

FROM_IMPORT = "its code could not be exchanged"

SWAPS: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult},
    **{ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
}
FUNCTIONS = {"maximum": "minimum", "minimum": "maximum", "max": "min", "min": "max"}
FUNCTIONS |= {"floor": "ceil", "ceil": "floor", "round": "floor", "all": "any", "any": "all"}
UNCHANGED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
"""Messages, and what no test of behaviour can see."""


class Mutant(NamedTuple):
    """A file, with one change of it."""

    path: str
    change: str
    lines: range
    tree: ast.Module
    node: ast.AST
    variant: ast.AST

    @property
    def key(self) -> str:
        """Stays the same while other lines of the file change."""
        return f"{self.path} {self.change}"


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what a node may become."""
    match node:
        case ast.Compare(left, [op], right) if type(op) in SWAPS:
            yield ast.Compare(left, [SWAPS[type(op)]()], right)
        case ast.BinOp(left, op, right) if type(op) in SWAPS:
            yield ast.BinOp(left, SWAPS[type(op)](), right)
        case ast.AugAssign(target, op, value) if type(op) in SWAPS:
            yield ast.AugAssign(target, SWAPS[type(op)](), value)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(SWAPS[type(op)](), values)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield operand
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.IfExp(test, body, other):
            yield ast.IfExp(test, other, body)
        case ast.If(test, body, other):
            yield ast.If(ast.UnaryOp(ast.Not(), test), body, other)
        case ast.Expr(ast.Call(ast.Attribute())):
            yield ast.Pass()
        case ast.Attribute(value, name, context) if name in FUNCTIONS:
            yield ast.Attribute(value, FUNCTIONS[name], context)
        case ast.Name(name, context) if name in FUNCTIONS:
            yield ast.Name(FUNCTIONS[name], context)


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yields all mutants of a file."""
    tree = ast.parse(path.read_text())
    name = str(path.relative_to(ROOT))
    seen: dict[str, int] = {}

    def visit(node: Any, scope: str) -> Iterator[Mutant]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            scope = f"{scope}.{node.name}".lstrip(".")
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list") or is_unchanged(node):
                continue
            for child in value if isinstance(value, list) else [value]:
                if not isinstance(child, ast.AST):
                    continue
                for variant in variants(child):
                    change = f"{scope}: {first_line(child)} -> {first_line(variant)}"
                    seen[change] = seen.get(change, 0) + 1
                    number = f" ({seen[change]})" if seen[change] > 1 else ""
                    yield Mutant(name, change + number, lines_of(child), tree, child, variant)
                yield from visit(child, scope)

    yield from visit(tree, "")


def is_unchanged(node: Any) -> bool:
    """Returns whether what is inside stays as it is; `strict=` of a `zip` is an assertion, too."""
    return isinstance(node, UNCHANGED) or (isinstance(node, ast.keyword) and node.arg == "strict")


def lines_of(node: Any) -> range:
    """Returns the lines of an expression; those of a condition's test."""
    node = node.test if isinstance(node, ast.If) else node
    return range(node.lineno, node.end_lineno + 1)


class Exchange(ast.NodeTransformer):
    """Puts a variant in the place of a node."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def visit(self, node: ast.AST) -> ast.AST:
        return self.mutant.variant if node is self.mutant.node else self.generic_visit(node)


def first_line(node: ast.AST) -> str:
    """Returns the code of a node, of a statement its first line."""
    return ast.unparse(ast.fix_missing_locations(node)).split("\n")[0]


def drawn(count: int, seed: int = 0, rooms: Sequence[str] = ROOMS) -> list[Mutant]:
    """Returns so many mutants of all files; more of them begin with the same ones."""
    paths = []
    for room in rooms:
        whole = ROOT / "keras_qat" / room
        paths += sorted(whole.rglob("*.py")) if whole.is_dir() else [whole]
    mutants = [mutant for path in paths for mutant in mutants_of(path)]
    return sorted(mutants, key=lambda mutant: zlib.crc32(mutant.key.encode(), seed))[:count]


def never_shrink() -> None:
    """Lets hypothesis keep what fails as it is: making it smaller takes minutes."""
    from hypothesis import Phase, settings  # pytest has to import it first.

    settings.register_profile("as it is", phases=[Phase.generate])
    settings.load_profile("as it is")


class Chosen:
    """Runs the given tests in their order, or all of their files, and notes which one failed."""

    def __init__(self, tests: list[str], whole_files: bool, note: Path) -> None:
        self.places = {test: place for place, test in enumerate(tests)}
        self.whole_files, self.note = whole_files, note

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        never_shrink()
        if not self.whole_files:
            items[:] = [item for item in items if item.nodeid in self.places]
            items.sort(key=lambda item: self.places[item.nodeid])

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.note.write_text(report.nodeid)


class Collected:
    """Tries mutants in forks of a process that has collected all tests."""

    def __init__(self, try_all: Callable[[list[Any]], None], note: Path) -> None:
        self.try_all, self.note = try_all, note

    def pytest_runtestloop(self, session: Any) -> bool:
        never_shrink()
        session.config.pluginmanager.unregister(name="terminalreporter")
        self.try_all(session.items)
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.note.write_text(report.nodeid)
            self.note.with_suffix(".log").write_text(report.longreprtext)


def outcome(run: Callable[[], int], note: Path, seconds: int) -> str:
    """Returns the test that fails in a fork; "import", "survived" or "undecided" if none does.

    A mutant with which a kernel ends the process is "a crash", and seen as well.
    """
    note.write_text("import")
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        signal.alarm(10 * seconds)  # A test may wait for another process for ever.
        os.dup2(os.open(note.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        os._exit(run())
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        limits = (signal.SIGXCPU, signal.SIGKILL, signal.SIGALRM)
        took_too_long = os.WTERMSIG(status) in limits
        return "undecided" if took_too_long else "a crash"
    return note.read_text() if status else "survived"


def run_from_import(mutant: Mutant, tests: list[str], words: list[str], note: Path) -> int:
    """Imports the changed code, collects the tests and runs them. Returns pytest's exit code."""
    use(mutant)
    for part in (tests[:ROUND], tests[ROUND:]):
        files = list(dict.fromkeys(test.split("::")[0] for test in part))
        if files:
            given = ["-x", "-q", "-p", "no:cacheprovider", *files, *words]
            status = int(pytest.main(given, plugins=[Chosen(part, bool(words), note)]))
            if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                return status
    return 0


def run_collected(mutant: Mutant | None, items: list[Any], note: Path) -> int:
    """Exchanges the code of living functions and runs the tests. Returns 0 if none fails."""
    note.write_text("")
    if mutant is not None and not exchange_code(mutant):
        note.write_text(FROM_IMPORT)
        return 1
    for item, following in itertools.zip_longest(items, items[1:]):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if note.read_text():
            return 1
    return 0


def exchange_code(mutant: Mutant) -> bool:
    """Gives the functions of a module their changed code. Returns whether there were any."""
    gc.unfreeze()  # The tests' configuration froze what lives.
    parts, codes = [changed_code(mutant)], list[types.CodeType]()
    while parts:
        inner = [part for part in parts.pop().co_consts if isinstance(part, types.CodeType)]
        parts += inner
        codes += inner
    names = Counter((code.co_name, code.co_firstlineno) for code in codes)
    new = {(code.co_name, code.co_firstlineno): code for code in codes}
    path, changed = str(ROOT / mutant.path), False
    for function in gc.get_objects():
        old = function.__code__ if isinstance(function, types.FunctionType) else None
        if old is None or old.co_filename != path:
            continue
        name = (old.co_name, old.co_firstlineno)
        if names[name] == 1 and new[name] != old and new[name].co_freevars == old.co_freevars:
            function.__code__, changed = new[name], True
    return changed


def changed_code(mutant: Mutant) -> types.CodeType:
    """Compiles the module of a mutant."""
    Exchange(mutant).visit(mutant.tree)
    path = str(ROOT / mutant.path)
    return compile(ast.fix_missing_locations(mutant.tree), path, "exec")


def use(mutant: Mutant) -> None:
    """Lets this process import the changed code."""
    loader: Any = importlib.machinery.SourceFileLoader
    unchanged, changed = loader.get_code, changed_code(mutant)

    def get_code(self: Any, name: str) -> Any:
        return changed if self.path == changed.co_filename else unchanged(self, name)

    loader.get_code = get_code


def ordered(mutant: Mutant, covering: Covering, results: dict[str, str]) -> list[str]:
    """Returns the tests that execute a mutant, those first that saw another one of its file."""
    seen = Counter(test for key, test in results.items() if key.split()[0] == mutant.path)
    return sorted(covering.tests(mutant.path, mutant.lines), key=lambda test: -seen[test])


def main() -> None:
    """Tries mutants and prints the score."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=100, help="mutants to draw (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    parser.add_argument("--rooms", nargs="*", default=ROOMS, help="folders and files to change")
    parser.add_argument("--seconds", type=int, default=90, help="of a core for each (default: 90)")
    parser.add_argument("--words", default="", help="more for pytest, such as \"-m '' --seeds 20\"")
    parser.add_argument("--again", nargs="*", default=(), help="outcomes to try once more")
    parser.add_argument("--results", type=Path, default=ROOT / "build/mutants/results.json")
    arguments = parser.parse_args()
    prepare()
    if moved := EQUIVALENT.keys() - {mutant.key for mutant in drawn(100_000)}:
        parser.error(f"equivalent_mutants.py lists what is no longer there: {moved}")
    draw = drawn(arguments.count, arguments.seed, arguments.rooms)
    mutants = [mutant for mutant in draw if mutant.key not in EQUIVALENT]
    covering, words = Covering(), shlex.split(arguments.words)
    note = arguments.results.with_suffix(".running")
    results = read(arguments.results)
    pending = [m for m in mutants if results.get(m.key, "none") in ("none", *arguments.again)]

    def attempt(mutant: Mutant, run: Callable[[], int]) -> None:
        start = time.monotonic()
        results[mutant.key] = outcome(run, note, arguments.seconds)
        arguments.results.write_text(json.dumps(results, indent=1))
        print(f"{time.monotonic() - start:5.0f} s  {mutant.key}: {results[mutant.key]}", flush=True)

    @functools.cache
    def fails_unchanged(item: Any) -> bool:
        run = functools.partial(run_collected, None, [item], note)
        return outcome(run, note, arguments.seconds) != "survived"

    def try_all(items: list[Any]) -> None:
        by_name = {item.nodeid: item for item in items}
        for mutant in filter(covering.only_in_tests, pending):
            tests = ordered(mutant, covering, results)
            places = {test: place for place, test in enumerate(tests)}
            files = list(dict.fromkeys(test.split("::")[0] for test in tests))
            chosen = [i for i in items if i.nodeid in places or (words and file_of(i) in files)]
            chosen.sort(key=lambda i: (places.get(i.nodeid, len(places)), files.index(file_of(i))))
            attempt(mutant, functools.partial(run_collected, mutant, chosen, note))
            while (test := by_name.get(results[mutant.key])) and fails_unchanged(test):
                chosen.remove(test)
                attempt(mutant, functools.partial(run_collected, mutant, chosen, note))

    if any(map(covering.only_in_tests, pending)):
        child = os.fork()
        if not child:
            files = sorted({test.split("::")[0] for test in covering.seconds})
            given = ["-q", "-p", "no:cacheprovider", *files, *words]
            os._exit(int(pytest.main(given, plugins=[Collected(try_all, note)])))
        os.waitpid(child, 0)
        results = read(arguments.results)
    for mutant in pending:
        if results.get(mutant.key) == FROM_IMPORT or not covering.only_in_tests(mutant):
            tests = ordered(mutant, covering, results)
            attempt(mutant, functools.partial(run_from_import, mutant, tests, words, note))
    print_score({mutant.key: results[mutant.key] for mutant in mutants}, arguments.count)


def print_score(results: dict[str, str], count: int) -> None:
    """Prints which mutants no test sees, and the share of the others, without equivalent ones."""
    unseen = {key: word for key, word in results.items() if word in ("survived", "undecided")}
    print(*(f"{word}: {key}" for key, word in unseen.items()), sep="\n")
    seen = len(results) - len(unseen)
    print(
        f"{seen} of {count} mutants make a test fail, {seen / count:.1%}; "
        f"{seen / len(results):.1%} without {count - len(results)} that are equivalent. "
        f"{dict(Counter(unseen.values()))}"
    )


def read(path: Path) -> dict[str, str]:
    """Returns the outcomes of earlier runs: mutant -> test, "survived" or "undecided"."""
    return json.loads(path.read_text()) if path.exists() else {}


def file_of(item: Any) -> str:
    return item.nodeid.split("::")[0]


if __name__ == "__main__":
    main()
