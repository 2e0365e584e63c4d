"""Processes that run TensorFlow from its start: with one thread, several devices or workers.

They are forks of servers that have only imported TensorFlow, because importing it takes seconds.
The tests' process has run TensorFlow, so it cannot be forked.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.survival.training", "tests.distribute.programs"])


def fork(function: Callable[..., None], *args: Any) -> Any:
    """Returns a process that runs a function of a module."""
    process = FORKS.Process(target=function, args=args)
    process.start()
    return process


def run_all(*processes: Any, seconds: float = 300.0) -> list[int | None]:
    """Waits for processes. Returns their exit codes, None for those that did not end."""
    try:
        for process in processes:
            process.join(seconds)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()


PROGRAMS = """
import os, sys, traceback
import tensorflow

for path in sys.stdin:
    child = os.fork()
    if not child:
        try:
            exec(compile(open(path.strip()).read(), path.strip(), "exec"), {})
            os._exit(0)
        except BaseException:
            open(path.strip() + ".error", "w").write(traceback.format_exc())
            os._exit(1)
    print("end", os.waitpid(child, 0)[1], flush=True)
"""
"""Forks a process for each line of its input, the path of a program. Only imports TensorFlow."""


@functools.cache
def _programs() -> subprocess.Popen[str]:
    # Importing tfmot in tests sets a variable that makes TensorFlow import `tf_keras`.
    env = {key: value for key, value in os.environ.items() if key != "TF_USE_LEGACY_KERAS"}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAMS],
        env=env,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def run_program(path: Path) -> str:
    """Runs a program as in a new process. Returns its error, or ""."""
    server = _programs()
    assert server.stdin is not None and server.stdout is not None
    print(path, file=server.stdin, flush=True)
    status = int(next(line for line in server.stdout if line.startswith("end")).split()[1])
    error = Path(f"{path}.error")
    return error.read_text() if error.exists() else f"status {status}" * bool(status)
