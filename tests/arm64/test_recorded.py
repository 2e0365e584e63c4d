"""Tests the simulation's rounding on 64-bit ARM against results of LiteRT. See `record`."""

import platform

import numpy as np
import pytest

from keras_qat.tflite.interpreter import FileInterpreter
from tests.arm64.cases import cases
from tests.arm64.record import RECORDED
from tests.ops.harness import in_integers


def test_the_simulation_gives_what_an_emulated_processor_gave():
    recorded = np.load(RECORDED)
    others = set()
    for name, (node, inputs) in cases():
        (codes,) = in_integers(node, inputs, "xnnpack_arm64")
        np.testing.assert_array_equal(codes, recorded[name], name)
        if np.any(in_integers(node, inputs, "xnnpack")[0] != codes):
            others.add(name.split()[0])
    assert others == {"softmax", "product", "mean", "hard", "convolution"}


@pytest.mark.skipif(platform.machine() in ("aarch64", "arm64"), reason="this is such a machine")
def test_these_kernels_do_not_run_elsewhere():
    with pytest.raises(ValueError, match=r"64-bit ARM only\. Here, simulate\("):
        FileInterpreter(b"", "xnnpack_arm64")
