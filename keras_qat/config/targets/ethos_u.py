"""Arm's Ethos-U NPUs: the operators that the compiler Vela runs on the NPU instead of the CPU.

`vela --supported-ops-report` lists Vela's rules. tests/targets/test_vela.py compares this module
with Vela, operator by operator.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from keras_qat.config.targets.target import Check, Kernel, Target, operators
from keras_qat.config.targets.tflm import TFLM
from keras_qat.tflite.reader import Site

MAPS = ("int8", "uint8", "int16")
INTEGERS = (*MAPS, "int32", "int64")
"""Types of activations, weights, biases, sizes, axes and indices."""

WIDEST = 1 << 16


def _check_strides(site: Site) -> str | None:
    largest = max(site.option("strideW"), site.option("strideH"))
    return f"strides up to 3 only, not {largest}" if largest > 3 else None


def _check_padded_strides(site: Site) -> str | None:
    """Limit strides to 3 if the operator has padding or dilation."""
    dilation = max(site.option(f"dilation{name}Factor", 1) for name in "HW")
    return None if dilation == 1 and not _is_padded(site) else _check_strides(site)


def _is_padded(site: Site) -> bool:
    """Return True if padding adds values. Padding "same" adds none if the windows fit exactly."""
    if site.option("padding") == VALID:
        return False
    if site.operation.kernel.endswith("POOL_2D"):
        window: tuple[int, ...] = (site.option("filterHeight"), site.option("filterWidth"))
    else:
        window = site.shape(1)[1:3]
    steps = site.option("strideH"), site.option("strideW")
    ends = zip(site.shape()[1:3], site.outputs[0].shape[1:3], window, steps, strict=True)
    return any((after - 1) * step + size > before for before, after, size, step in ends)


VALID = 1
"""The code of padding "valid" in TFLite files."""


def _check_axes(site: Site) -> str | None:
    """Refuse scalar results, unless a QUANTIZE computes them."""
    is_scalar = any(tensor.shape == () for tensor in site.outputs)
    if site.operation.kernel == "QUANTIZE":
        return None
    return "results with at least one axis only" if is_scalar else None


def _check_maps(site: Site) -> str | None:
    """Refuse operators whose first input or result is not int8, uint8 or int16."""
    first = next((tensor for tensor in site.inputs if tensor is not None), None)
    dtypes = [tensor.dtype.name for tensor in (first, *site.outputs) if tensor is not None]
    refused = [dtype for dtype in dtypes if dtype not in MAPS]
    return f"no kernel for {refused[0]}" if refused else None


def _check_constants(site: Site) -> str | None:
    indices = range(1, len(site.inputs))
    known = all(site.inputs[i] is None or site.constant(i) is not None for i in indices)
    return None if known else "constant sizes and indices only"


def _check_pool(site: Site) -> str | None:
    height, width = site.option("filterHeight"), site.option("filterWidth")
    if _is_padded(site) and site.operation.kernel == "AVERAGE_POOL_2D":
        largest = max(height, width)
        return f"with padding, windows up to 8 only, not {largest}" if largest > 8 else None
    fits = height <= 256 and height * width <= WIDEST
    return None if fits else f"windows up to 256 rows and {WIDEST} values, not {height}x{width}"


def _check_mean(site: Site) -> str | None:
    shape, axes = site.shape(), site.constant(1)
    if axes is None:
        return "constant axes only"
    reduced = {int(axis) % len(shape) for axis in np.ravel(axes)}
    if len(shape) > 4:
        return f"at most 4 axes, not {len(shape)}"
    if len(shape) > 3 and shape[0] != 1:
        return "a batch of 1 only"
    sizes, most = [shape[axis] for axis in reduced], WIDEST if _get_bits(site) == 16 else 1 << 24
    if max(sizes) >= 4096:
        return f"means along axes of at most 4095 values, not {max(sizes)}"
    if math.prod(sizes) > most:
        return f"means of at most {most} values, not {math.prod(sizes)}"
    *_, height, width, depth = (1, 1, *shape)
    if len(shape) - 1 in reduced and 1 not in (height, width, depth):
        return "means along the last axis only if height, width or depth is 1"
    return None


def _get_bits(site: Site) -> int:
    return site.outputs[0].dtype.itemsize * 8


def _find_factors(site: Site) -> tuple[float, float] | None:
    """Return the resize factors of height and width, or None if Vela accepts any factors."""
    before, after = site.shape()[1:3], site.outputs[0].shape[1:3]
    centred = site.operation.kernel == "RESIZE_BILINEAR" and site.option("halfPixelCenters")
    if before == (1, 1) or (before == after and not centred):
        return None
    excluded = 1 if site.option("alignCorners") else 0
    high, wide = (
        (new - excluded) / (old - excluded) if old > excluded else math.inf
        for old, new in zip(before, after, strict=True)
    )
    if high != wide and 1 in after:
        return (wide, wide) if after[0] == before[0] == 1 else (high, high)
    return high, wide


def _check_resize(site: Site) -> str | None:
    factors = _find_factors(site)
    if factors is None:
        return None
    is_centred = site.operation.kernel == "RESIZE_BILINEAR" and site.option("halfPixelCenters")
    allowed = [2] if is_centred else [2, 4, 8]
    if factors[0] == factors[1] and factors[0] in allowed:
        return None
    times = " or ".join(f"{factor}x" for factor in allowed)
    return f"{times} only, not {factors[0]:.3g}x{factors[1]:.3g}"


def _check_resize_85(site: Site) -> str | None:
    factors = _find_factors(site)
    if site.option("alignCorners") and site.option("halfPixelCenters"):
        return "either aligned corners or half-pixel centers, not both"
    if factors is None or site.operation.kernel == "RESIZE_NEAREST_NEIGHBOR":
        return None
    powers = all(factor >= 1 and math.log2(factor).is_integer() for factor in factors)
    return None if powers else "powers of 2 only"


def _check_transpose_conv(site: Site) -> str | None:
    strides = site.option("strideW"), site.option("strideH")
    _, height, width, _ = site.shape(2)
    _, rows, columns, _ = site.shape(1)
    wide = strides == (2, 1) and height == rows == 1
    high = strides == (1, 2) and width == columns == 1
    if strides not in ((1, 1), (2, 2)) and not (wide or high):
        return f"strides of 1x1 or 2x2 only, not {strides[1]}x{strides[0]}"
    return _check_transpose_conv_sizes(site)


def _check_transpose_conv_sizes(site: Site) -> str | None:
    sizes = site.outputs[0].shape[1:3]
    kernel, steps = site.shape(1)[1:3], (site.option("strideH"), site.option("strideW"))
    more = [0, 0]
    if site.option("padding") == VALID:
        more = [max(size - step, 0) for size, step in zip(kernel, steps, strict=True)]
    before = site.shape(2)[1:3]
    full = tuple(n * step + m for n, step, m in zip(before, steps, more, strict=True))
    return (
        None if full == sizes else f"outputs of {full[0]}x{full[1]} only, not {sizes[0]}x{sizes[1]}"
    )


def _check_forwards(site: Site) -> str | None:
    steps = site.constant(3)
    is_forward = steps is not None and bool(np.all(steps > 0))
    return None if is_forward else "constant forward steps only"


def _check_argmax(site: Site) -> str | None:
    shape, axis = site.shape(), site.constant(1)
    if axis is None or int(np.ravel(axis)[0]) % len(shape) != len(shape) - 1:
        return "the last axis only"
    return None if shape[-1] <= 127 else f"at most 127 channels, not {shape[-1]}"


def _check_same_scales(site: Site) -> str | None:
    params = {(tensor.scale, tensor.zero_point) for tensor in site.tensors}
    return None if len(params) == 1 else "one scale for all tensors only"


def _check_eight_bits(site: Site) -> str | None:
    return None if _get_bits(site) == 8 else "no kernel for int16"


def _check_int8_input(site: Site) -> str | None:
    first = site.inputs[0]
    return None if first is not None and first.dtype.name == "int8" else "int8 inputs only"


def _check_batch_axis(site: Site) -> str | None:
    is_first = site.option("axis") == site.option("batchDims")
    return None if is_first else "the first axis only"


def _check_softmax(site: Site) -> str | None:
    rows = math.prod(site.shape()[1:-1])
    return None if rows < WIDEST else f"fewer than {WIDEST} rows only, not {rows}"


def _check_no_int32(site: Site) -> str | None:
    is_int32 = site.inputs[0] is not None and site.inputs[0].type == "int32"
    return "Vela 5.2 fails on files with a QUANTIZE of int32" if is_int32 else None


def _kernel(*checks: Check) -> Kernel:
    return Kernel(INTEGERS, checks=checks)


BOTH = operators(
    ("ADD SUB MUL RESHAPE SQUEEZE EXPAND_DIMS SPLIT TRANSPOSE", _kernel()),
    ("ABS CONCATENATION HARD_SWISH LEAKY_RELU LOGISTIC PACK PRELU RELU", _kernel(_check_maps)),
    ("RELU6 RELU_0_TO_1 RELU_N1_TO_1 TANH UNPACK SPLIT_V TILE QUANTIZE", _kernel(_check_maps)),
    ("SQUARED_DIFFERENCE EXP LOG REDUCE_MAX REDUCE_MIN FULLY_CONNECTED", _kernel(_check_maps)),
    ("UNIDIRECTIONAL_SEQUENCE_LSTM", _kernel(_check_maps)),
    ("PAD PADV2 MIRROR_PAD SLICE", _kernel(_check_maps, _check_constants)),
    ("STRIDED_SLICE", _kernel(_check_maps, _check_constants, _check_forwards)),
    ("ELU GELU", _kernel(_check_maps, _check_eight_bits)),
    ("MAXIMUM MINIMUM", _kernel(_check_maps, _check_same_scales)),
    ("MEAN", _kernel(_check_maps, _check_mean)),
    ("SOFTMAX", _kernel(_check_maps, _check_softmax)),
)

ETHOS_U55 = Target(
    name="ethos_u55",
    title="Ethos-U55",
    kernels="tflm",
    batch_size=1,
    has_float=False,
    elsewhere="the CPU",
    host=TFLM,
    faults=TFLM.faults,
    checks=(_check_axes,),
    operators=BOTH
    | operators(
        ("AVERAGE_POOL_2D MAX_POOL_2D", _kernel(_check_maps, _check_padded_strides, _check_pool)),
        ("RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR", _kernel(_check_maps, _check_resize)),
        ("CONV_2D", _kernel(_check_maps, _check_padded_strides)),
        ("DEPTHWISE_CONV_2D", _kernel(_check_maps, _check_strides)),
        ("TRANSPOSE_CONV", _kernel(_check_transpose_conv)),
        ("BATCH_MATMUL", _kernel(_check_int8_input)),
        ("ARG_MAX", _kernel(_check_argmax)),
    ),
    source="run: the compiler ethos-u-vela, for each operator; no device. According to Vela's "
    "sources, it rounds like TFLite Micro, except in resizes and with 16 bits",
)

ETHOS_U65 = dataclasses.replace(ETHOS_U55, name="ethos_u65", title="Ethos-U65")

_WITH_BOOL = Kernel((*INTEGERS, "bool"))

ETHOS_U85 = dataclasses.replace(
    ETHOS_U55,
    name="ethos_u85",
    title="Ethos-U85",
    has_float=True,  # Normalization in integers ends with a QUANTIZE from int32, which Vela lacks.
    operators=BOTH
    | operators(
        ("AVERAGE_POOL_2D MAX_POOL_2D", _kernel(_check_pool)),
        ("RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR", _kernel(_check_resize_85)),
        ("CONV_2D DEPTHWISE_CONV_2D BATCH_MATMUL ARG_MAX CAST REVERSE_V2", _kernel()),
        ("GATHER", _kernel(_check_batch_axis)),
        ("QUANTIZE", _kernel(_check_no_int32, _check_maps)),
        ("STRIDED_SLICE", Kernel(_WITH_BOOL.types, checks=(_check_constants, _check_forwards))),
        ("GREATER GREATER_EQUAL LESS LESS_EQUAL EQUAL NOT_EQUAL RESHAPE SELECT_V2", _WITH_BOOL),
        ("LOGICAL_AND LOGICAL_OR LOGICAL_NOT REDUCE_ALL REDUCE_ANY", _WITH_BOOL),
        ("TRANSPOSE_CONV", _kernel(_check_transpose_conv_sizes)),
    ),
)
