"""Converts TFLite files to TOSA and runs them in its reference model.

    .venv-tosa/bin/python tests/tosa/worker.py FOLDER

Needs numpy and the two packages that `make test-tosa` installs. The folder is one that
`benchmarks.runtimes` writes. What became of each file goes to standard output, as JSON: how many
quantized values differ from those of "tflm" and of how many, or why there are none.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tosa_reference_model import tosa_reference_model

TOOLS = Path(sys.executable).parent
FINISHED = 0
"""The reference model's status for a graph that ran."""


def converted(path: Path) -> bytes:
    """Returns a TFLite file as TOSA. Raises a ValueError if the converter refuses it."""
    bytecode, tosa = path.with_suffix(".mlirbc"), path.with_suffix(".tosa")
    for command in (
        [TOOLS / "tosa-converter-for-tflite", path, "--bytecode", "-o", bytecode],
        [TOOLS / "tosa-opt", "--tosa-serialize", f"--tosa-flatbuffer-filename={tosa}", bytecode],
    ):
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError("not converted")
    return tosa.read_bytes()


def run(path: Path) -> Any:
    """Returns how many values of a file differ, and of how many; or why it did not run."""
    with np.load(path.with_suffix(".npz")) as arrays:
        given = [arrays[name] for name in arrays if name.startswith("input_")]
        expected = [arrays[name] for name in arrays if name.startswith("tflm_")]
    outputs, status = tosa_reference_model.run(converted(path), given)
    if int(status) != FINISHED:
        raise ValueError("not run")
    differing = size = 0
    for here, there in zip(expected, outputs, strict=True):
        values = there.view(here.dtype).reshape(-1)
        if values.size != here.size:
            raise ValueError("another shape")
        differing += int(np.count_nonzero(values != here.reshape(-1)))
        size += here.size
    return [differing, size]


def apart(path: Path) -> Any:
    """Returns the result of `run` in a new process, because the reference model exits on errors."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(2, 1)
        try:
            result = run(path)
        except (ValueError, RuntimeError, TypeError) as error:
            result = str(error).strip().splitlines()[-1]
        os.write(writes, json.dumps(result).encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else "ends the process"


if __name__ == "__main__":
    json.dump(
        {path.stem: apart(path) for path in sorted(Path(sys.argv[1]).glob("*.tflite"))}, sys.stdout
    )
