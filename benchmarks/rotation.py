"""Split the checks that are too slow for every CI run into parts; each run takes one part.

    python -m benchmarks.rotation              show which commit takes which part
    python -m benchmarks.rotation LOG ...      show what CI ran, from its logs
    python -m benchmarks.rotation --run        run the part of this commit: `make test-part`
    python -m benchmarks.rotation --run 3      run part 3

A part has the slow tests whose names hash to it, and commands of `COMMANDS`. The number of commits
chooses the part, so `PARTS` consecutive commits cover everything. `PARTS` is a prime: if each CI
run follows a push of k commits, `PARTS` runs cover everything too, unless k is a multiple of it.

Parts listed in `.ci/failed_parts` run first. `--run` adds a part to that file if it fails, and
removes it when it passes. A clean checkout has the committed file: commit it to keep a change.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
FAILED = ROOT / ".ci/failed_parts"

PARTS = 19

COMMANDS = (
    "make dist",
    "make test-tosa",
    "make notebooks",
    "python -m benchmarks.norms --blocks 1 --width 16 --tokens 9 --turns 1",
    "python -m benchmarks.kernel_faults build/kernel_faults",
    "python -m benchmarks.fit_time residual --pairs 1",
    "python -m benchmarks.parity demo --epochs 1",
    "python -m benchmarks.profile_step demo --rows 4 --forms float int8",
    "python -m benchmarks.operations MobileNetV2 --forms float int8",
)
"""Command number i belongs to part i modulo `PARTS`: append new commands at the end."""

PLANS = "python -m benchmarks.oracle compare tests/networks/plans.txt --part {part}"
"""The command for the networks of a part."""

NO_TIME = "the time that --minutes allows is up"
RECORD = "rotation: part {part} of {parts} at commit {commits}: {result}"


def find_part(name: str) -> int:
    """Return the part of a test or network; it only depends on the name."""
    return zlib.crc32(name.encode()) % PARTS


def choose_parts(commits: int, failed: Iterable[int]) -> list[int]:
    """Return the parts to run after so many commits: failed parts, then the commit's own."""
    return list(dict.fromkeys([*failed, commits % PARTS]))


def count_commits() -> int:
    """Return the number of commits up to this one; a shallow clone counts a hash instead."""

    def ask_git(*words: str) -> str:
        return subprocess.check_output(["git", *words], cwd=ROOT, text=True).strip()

    if ask_git("rev-parse", "--is-shallow-repository") == "true":
        print("The clone is shallow: the commit's hash chooses the part, not the commit count.")
        return int(ask_git("rev-parse", "HEAD"), 16)
    return int(ask_git("rev-list", "--count", "HEAD"))


def read_failed(path: Path) -> list[int]:
    """Return the parts that a file lists, one in each line."""
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def update_failed(path: Path, part: int, result: str) -> None:
    """Add a part to the file if it failed; remove it if it passed."""
    before = read_failed(path)
    after = [other for other in before if other != part or result.startswith("unfinished")]
    if result.startswith("failed"):
        after.append(part)
    if sorted(after) != sorted(before):
        path.write_text("".join(f"{part}\n" for part in sorted(after)))
        print(f"Changed {path}: commit it, so that CI starts with the failed parts.")


def run_tests(part: int, minutes: float) -> tuple[str, str]:
    """Run the slow tests of a part; return a word for the result, and the counts."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-n", "2", "--dist", "worksteal", "--durations=10", "-m", "slow", "--seeds", "20"]
        words += ["--part", str(part), "--minutes", f"{minutes:.1f}", "--junit-xml", str(report)]
        status = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT).returncode
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    skipped = [skip.get("message", "") for case in cases for skip in case.iter("skipped")]
    left = sum(NO_TIME in message for message in skipped)
    counts = f"{len(cases) - left} tests, {left} not begun"
    return "failed" if status else "unfinished" if left else "passed", counts


def run_command(command: str, minutes: float) -> str:
    """Run a command for at most some minutes; return a word for the result."""
    command = re.sub(r"^python ", f"{sys.executable} ", command)
    process = subprocess.Popen(command.split(), cwd=ROOT, start_new_session=True)
    try:
        return "failed" if process.wait(max(60 * minutes, 1)) else "passed"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # `make` has started other processes.
        process.wait()
        return "unfinished"


def run_part(part: int, minutes: float) -> str:
    """Run all of a part, its commands first; return the result as the log records it."""
    start = time.monotonic()
    results = {}
    for command in (*COMMANDS[part::PARTS], PLANS.format(part=part)):
        print(f"rotation: {command}", flush=True)
        results[command] = run_command(command, minutes)
    left = minutes - (time.monotonic() - start) / 60
    results["tests"], counts = run_tests(part, left)
    worst = next(word for word in ("failed", "unfinished", "passed") if word in results.values())
    details = ", ".join(f"{name} {result}" for name, result in results.items())
    return f"{worst} in {time.monotonic() - start:.0f} s ({details}; {counts})"


def read_logs(texts: Iterable[str]) -> dict[int, str]:
    """Return the newest result of each part that logs record; the newest log comes last."""
    pattern = re.escape(RECORD).replace(r"\{", "{").replace(r"\}", "}").format
    found = pattern(part=r"(\d+)", parts=PARTS, commits=r"(\d+)", result="(.*)")
    records = [match for text in texts for match in re.findall(found, text)]
    return {int(part): f"commit {commits}: {result}" for part, commits, result in records}


def print_progress(logs: list[Path], failed: list[int], commits: int) -> None:
    """Print each part, when it ran or when it is due, and its commands."""
    results = read_logs(path.read_text(errors="replace") for path in logs)
    for part in range(PARTS):
        latest = commits - (commits - part) % PARTS
        state = results.get(part, "not run") if logs else f"due at commit {latest}"
        mark = " FAILED BEFORE, runs first" * (part in failed)
        print(f"part {part:2}: {state}{mark}; {', '.join(COMMANDS[part::PARTS])}")
    passed = sum(": passed" in result for result in results.values())
    print(f"{passed} of {PARTS} parts passed" if logs else f"this is commit {commits}")


def main() -> int:
    """Run the command; return 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", nargs="*", type=Path, metavar="LOG", help="oldest first")
    parser.add_argument("--run", nargs="?", const=-1, type=int, metavar="PART", help="run it")
    parser.add_argument("--minutes", type=float, default=15, help="limit of all parts together")
    parser.add_argument("--failed", type=Path, default=FAILED, help="file of failed parts")
    given = parser.parse_args()
    commits, failed = count_commits(), read_failed(given.failed)
    if given.run is None:
        print_progress(given.logs, failed, commits)
        return 0
    start, records = time.monotonic(), []
    for part in choose_parts(commits, failed) if given.run < 0 else [given.run]:
        result = run_part(part, given.minutes - (time.monotonic() - start) / 60)
        records.append(RECORD.format(part=part, parts=PARTS, commits=commits, result=result))
        print(records[-1], flush=True)
        update_failed(given.failed, part, result)
    print(*records, sep="\n")
    return int(any(": failed" in record for record in records))


if __name__ == "__main__":
    sys.exit(main())
