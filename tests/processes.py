"""Processes that run TensorFlow from its start: with one thread, several devices, several workers.

The tests' own process has run it, so that none can be forked from it. These are forks of a server
that has imported it and no more.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

__all__ = ["FORKS", "fork", "run_all"]

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.survival.training", "tests.distribute.programs"])


def fork(function: Callable[..., None], *args: Any) -> Any:
    """A process that runs a function of a module."""
    process = FORKS.Process(target=function, args=args)
    process.start()
    return process


def run_all(*processes: Any, seconds: float = 300.0) -> list[int | None]:
    """Waits for processes; their exit codes, None for those that did not end."""
    try:
        for each in processes:
            each.join(seconds)
        return [each.exitcode for each in processes]
    finally:
        for each in processes:
            each.kill()
