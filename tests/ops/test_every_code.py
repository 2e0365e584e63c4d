"""Tests all 256 or 65,536 quantized values of each function of one value, over many scales.

The file must compute the same values. An incorrect table would be in the file, too, so results are
also compared with the float function.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.graph.calls import map_values
from keras_qat.ops.node import Node
from keras_qat.ops.op import OwnRange, SharedRange
from keras_qat.ops.registry import op_named
from keras_qat.tflite.interpreter import FileInterpreter
from tests.comparison import KERNELS
from tests.ops.examples.example import BATCH
from tests.ops.harness import assert_same, file_of, in_integers, make_node, node_of
from tests.ops.test_contracts import CASES
from tests.ops.test_options import OPTIONS, last_call

UNARY = [
    case
    for case in CASES
    if case.values[1] in (8, 16) and case.values[0].elementwise and not case.values[0].alias
    if not case.values[0].quantizes_constants
]
SCALES = (1e-4, 1e-3, 0.01, 0.05, 0.3, 2.0)
"""Scales of 8-bit inputs. 16-bit inputs have 1/256 of them."""
OWN_IN_8_BITS = {"elu", "gelu", "hard_swish"}
"""int8 kernels compute these differently from 16-bit tables."""
WIDTHS = (0.5, 1.0, 4.0)
"""Widths of the output's range relative to the results."""
FLOAT32_MAX = float(np.finfo(np.float32).max) / 2
"""The ends and the width of a range must be float32 values."""


def computed_as_in_8_bits(case: Any) -> bool:
    return case.values[1] == 16 and case.values[0].name not in OWN_IN_8_BITS


def with_scales(node: Node, bits: int, scale: float, zero: float, width: float) -> Any:
    """Returns the node on all quantized values with this scale and zero, and the float results.

    Float results are for values in float32 and their neighbours, because some functions jump.
    """
    count = 2**bits
    codes = (np.arange(BATCH * (count // BATCH + 1)) % count - count // 2).reshape(BATCH, -1)
    zero_point = 0 if bits == 16 else round((zero - 0.5) * (count - 1) - 0.5)
    x = dataclasses.replace(
        node.inputs[0],
        shape=(None, codes.shape[1]),
        params=QuantParams(np.float32(scale * 2.0 ** (8 - bits)), zero_point, bits),
    )
    numbers = x.params.dequantize(codes).astype(np.float32)

    def of(x: np.ndarray) -> np.ndarray:
        args, kwargs = map_values(lambda _: x, (node.call.args, node.call.kwargs))
        return np.asarray(node.call.layer(*args, **kwargs), np.float64)

    neighbours = (np.nextafter(numbers, np.float32(end)) for end in (-np.inf, np.inf))
    real = np.stack([of(numbers), *map(of, neighbours)])
    params = node.output.params
    if node.op.output == SharedRange():
        params = x.params
    elif params is not None and isinstance(node.op.output, OwnRange):
        finite = np.clip(real[np.isfinite(real)] * width, -FLOAT32_MAX, FLOAT32_MAX)
        low, high = finite.min(initial=0.0), finite.max(initial=1e-6)
        if bits == 16:
            low, high = -max(-low, high) * 32768 / 32767, max(-low, high)
        params = QuantParams.from_range(low, high, bits)
    y = dataclasses.replace(node.output, shape=x.shape, params=params)
    node = dataclasses.replace(node, inputs=(x,), outputs=(y,))
    return node, ({x.name: codes.astype(x.params.dtype)}, real)


@pytest.mark.sample(6)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("op", "bits", "family"), UNARY)
def test_every_code(op, bits, family, scale):
    for seed in range(2):
        node, _ = node_of(op, bits, seed)
        for zero in (0.0, 0.5, 1.0) if bits == 8 else (0.5,):
            for width in WIDTHS if isinstance(op.output, OwnRange) else (1.0,):
                example, (inputs, _) = with_scales(node, bits, scale, zero, width)
                label = f"scale {scale}, zero at {zero}, width {width}"
                assert_same(example, inputs, family, label)


INTERPOLATED = {("sigmoid", 16): 1.25, ("tanh", 16): 2.5}
"""Operator and bits -> error in steps of TFLite's kernel, because it interpolates in a table."""


def list_nodes(op: Any, bits: int) -> Iterator[Node]:
    """Yields nodes of random examples, and of all calls in `test_options`."""
    yield from (node_of(op, bits, seed)[0] for seed in range(2))
    for build, shapes, _ in OPTIONS.get(op.name, ()):
        yield make_node(last_call(build, shapes), bits, np.random.default_rng(0))


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("op", "bits", "family"),
    [
        pytest.param(
            *case.values, id=case.id, marks=[pytest.mark.slow] * computed_as_in_8_bits(case)
        )
        for case in UNARY
        if case.values[2] == "xnnpack"
    ],
)
def test_results_are_those_of_the_function(op, bits, family):
    """Results are rounded once or twice, or approximated by a kernel. Some are infinite."""
    for original in list_nodes(op, bits):
        for scale in SCALES[::2]:
            node, (inputs, real) = with_scales(original, bits, scale, 0.5, 1.0)
            params = node.output.params
            (codes,) = in_integers(node, inputs, family)
            if params is None:  # Integers.
                low, high = np.min(real, 0), np.max(real, 0)
                assert np.all((low <= codes) & (codes <= high)), (scale, node.attributes)
                continue
            ends = [params.dequantize(np.array(end)) for end in (params.lowest, params.highest)]
            low, high = (np.clip(end(real, 0), *ends) for end in (np.min, np.max))
            values = params.dequantize(codes)
            steps = np.maximum(low - values, values - high) / params.scale
            is_finite = np.isfinite(real).all(0)
            most = INTERPOLATED.get((op.name, bits), 1.01)
            assert steps[is_finite].max(initial=0) < most, (scale, node.attributes)


@pytest.mark.parametrize("family", KERNELS)
@pytest.mark.parametrize("half", [0.5, 77.5, 110.5])
def test_sigmoids_next_to_halves(half, family):
    """For outputs so many steps above 1/2, the last bits of float32 matter."""
    node, _ = node_of(op_named("sigmoid"), 8, 0)
    for q in (1, 6):
        scale = np.float32(np.log((128 + half) / (128 - half)) / q)
        for near in (scale, *np.nextafter(scale, np.float32([0, 1]))):
            example, (inputs, _) = with_scales(node, 8, near, 0.5, 1.0)
            assert_same(example, inputs, family, f"scale {near}")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["sigmoid", "tanh"])
