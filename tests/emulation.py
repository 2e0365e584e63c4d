"""Runs files in LiteRT as on other processors, and says which values differ from the simulation.

`tests.arm64` and `tests.x86` say which processors, and how each is emulated.
"""

import json
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import structures
from benchmarks.runtimes import operators
from tests.networks.large import LARGE

ROOT = Path(__file__).parents[1]
WORKER = ROOT / "benchmarks" / "runtime_worker.py"

SOME_LARGE = (*(f"mean of {count}" for count in (4_128, 8_256, 20_000)), "1000 classes")
"""Names of large networks for a sample."""


LARGE_WIDTHS = ("int8", "int16x8")
"""Widths of `benchmarks.structures` in which large networks are run."""


def run_worker(command: Sequence[Any], folder: Path, *arguments: Any) -> dict[str, Any]:
    """Returns what the runtime worker says of the files in a folder.

    Args:
        command: what starts Python.
        folder: one that `benchmarks.runtimes` has written.
        arguments: the worker's further arguments.
    """
    whole = [*command, WORKER, folder, "ai_edge_litert", *arguments]
    done = subprocess.run([*map(str, whole)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def find_differing(result: dict[str, Any], family: str) -> dict[str, Any]:
    """Returns the files whose values differ from the simulation, and those that do not run.

    LiteRT refuses some files of an LSTM.
    """
    assert result["files"]
    results = {name: kernels[family] for name, kernels in result["files"].items()}
    return {
        name: counts
        for name, counts in results.items()
        if (counts[0] if isinstance(counts, list) else "lstm" not in name)
    }


def write_operators(folder: Path, family: str) -> None:
    """Writes an example of each operator."""
    for name, contents, arrays in operators(1, (family,)):
        (folder / f"{name}.tflite").write_bytes(contents)
        np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]


def write_structures(folder: Path, width: str, family: str, random: int) -> None:
    """Writes families, networks of microcontrollers and random models, in 8 bits also tables."""
    structures.write(structures.families(width, [family]), folder)
    structures.write(structures.networks(width, [family]), folder)
    structures.write(structures.random_models(width, [family], count=random), folder)
    if width == "int8":
        structures.write(structures.tables(width, [family]), folder)


def write_large(folder: Path, width: str, family: str, names: Iterable[str] = LARGE) -> None:
    """Writes networks that add up, compare or move many values."""
    made = (structures.example(name, LARGE[name], width, [family]) for name in names)
    structures.write(made, folder)
