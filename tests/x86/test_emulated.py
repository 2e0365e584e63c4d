"""Files in LiteRT on x86 processors with other instructions, against the simulation.

`make test-x86` sets the emulator up; without it these tests are skipped.
"""

import dataclasses

import pytest

from benchmarks import structures
from keras_qat.arithmetic import kernel_families
from keras_qat.arithmetic.kernel_families import XNNPACK
from tests import emulation
from tests.x86 import emulator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not emulator.is_set_up(), reason="no emulator: make test-x86"),
]

FAMILY = "xnnpack"
RANDOM = 20
SOME = ("conv", "other_rounding")
PACKED = "packed int4"
WITH_AVX = ("native", "SandyBridge", "Haswell")


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
    cpus = WITH_AVX if width == PACKED else tuple(emulator.CPUS)
    assert_same_on(tmp_path, cpus)


def test_packed_int4_without_avx(tmp_path, monkeypatch):
    """Without AVX, TFLite's kernels round sums of packed int4 weights once, as they do on ARM64."""
    rounds_once = dataclasses.replace(XNNPACK, neon=True)
    monkeypatch.setitem(kernel_families.FAMILIES, FAMILY, rounds_once)
    emulation.write_structures(tmp_path, PACKED, FAMILY, RANDOM)
    assert_same_on(tmp_path, ("Nehalem",))
