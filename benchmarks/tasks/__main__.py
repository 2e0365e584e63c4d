"""Measures tasks and prints their tables."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.tasks import detection, photographs, shapes, signals, text
from benchmarks.tasks.runner import measure, table

TASKS = detection.TASKS | shapes.TASKS | signals.TASKS | text.TASKS | photographs.TASKS
"""Name of a task -> the task."""


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", metavar="task", help=", ".join(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path("build/tasks"))
    options = parser.parse_args()
    names = options.tasks or list(TASKS)
    if unknown := set(names) - set(TASKS):
        parser.error(f"no such task: {', '.join(unknown)}. There are: {', '.join(TASKS)}.")
    for seed in range(options.seeds):
        for name in names:
            measure(name, TASKS[name], [seed], options.directory)
    for name in names:
        print(f"\n{table(name, TASKS[name], options.directory)}")


if __name__ == "__main__":
    main()
