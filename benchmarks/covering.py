"""Which tests execute which lines: recorded once with coverage, and asked by benchmarks.mutants.

    python -m benchmarks.covering              once, in one and a half times what the tests take
    python -m benchmarks.covering tests/ops    the tests of a folder, for mutants to be tried with

Each file of tests runs in a process of its own, since what TensorFlow has traced once runs without
its lines. What is recorded stays in build/mutants/tests; a file that is there is not run again.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "build/mutants/tests"
IMPORTED = ("tensorflow", "tf_keras", "keras", "sklearn", "ai_edge_litert", "onnx", "onnxruntime")
"""What takes long to import. Nothing of keras_qat, which a fork imports with its change."""

BEFORE = -1
"""In the place of a test's number: while the package is imported and the tests are collected."""


class Contexts:
    """Tells coverage which test runs, takes its CPU time, and notes what it has from others.

    What a fixture or a function with a cache made in one test is read by later ones.
    """

    def __init__(self, coverage: Any) -> None:
        self.coverage = coverage
        self.seconds: dict[str, float] = {}
        self.sources: dict[str, set[str]] = {}
        """Test -> the tests in which was made what it reads."""
        self.makers: dict[Any, str] = {}
        self.current = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        self.current = item.nodeid
        self.coverage.switch_context(item.nodeid)
        start = time.process_time()
        outcome = yield
        self.seconds[item.nodeid] = round(time.process_time() - start, 3)
        self.coverage.switch_context("")
        for name in self.makers.keys() & set(item.fixturenames):
            self.read(name)
        self.current = ""
        return outcome

    def pytest_fixture_setup(self, fixturedef: Any) -> None:
        if fixturedef.scope != "function":
            self.makers[fixturedef.argname] = self.current

    def read(self, key: Any) -> None:
        """Notes in which test was made what the current one reads: in itself, if in no other."""
        maker = self.makers.setdefault(key, self.current)
        if maker != self.current:
            sources = {maker, *self.sources.get(maker, ())}
            self.sources.setdefault(self.current, set()).update(sources)

    def cache(self, function: Any) -> Any:
        """Is `functools.cache`, and notes what tests read from functions of the tests."""
        cached = functools.lru_cache(None)(function)
        if not function.__module__.startswith("tests."):
            return cached

        @functools.wraps(function)
        def noted(*args: Any, **options: Any) -> Any:
            self.read((function, args, tuple(options.items())))
            return cached(*args, **options)

        return noted


def prepare() -> None:
    """Imports what takes long, and keeps AutoGraph, which reads sources, from the package."""
    for name in IMPORTED:
        __import__(name)
    from tensorflow.python.autograph.core import config

    config.CONVERSION_RULES = (config.DoNotConvert("keras_qat"), *config.CONVERSION_RULES)


def record(test_file: Path, destination: Path) -> None:
    """Writes the seconds of each test of a file, and the numbers of tests by file and line."""
    import coverage

    os.environ["COVERAGE_CORE"] = "ctrace"  # The other one has no contexts.
    measured = coverage.Coverage(data_file=None, source=["keras_qat"], config_file=False)
    contexts = Contexts(measured)
    functools.cache = contexts.cache
    measured.start()
    pytest.main(["-q", "-p", "no:cacheprovider", str(test_file)], plugins=[contexts])
    measured.stop()
    data = measured.get_data()
    numbers = {test: number for number, test in enumerate(contexts.seconds)}
    numbers[""] = BEFORE
    readers: dict[str, list[str]] = {}
    for test, sources in contexts.sources.items():
        for source in sources - {""}:
            readers.setdefault(source, []).append(test)
    lines = {
        os.path.relpath(path, ROOT): {
            line: sorted(
                {numbers[name] for test in tests for name in (test, *readers.get(test, ()))}
            )
            for line, tests in data.contexts_by_lineno(path).items()
        }
        for path in data.measured_files()
    }
    destination.write_text(json.dumps({"seconds": contexts.seconds, "lines": lines}))


class Covering:
    """The tests that execute each line, as recorded."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.lines: dict[str, dict[int, list[str]]] = {}
        self.before: dict[str, set[int]] = {}
        """File -> the lines that run before the first test."""
        for path in sorted(RECORDS.glob("*.json")):
            recorded = json.loads(path.read_text())
            names = list(recorded["seconds"])
            self.seconds |= recorded["seconds"]
            for file, lines in recorded["lines"].items():
                for line, numbers in lines.items():
                    tests = self.lines.setdefault(file, {}).setdefault(int(line), [])
                    tests += [names[number] for number in numbers if number != BEFORE]
                    if BEFORE in numbers:
                        self.before.setdefault(file, set()).add(int(line))

    def tests(self, path: str, lines: range) -> list[str]:
        """Returns the tests that execute one of the lines, the most telling per second first.

        A test tells more of a file if more of the lines that it executes are that file's. For lines
        that run while the package is imported, all tests of the file's other lines do.
        """
        recorded = self.lines.get(path, {})
        covering = {test for line in lines for test in recorded.get(line, ())}
        in_file = self._counts(path)
        if self.before.get(path, set()).intersection(lines):
            covering = set(in_file)
        return sorted(
            covering or in_file,
            key=lambda test: (self.seconds[test] + 0.05) * self.totals[test] / in_file[test],
        )

    def only_in_tests(self, mutant: Any) -> bool:
        """Returns whether tests execute the changed lines, and nothing before the first test."""
        lines = set(mutant.lines)
        executed = {line for line, tests in self.lines.get(mutant.path, {}).items() if tests}
        return bool(lines & executed) and not lines & self.before.get(mutant.path, set())

    def _counts(self, path: str) -> dict[str, int]:
        counts: dict[str, int] = {}
        for tests in self.lines.get(path, {}).values():
            for test in tests:
                counts[test] = counts.get(test, 0) + 1
        return counts

    @functools.cached_property
    def totals(self) -> dict[str, int]:
        """Test -> how many lines it executes."""
        totals: dict[str, int] = {}
        for path in self.lines:
            for test, count in self._counts(path).items():
                totals[test] = totals.get(test, 0) + count
        return totals


def main() -> None:
    """Records the tests' files that are not yet recorded."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, default=[Path("tests")])
    folders = parser.parse_args().folders
    RECORDS.mkdir(parents=True, exist_ok=True)
    prepare()
    for test_file in sorted(path for folder in folders for path in folder.rglob("test_*.py")):
        relative = test_file.resolve().relative_to(ROOT)
        destination = RECORDS / f"{'-'.join(relative.with_suffix('').parts)}.json"
        if destination.exists():
            continue
        child = os.fork()
        if not child:
            record(relative, destination)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
