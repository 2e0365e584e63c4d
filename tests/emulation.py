"""Runs files in LiteRT for other processors, and finds values that differ from the simulation.

`tests.arm64` and `tests.x86` define the processors, and how they are emulated.
"""

import json
import subprocess
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import structures
from benchmarks.runtimes import operators
from tests.networks.large import LARGE

ROOT = Path(__file__).parents[1]
WORKER = ROOT / "benchmarks" / "runtime_worker.py"

SOME = ("conv", "other_rounding")
SOME_LARGE = (*(f"mean of {count}" for count in (4_128, 8_256, 20_000)), "1000 classes")
"""Names of families and large networks for a sample."""

LARGE_WIDTHS = ("int8", "int16x8")
"""Widths of `benchmarks.structures` with which large networks run."""

COUNTS = {"int8": 8, "one scale": 2, "int16x8": 2, "packed int4": 2}
"""Widths of `benchmarks.structures` -> number of pieces, so that each test takes a few minutes."""

PIECES = [(width, piece) for width, count in COUNTS.items() for piece in range(count + 1)]
"""Pairs of a width and a piece. The last piece of each width has random models."""


def run_worker(command: Sequence[Any], folder: Path, *arguments: Any) -> dict[str, Any]:
    """Returns what the runtime worker reports about the files in a folder.

    Args:
        command: the command that starts Python.
        folder: a folder that `benchmarks.runtimes` has written.
        arguments: further arguments of the worker.
    """
    whole = [*command, WORKER, folder, "ai_edge_litert", *arguments]
    done = subprocess.run([*map(str, whole)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def find_differing(
    run: Callable[[Path, str], dict[str, Any]], family: str, folder: Path, cpus: Iterable[str]
) -> dict[str, Any]:
    """Returns the files with values that differ from the simulation, and files that do not run.

    LiteRT refuses some files of an LSTM.
    """
    found = {
        f"{name} on {cpu}": it for cpu in cpus for name, it in run(folder, cpu)["files"].items()
    }
    assert found
    results = {name: kernels[family] for name, kernels in found.items()}
    return {
        name: counts
        for name, counts in results.items()
        if (counts[0] if isinstance(counts, list) else "lstm" not in name)
    }


def write_operators(folder: Path, family: str) -> None:
    for name, contents, arrays in operators(1, (family,)):
        (folder / f"{name}.tflite").write_bytes(contents)
        np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]


def write_structures(folder: Path, width: str, piece: int, family: str) -> None:
    """Writes a piece of the families and networks (8 bits: of all tables), or random models."""
    networks = structures.find_families() | structures.find_networks()
    if width == "int8":
        networks |= structures.find_tables()
    for name in list(networks):
        if zlib.crc32(name.encode()) % COUNTS[width] != piece:
            del networks[name]
    structures.write(structures.make_examples(networks, width, [family]), folder)
    if piece == COUNTS[width]:
        structures.write(structures.random_models(width, [family], count=20), folder)


def write_sample(folder: Path, width: str, family: str) -> None:
    """Writes two families, and some large networks in the widths that have them."""
    networks = structures.find_families(SOME)
    if width in LARGE_WIDTHS:
        networks |= {name: LARGE[name] for name in SOME_LARGE}
    structures.write(structures.make_examples(networks, width, [family]), folder)


def write_large(folder: Path, width: str, family: str) -> None:
    """Writes networks that sum, compare or move many values."""
    structures.write(structures.make_examples(LARGE, width, [family]), folder)
