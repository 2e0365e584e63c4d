"""Files in LiteRT for 64-bit ARM, emulated, against the simulation of its kernels.

`make test-arm64` sets the emulator up; without it these tests are skipped.
"""

import numpy as np
import pytest

from benchmarks import structures
from tests import emulation
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
    return emulation.find_differing(emulator.run(folder, cpu), FAMILY)


def assert_same_on_all(folder):
    others = {cpu: differing(folder, cpu) for cpu in emulator.CPUS}
    assert others == {cpu: {} for cpu in emulator.CPUS}


@pytest.mark.parametrize("cpu", emulator.CPUS)
def test_what_rounds_otherwise_than_on_x86(cpu, tmp_path):
    for name, (node, inputs) in cases():
        node = sized(node, len(inputs["input_0"]))
        (tmp_path / f"{name}.tflite").write_bytes(file_of(node))
        (expected,) = in_integers(node, inputs, FAMILY)
        np.savez(tmp_path / f"{name}.npz", xnnpack_arm64_0=expected, **inputs)
    assert differing(tmp_path, cpu) == {}


def test_operators_compute_what_the_simulation_does(tmp_path):
    emulation.write_operators(tmp_path, FAMILY)
    assert differing(tmp_path, "cortex-a76") == {}


@pytest.mark.parametrize("width", structures.WIDTHS)
def test_some_structures_on_a76(width, tmp_path):
    structures.write(structures.families(width, [FAMILY], names=SOME), tmp_path)
    if width in emulation.LARGE_WIDTHS:
        emulation.write_large(tmp_path, width, FAMILY, emulation.SOME_LARGE)
    assert differing(tmp_path, "cortex-a76") == {}


@pytest.mark.parametrize("width", structures.WIDTHS)
def test_all_structures(width, tmp_path):
    """Families, networks of microcontrollers and of other tests, random models."""
    emulation.write_structures(tmp_path, width, FAMILY, RANDOM)
    assert_same_on_all(tmp_path)


@pytest.mark.parametrize("width", emulation.LARGE_WIDTHS)
def test_large_sizes(width, tmp_path):
    emulation.write_large(tmp_path, width, FAMILY)
    assert_same_on_all(tmp_path)
