"""Every operator x bits x family of kernels, on random examples of it."""

from __future__ import annotations

import pytest

from keras_qat.arithmetic.families import FAMILIES
from keras_qat.ops.registry import ROWS
from tests.ops.examples import EXAMPLES
from tests.ops.harness import assert_exact

BITS = (8, 16, 5)
MATCHING = [op for op in ROWS if op.layers or op.paths or op.symbols or op.functions]
"""The rest is for custom layers only."""

CASES = [
    pytest.param(op, bits, family, id=f"{op.name}-{bits}-{family}")
    for op in MATCHING
    for bits in BITS
    for family in FAMILIES
    if op.has_kernel_for(bits)
]


def test_every_row_has_an_example():
    assert {op.name for op in MATCHING} == set(EXAMPLES)


@pytest.mark.parametrize(("op", "bits", "family"), CASES)
def test_the_operator_computes_what_the_interpreter_does(op, bits, family):
    for seed in range(8):
        assert_exact(op, bits, family, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "bits", "family"), CASES)
def test_many_more(op, bits, family, seeds):
    for seed in range(8, seeds):
        assert_exact(op, bits, family, seed)
