"""Tests files in LiteRT on x86 processors with other instructions, against the simulation.

These tests are skipped unless `make test-x86` has installed the emulator.
"""

import dataclasses
import functools

import pytest

from keras_qat.arithmetic import kernel_families
from keras_qat.arithmetic.kernel_families import XNNPACK
from tests import emulation
from tests.x86 import emulator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not emulator.is_set_up(), reason="no emulator: make test-x86"),
]

FAMILY = "xnnpack"
PACKED = "packed int4"
WITH_AVX = ("native", "SandyBridge", "Haswell")

find_differing = functools.partial(emulation.find_differing, emulator.run, FAMILY)


def test_a_sample(tmp_path):
    emulation.write_sample(tmp_path, "int8", FAMILY)
    assert find_differing(tmp_path, emulator.CPUS) == {}


def test_operators(tmp_path):
    emulation.write_operators(tmp_path, FAMILY)
    assert find_differing(tmp_path, emulator.CPUS) == {}


@pytest.mark.parametrize("width", emulation.LARGE_WIDTHS)
def test_large_sizes(width, tmp_path):
    emulation.write_large(tmp_path, width, FAMILY)
    assert find_differing(tmp_path, emulator.CPUS) == {}


@pytest.mark.parametrize(("width", "piece"), emulation.PIECES)
def test_structures(width, piece, tmp_path):
    emulation.write_structures(tmp_path, width, piece, FAMILY)
    cpus = WITH_AVX if width == PACKED else emulator.CPUS
    assert find_differing(tmp_path, cpus) == {}


@pytest.mark.parametrize("piece", [piece for width, piece in emulation.PIECES if width == PACKED])
def test_packed_int4_without_avx(piece, tmp_path, monkeypatch):
    """Without AVX, TFLite's kernels round sums of packed int4 weights once, as on ARM64."""
    rounds_once = dataclasses.replace(XNNPACK, neon=True)
    monkeypatch.setitem(kernel_families.FAMILIES, FAMILY, rounds_once)
    emulation.write_structures(tmp_path, PACKED, piece, FAMILY)
    assert find_differing(tmp_path, ["Nehalem"]) == {}
