"""Files in LiteRT on x86 processors with other instructions, against the simulation.

`make test-x86` sets the emulator up; without it these tests are skipped.
"""

from __future__ import annotations

import pytest

from benchmarks import structures
from tests import emulation
from tests.x86 import emulator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not emulator.is_set_up(), reason="no emulator: make test-x86"),
]

FAMILY = "xnnpack"
RANDOM = 20
SOME = ("conv", "other_rounding")


def assert_same_on(folder, cpus=tuple(emulator.CPUS)):
    """Asserts that no value of any file differs from the simulation on any processor."""
    results = {cpu: emulator.run(folder, cpu) for cpu in cpus}
    differing = {cpu: emulation.find_differing(results[cpu], FAMILY) for cpu in cpus}
    assert differing == {cpu: {} for cpu in cpus}


def test_a_sample(tmp_path):
    structures.write(structures.families("int8", [FAMILY], names=SOME), tmp_path)
    emulation.write_large(tmp_path, "int8", FAMILY, emulation.SOME_LARGE)
    assert_same_on(tmp_path)


def test_operators(tmp_path):
    emulation.write_operators(tmp_path, FAMILY)
    assert_same_on(tmp_path)


@pytest.mark.parametrize("width", emulation.LARGE_WIDTHS)
def test_large_sizes(width, tmp_path):
    emulation.write_large(tmp_path, width, FAMILY)
    assert_same_on(tmp_path)


@pytest.mark.parametrize("width", structures.WIDTHS)
def test_structures(width, tmp_path):
    emulation.write_structures(tmp_path, width, FAMILY, RANDOM)
    assert_same_on(tmp_path)
