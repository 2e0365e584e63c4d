"""TFLite Micro with CMSIS-NN, for Cortex-M: its faults, and the rewrites that avoid them.

Operators without a CMSIS-NN kernel run in TFLite Micro's kernels. The faults were observed with
TFLite Micro of August 2026 and CMSIS-NN of June 2026, compiled by GCC 12.2. Two cores were
emulated: Cortex-M4 (DSP) and Cortex-M55 (Helium). Unless a fault names a core, it occurs on both
cores.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.config.targets.target import Fault
from keras_qat.config.targets.tflm import TFLM
from keras_qat.tflite.reader import Site

HIDDEN_STATE = 18
"""Index of the hidden state among the inputs of an LSTM operator."""


def _is(site: Site, dtype: str) -> bool:
    return site.outputs[0].type == dtype


def _keeps_states(site: Site) -> bool:
    return site.operation.inputs[HIDDEN_STATE] not in site.graph.producers


def _has_over_four_axes(site: Site) -> bool:
    if site.operation.kernel == "TRANSPOSE" and not _is(site, "int8"):
        return False
    return max(len(tensor.shape) for tensor in site.tensors) > 4


def _is_elementwise(site: Site) -> bool:
    """Return True if no operand is broadcast, except operands with a single value."""
    sizes = {math.prod(tensor.shape) for tensor in site.tensors}
    return sizes <= {math.prod(site.outputs[0].shape), 1}


def _has_batch_of_one(site: Site) -> bool:
    """Return True for 5 axes if the first one has size 1, and if a TRANSPOSE does not move it."""
    shape = site.outputs[0].shape
    order = site.constant(1) if site.operation.kernel == "TRANSPOSE" else None
    return len(shape) == 5 and shape[0] == 1 and (order is None or order[0] == 0)


def _rescales(site: Site) -> bool:
    """Return True if `input scale / output scale` changes when it is rounded to float32.

    The RELU kernel for Cortex-M rounds this quotient. TFLite Micro's Python package does not, and
    therefore computes other results.
    """
    ratio = site.tensors[0].scale / site.outputs[0].scale
    return float(np.float32(ratio)) != ratio


def _is_one_scale_of_many_rows(site: Site) -> bool:
    weights = site.inputs[1]
    assert weights is not None
    axes = len(site.outputs[0].shape)
    has_one_scale = weights.type == "int8" and weights.scale > 0
    return axes > 4 or (axes > 2 and has_one_scale and weights.shape[-1] % 4 == 0)


def _is_grouped(site: Site) -> bool:
    return site.shape()[-1] != site.shape(1)[-1]


def _has_int4(site: Site) -> bool:
    weights = site.inputs[1]
    return weights is not None and weights.type == "int4"


def _is_uneven_row(site: Site) -> bool:
    """Return True if CMSIS-NN's kernel for Helium pads an image of one row incorrectly."""
    (_, high, wide, channels), (_, rows, columns, depth) = site.shape(), site.shape(1)
    stride = site.option("strideW")
    is_row = high == rows == site.option("dilationWFactor", 1) == 1 < columns
    is_plain = channels == depth and stride * channels % 4 == 0
    if not _is(site, "int8") or not is_row or not is_plain or stride == 1:
        return False
    padding = (site.outputs[0].shape[2] - 1) * stride + columns - wide
    return padding not in (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class TransposedAxis:
    """Sizes along the height or the width of a TRANSPOSE_CONV.

    `window` is the kernel's size. `full` is the size of the result without padding. Padding removes
    the first `before` values of this result. `size` is the size of the operator's output. `usual`
    is the size of the output if the Keras layer has no `output_padding`.
    """

    stride: int
    window: int
    before: int
    size: int
    usual: int
    full: int

    @property
    def missing(self) -> int:
        """Number of rows or columns of zeros to append to the input, if `full` is too small."""
        return max(-(-(self.before + self.size - self.full) // self.stride), 0)


def find_transposed_axes(site: Site) -> tuple[TransposedAxis, TransposedAxis]:
    """Returns the sizes of a TRANSPOSE_CONV along the height and along the width."""
    strides = site.option("strideH"), site.option("strideW")
    is_valid = site.option("padding") == schema.Padding.VALID

    def find_axis(axis: int) -> TransposedAxis:
        size, stride = site.outputs[0].shape[axis], strides[axis - 1]
        count, window = site.shape(2)[axis], site.shape(1)[axis]
        full = count * stride + max(window - stride, 0)
        if is_valid:
            return TransposedAxis(stride, window, 0, size, full, full)
        removed = max((-(-size // stride) - 1) * stride + window - size, 0)
        return TransposedAxis(stride, window, removed // 2, size, count * stride, full)

    return find_axis(1), find_axis(2)


def _is_transposed_by_rows(site: Site) -> bool:
    """Return True for an int8 TRANSPOSE_CONV that CMSIS-NN computes row by row.

    This computation is wrong for some paddings and sizes.
    """
    strides = max(site.option("strideH"), site.option("strideW"))
    return _is(site, "int8") and (strides > 2 or site.shape(2)[-1] <= 16)


def _is_padded_unevenly(site: Site) -> bool:
    height, _ = find_transposed_axes(site)
    return _is_transposed_by_rows(site) and height.before % height.stride != 0


def _is_narrow(site: Site) -> bool:
    is_short = any(axis.window < axis.stride for axis in find_transposed_axes(site))
    return _is_transposed_by_rows(site) and is_short


def _is_cropped(site: Site) -> bool:
    height, width = find_transposed_axes(site)
    is_other = height.size != height.usual or width.missing > 0
    return _is_transposed_by_rows(site) and is_other


CROP, OFF_BY_ONE = "crop_transpose_conv", "some values of int16 are off by one"

FAULTS = (
    Fault(
        "UNIDIRECTIONAL_SEQUENCE_LSTM",
        _keeps_states,
        "loses its states between runs",
        change="use GRU or SimpleRNN",
    ),
    Fault(
        "TRANSPOSE_CONV",
        _is_padded_unevenly,
        "wrong if the padding is not a multiple of the stride",
        CROP,
    ),
    Fault("TRANSPOSE_CONV", _is_narrow, "wrong if the kernel is smaller than the stride", CROP),
    Fault("TRANSPOSE_CONV", _is_cropped, "wrong with output padding", CROP),
    Fault(
        "TRANSPOSE_CONV",
        lambda site: _is(site, "int16") and bool(site.option("fusedActivationFunction")),
        "forgets a fused ReLU of int16",
        "clip_afterwards",
    ),
    Fault(
        "CONV_2D", _is_uneven_row, "wrong on Cortex-M55 with strides on one row", "convolve_column"
    ),
    Fault(
        "CONV_2D",
        lambda site: _is(site, "int16") and _is_grouped(site),
        "ignores groups of int16",
        "split_groups",
    ),
    Fault(
        "CONV_2D",
        lambda site: _has_int4(site) and _is_grouped(site),
        "wrong with groups of 4-bit weights",
        "unpack_int4",
    ),
    Fault(
        "FULLY_CONNECTED", _is_one_scale_of_many_rows, "stops at an assertion", "multiply_matrix"
    ),
    Fault(
        "MINIMUM MAXIMUM",
        lambda site: _has_over_four_axes(site) and _is_elementwise(site),
        "at most 4 axes",
        "flatten",
    ),
    Fault(
        "BATCH_MATMUL TRANSPOSE",
        lambda site: _has_over_four_axes(site) and _has_batch_of_one(site),
        "at most 4 axes",
        "drop_batch_axis",
    ),
    Fault("MINIMUM MAXIMUM BATCH_MATMUL TRANSPOSE", _has_over_four_axes, "at most 4 axes"),
    Fault(
        "RELU", lambda site: _is(site, "int16") and _rescales(site), OFF_BY_ONE, "replace_by_prelu"
    ),
    Fault("LEAKY_RELU", lambda site: _is(site, "int16"), OFF_BY_ONE, "replace_by_prelu"),
    Fault(
        "SUB",
        lambda site: _is(site, "int16"),
        OFF_BY_ONE,
        change="negate one input in an earlier layer, and add",
    ),
    Fault(
        "SOFTMAX",
        lambda site: _is(site, "int16") and site.shape()[-1] == 1,
        "wrong for one class of int16",
        change="leave it out",
    ),
)

CMSIS_NN = dataclasses.replace(
    TFLM,
    name="cmsis_nn",
    title="TFLite Micro with CMSIS-NN",
    faults=(*TFLM.faults, *FAULTS),
    source="run: emulated Cortex-M4 and Cortex-M55",
)
