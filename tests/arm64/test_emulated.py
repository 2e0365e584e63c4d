"""Files in LiteRT for 64-bit ARM, emulated, against the simulation of its kernels.

`make test-arm64` sets the emulator up; without it these tests are skipped.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import structures
from benchmarks.runtimes import operators
from tests.arm64 import emulator
from tests.arm64.cases import cases
from tests.ops.harness import file_of, in_integers, sized

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not emulator.is_set_up(), reason="no emulator: make test-arm64"),
]

FAMILY = "xnnpack_arm64"

SOME = ("conv", "other_rounding")
RANDOM = 20


def differing(folder, cpu):
    """Files whose quantized values are others on the processor than in the simulation."""
    files = emulator.run(folder, cpu)["files"]
    assert files
    results = {name: kernels[FAMILY] for name, kernels in files.items()}
    return {
        name: result
        for name, result in results.items()
        if (result[0] if isinstance(result, list) else "lstm" not in name)
    }


@pytest.mark.parametrize("cpu", emulator.CPUS)
def test_what_rounds_otherwise_than_on_x86(cpu, tmp_path):
    for name, (node, inputs) in cases():
        node = sized(node, len(inputs["input_0"]))
        (tmp_path / f"{name}.tflite").write_bytes(file_of(node))
        (expected,) = in_integers(node, inputs, FAMILY)
        np.savez(tmp_path / f"{name}.npz", xnnpack_arm64_0=expected, **inputs)
    assert differing(tmp_path, cpu) == {}


def test_operators_compute_what_the_simulation_does(tmp_path):
    for name, contents, arrays in operators(1):
        (tmp_path / f"{name}.tflite").write_bytes(contents)
        needed = {key: array for key, array in arrays.items() if key.startswith(("input", FAMILY))}
        np.savez(tmp_path / f"{name}.npz", **needed)
    assert differing(tmp_path, "cortex-a76") == {}


@pytest.mark.parametrize("width", structures.WIDTHS)
def test_some_structures_on_a76(width, tmp_path):
    structures.write(structures.families(width, [FAMILY], names=SOME), tmp_path)
    assert differing(tmp_path, "cortex-a76") == {}


def test_networks_of_other_tests(tmp_path):
    """Masks, cells, lent and computed weights, comparisons, in 8 bits on all processors."""
    structures.write(structures.tables("int8", [FAMILY]), tmp_path)
    others = {cpu: differing(tmp_path, cpu) for cpu in emulator.CPUS}
    assert others == {cpu: {} for cpu in emulator.CPUS}


@pytest.mark.parametrize("width", structures.WIDTHS)
def test_all_structures(width, tmp_path):
    """Families, the networks of microcontrollers and random models, on all processors."""
    structures.write(structures.families(width, [FAMILY]), tmp_path)
    structures.write(structures.networks(width, [FAMILY]), tmp_path)
    structures.write(structures.random_models(width, [FAMILY], count=RANDOM), tmp_path)
    others = {cpu: differing(tmp_path, cpu) for cpu in emulator.CPUS}
    assert others == {cpu: {} for cpu in emulator.CPUS}
