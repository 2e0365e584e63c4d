"""Tests the rotation of slow checks: CI runs cover everything in turn, failed parts first."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import rotation
from benchmarks.rotation import COMMANDS, PARTS, RECORD
from tests.sampling import keep_part

NAMES = [f"tests/ops/test_{file}.py::test_{case}" for file in range(9) for case in range(40)]


def make_item(nodeid, slow=True, **params):
    """Returns an object with the attributes that `keep_part` reads of a test."""
    return SimpleNamespace(
        nodeid=nodeid,
        path=Path(nodeid.partition("::")[0]),
        callspec=SimpleNamespace(params=params),
        get_closest_marker=lambda name: slow if name == "slow" else None,
    )


def run(commits, failed=()):
    """Returns the slow tests and commands of a CI run, in order."""
    found = []
    for part in rotation.choose_parts(commits, failed):
        items = [make_item(name) for name in NAMES]
        keep_part(items, part)
        found += [item.nodeid for item in items]
        found += COMMANDS[part::PARTS]
    return found


@pytest.mark.parametrize("start", [0, 1729])
@pytest.mark.parametrize("push", [1, 2, 5, 10])
def test_as_many_runs_as_parts_cover_all_once(start, push):
    found = [name for commits in range(PARTS) for name in run(start + push * commits)]
    assert sorted(found) == sorted([*NAMES, *COMMANDS])


def test_a_failed_part_runs_first_until_it_passes(tmp_path):
    path, parts = tmp_path / "failed_parts", []
    for commits in range(PARTS):
        for part in rotation.choose_parts(commits, rotation.read_failed(path)):
            parts.append(part)
            broken = part == 2 and commits < 4
            rotation.update_failed(path, part, "failed in 1 s" if broken else "passed in 1 s")
    assert parts == [0, 1, 2, 2, 3, 2, 4, *range(5, PARTS)]
    assert rotation.read_failed(path) == []


def test_a_part_that_had_no_time_stays_failed(tmp_path):
    path = tmp_path / "failed_parts"
    for result in ("failed", "unfinished", "failed"):
        rotation.update_failed(path, 5, result)
        assert rotation.read_failed(path) == [5]


def test_tests_that_are_not_slow_and_families_stay_together():
    family = [f"tests/end_to_end/test_forms.py::test_it[{case}-lstm]" for case in range(30)]
    parts = []
    for part in range(PARTS):
        items = [make_item(name, family="lstm") for name in family]
        items.append(make_item("tests/test_api.py::test_quick", slow=False))
        removed = keep_part(items, part)
        parts.append(len(items))
        assert len(items) + len(removed) == 31
    assert sorted(parts) == [1] * (PARTS - 1) + [31]


def test_progress_from_logs(tmp_path, capsys):
    logs = []
    for number, results in enumerate([{3: "failed in 9 s (...)"}, {3: "passed", 4: "unfinished"}]):
        logs.append(tmp_path / f"{number}.log")
        records = [
            RECORD.format(part=part, parts=PARTS, commits=90 + number, result=result)
            for part, result in results.items()
        ]
        logs[-1].write_text("\n".join(["...", *records, "make: done"]))
    rotation.print_progress(logs, [4], 92)
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].startswith("part  3: commit 91: passed; ")
    assert lines[4].startswith("part  4: commit 91: unfinished FAILED BEFORE, runs first; ")
    assert [": not run; " in line for line in lines].count(True) == PARTS - 2
    assert lines[-1] == f"1 of {PARTS} parts passed"


def test_progress_from_history(capsys):
    rotation.print_progress([], [], 1729)
    lines = capsys.readouterr().out.splitlines()
    due = [int(line.partition("due at commit ")[2].split(";")[0]) for line in lines[:-1]]
    assert sorted(due) == list(range(1729 - PARTS + 1, 1730))
    assert all(commits % PARTS == part for part, commits in enumerate(due))


@pytest.mark.parametrize(
    ("program", "minutes", "result"),
    [("pass", 1, "passed"), ("1/0", 1, "failed"), ("import_time;time.sleep(99)", 0, "unfinished")],
)
def test_commands_have_a_result_and_a_limit(program, minutes, result, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(program.replace("_", " "))
    assert rotation.run_command(f"python {path}", minutes) == result


@pytest.mark.parametrize(("result", "status"), [("passed", 0), ("unfinished", 0), ("failed", 1)])
def test_only_a_failed_part_fails_the_run(result, status, tmp_path, monkeypatch):
    monkeypatch.setattr(rotation, "run_part", lambda part, minutes: f"{result} in 1 s")
    monkeypatch.setattr("sys.argv", ["rotation", "--run", "3", "--failed", str(tmp_path / "parts")])
    assert rotation.main() == status