def test_curves_in_fixed_point_next_to_halves(name):
    """TFLite Micro's results are about 1e-5 steps off, which changes some halves."""
    node, numbers = node_of(op_named(name), 8, 0)
    for _ in range(8):
        half, q = numbers.integers(1, 100) + 0.5, numbers.integers(1, 60)
        y = half / 128
        real = np.log((1 + y) / (1 - y)) if name == "sigmoid" else np.arctanh(y)
        scale = np.float32(real / q)
        for near in (scale, *np.nextafter(scale, np.float32([0, 1]))):
            example, (inputs, _) = with_scales(node, 8, near, 0.5, 1.0)
            assert_same(example, inputs, "tflm", f"scale {near}")


@pytest.mark.parametrize(
    ("scale", "ratio", "has_kernel"),
    [
        *((0.3, 127.5, True), (0.3, 128.5, False), (0.3, 1 / 511, True), (0.3, 1 / 513, False)),
        *((1.78815e-7, 1.0, True), (1.78811e-7, 1.0, False)),
    ],
)
def test_scales_at_the_ends_of_what_hard_swish_takes(scale, ratio, has_kernel):
    """Input scales up to 128 times or down to 1/512 of the output's; steps of 1.78814e-7."""
    (op,) = {case.values[0] for case in UNARY if case.values[0].name == "hard_swish"}
    for family in KERNELS:
        node, (inputs, _) = with_scales(node_of(op, 8, 0)[0], 8, scale, 0.5, 1.0)
        params = QuantParams(np.float32(scale / ratio), 0, 8)
        node = dataclasses.replace(node, outputs=(dataclasses.replace(node.output, params=params),))
        assert_same(node, inputs, family)
        codes = {operation[0] for operation in FileInterpreter(file_of(node)).operations()}
        assert ("HARD_SWISH" in codes) == has_kernel


@pytest.mark.parametrize("name", ["elu", "gelu", "hard_swish", "exp", "log"])
def test_functions_that_tflite_has_are_written_as_they_are(name):
    (op,) = {case.values[0] for case in UNARY if case.values[0].name == name}
    node, _ = with_scales(node_of(op, 8, 0)[0], 8, 0.02, 0.5, 1.0)
    assert [operation[0] for operation in FileInterpreter(file_of(node)).operations()] == [
        name.upper()
    ]
