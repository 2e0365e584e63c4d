"""Tests files in LiteRT for 64-bit ARM, emulated, against the simulation of its kernels.

These tests are skipped unless `make test-arm64` has installed the emulator.
"""

import functools

import numpy as np
import pytest

from tests import emulation
from tests.arm64 import emulator
from tests.arm64.cases import cases
from tests.ops.harness import file_of, in_integers, sized

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not emulator.is_set_up(), reason="no emulator: make test-arm64"),
]

FAMILY = "xnnpack_arm64"
A76 = ("cortex-a76",)

find_differing = functools.partial(emulation.find_differing, emulator.run, FAMILY)


@pytest.mark.parametrize("cpu", emulator.CPUS)
def test_what_rounds_otherwise_than_on_x86(cpu, tmp_path):
    for name, (node, inputs) in cases():
        node = sized(node, len(inputs["input_0"]))
        (tmp_path / f"{name}.tflite").write_bytes(file_of(node))
        (expected,) = in_integers(node, inputs, FAMILY)
        np.savez(tmp_path / f"{name}.npz", xnnpack_arm64_0=expected, **inputs)
    assert find_differing(tmp_path, [cpu]) == {}


def test_operators_compute_what_the_simulation_does(tmp_path):
    emulation.write_operators(tmp_path, FAMILY)
    assert find_differing(tmp_path, A76) == {}


@pytest.mark.parametrize("width", emulation.COUNTS)
def test_some_structures_on_a76(width, tmp_path):
    emulation.write_sample(tmp_path, width, FAMILY)
    assert find_differing(tmp_path, A76) == {}


@pytest.mark.parametrize(("width", "piece"), emulation.PIECES)
def test_all_structures(width, piece, tmp_path):
    """Tests families of layers, networks of other tests, and random models."""
    emulation.write_structures(tmp_path, width, piece, FAMILY)
    assert find_differing(tmp_path, emulator.CPUS) == {}


@pytest.mark.parametrize("width", emulation.LARGE_WIDTHS)
def test_large_sizes(width, tmp_path):
    emulation.write_large(tmp_path, width, FAMILY)
    assert find_differing(tmp_path, emulator.CPUS) == {}
