"""NXP's eIQ Neutron NPU of microcontrollers (Neutron-C: i.MX RT700, MCX N).

The operators and limits come from NXP's front end in ExecuTorch, because NXP's converter for TFLite
files is not public.
"""

from __future__ import annotations

import math

from keras_qat.config.targets.target import Check, Kernel, Target, operators
from keras_qat.tflite.reader import Site

TYPES = ("int8", "uint8", "int32")

LANES = 8
"""Number of channels that the NPU computes together. Many operators need a multiple of this."""


def _find_computed_shapes(site: Site) -> list[tuple[int, ...]]:
    return [t.shape for t in site.tensors if site.graph.constant(t.index) is None]


def _check_full_channels(site: Site) -> str | None:
    refused = [shape[-1] for shape in _find_computed_shapes(site) if shape and shape[-1] % LANES]
    return f"channels in multiples of {LANES} only, not {refused[0]}" if refused else None


def _check_full_tensor(site: Site) -> str | None:
    size = math.prod(site.outputs[0].shape)
    return f"sizes in multiples of {LANES} only, not {size}" if size % LANES else None


def _check_full_matrices(site: Site) -> str | None:
    shapes = _find_computed_shapes(site)
    if any(len(shape) != 3 for shape in shapes):
        return "3 axes only"
    refused = [size for shape in shapes for size in shape[1:] if size % LANES]
    return f"sizes in multiples of {LANES} only, not {refused[0]}" if refused else None


def _check_equal_shapes(site: Site) -> str | None:
    shapes = {tensor.shape for tensor in site.tensors}
    return None if len(shapes) == 1 else "operands of one shape only"


def _check_no_groups(site: Site) -> str | None:
    return None if site.shape()[-1] == site.shape(1)[-1] else "no groups"


def _check_average_window(site: Site) -> str | None:
    names = ("filterHeight", "filterWidth", "strideH", "strideW")
    largest = max(site.option(name) for name in names)
    return f"windows and strides up to 4096 only, not {largest}" if largest > 4096 else None


def _check_rows(site: Site) -> str | None:
    *leading, _ = site.shape()
    rows = math.prod(leading)
    return f"at most 4096 rows of channels, not {rows}" if rows > 4096 else None


def _check_classes(site: Site) -> str | None:
    shape = site.shape()
    if len(shape) < 2:
        return "at least 2 axes"
    if shape[-1] >= 2048 or math.prod(shape) > 524_288:
        return "fewer than 2048 classes and at most 524288 values only"
    return None


def _check_short_strides(site: Site) -> str | None:
    stride = site.option("strideH")
    return f"strides of 1 or 2 rows only, not {stride}" if stride > 2 else None


def _check_over_image(site: Site) -> str | None:
    axes = site.constant(1)
    shape = site.shape()
    if axes is None or len(shape) != 4 or {int(axis) % 4 for axis in axes.ravel()} != {1, 2}:
        return "over height and width of images only"
    return None


def _check_pads_image(site: Site) -> str | None:
    sizes = site.constant(1)
    is_image = sizes is not None and len(sizes) == 4 and not sizes[[0, 3]].any()
    return None if is_image else "height and width of images only"


def _check_resize(site: Site) -> str | None:
    before, after = site.shape()[1:3], site.outputs[0].shape[1:3]
    factors = {new / old for old, new in zip(before, after, strict=True)}
    return None if factors in ({2}, {4}) else "2x or 4x only"


def _check_constant_divisor(site: Site) -> str | None:
    return None if site.constant(1) is not None else "constant divisors only"


def _kernel(*checks: Check, max_axes: int = 99) -> Kernel:
    return Kernel(TYPES, checks=checks, max_axes=max_axes)


NEUTRON = Target(
    name="neutron",
    title="eIQ Neutron",
    kernels="xnnpack",
    batch_size=1,
    bits=(8,),
    has_float=False,
    elsewhere="the CPU",
    operators=operators(
        ("CONV_2D", _kernel(_check_no_groups)),
        ("DEPTHWISE_CONV_2D TRANSPOSE_CONV RESHAPE SQUEEZE EXPAND_DIMS TRANSPOSE", _kernel()),
        ("RELU RELU6 RELU_0_TO_1 RELU_N1_TO_1 LEAKY_RELU LOGISTIC TANH HARD_SWISH", _kernel()),
        ("ABS NEG EXP LOG RSQRT SUM REDUCE_MAX REDUCE_MIN QUANTIZE", _kernel()),
        ("SLICE STRIDED_SLICE SPLIT SPLIT_V", _kernel()),
        ("FULLY_CONNECTED", _kernel(max_axes=2)),
        ("ADD SUB MAXIMUM MINIMUM", _kernel(_check_equal_shapes)),
        ("MUL", _kernel(_check_full_tensor)),
        ("DIV", _kernel(_check_constant_divisor, _check_full_channels)),
        ("BATCH_MATMUL", _kernel(_check_full_matrices)),
        ("CONCATENATION", _kernel(_check_full_channels)),
        ("AVERAGE_POOL_2D", _kernel(_check_average_window)),
        ("MAX_POOL_2D", _kernel(_check_full_channels, _check_short_strides)),
        ("MEAN", _kernel(_check_over_image)),
        ("PAD PADV2", _kernel(_check_pads_image)),
        ("PRELU", _kernel(_check_full_channels, _check_rows)),
        ("SOFTMAX", _kernel(_check_full_channels, _check_classes, _check_rows)),
        ("RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR", _kernel(_check_full_channels, _check_resize)),
    ),
    source="read: operators and limits of NXP's front end in ExecuTorch (2026); NXP's converter "
    "is in no public registry, and its rounding is not published",
)
