"""LiteRT on phones and desktops. TFLite's kernels run the operators that XNNPACK lacks."""

from __future__ import annotations

import math

from keras_qat.config.targets.target import Fault, Target
from keras_qat.tflite.reader import Site


def _check_lstm(site: Site) -> str | None:
    is_lstm = site.operation.kernel == "UNIDIRECTIONAL_SEQUENCE_LSTM"
    is_wide = is_lstm and site.outputs[0].type == "int16"
    return "no kernel for int16" if is_wide else None


def _check_fft(site: Site) -> str | None:
    sizes = site.constant(1) if site.operation.kernel == "RFFT2D" else None
    refused = [int(size) for size in ([] if sizes is None else sizes) if size & (size - 1)]
    if not refused:
        return None
    next_power = 1 << refused[0].bit_length()
    return f"powers of two only, not {refused[0]}: fft_length={next_power} pads with zeros"


MOST_IN_ROW = 4127
"""Maximum number of adjacent int8 values that XNNPACK sums without overflow with SSE and AVX. The
limit is 8,255 values with AVX2, 16,511 with AVX-512, and 2^24 with VNNI or on ARM."""


def _is_long_row(site: Site) -> bool:
    """Return True if a mean may add up more than `MOST_IN_ROW` adjacent values."""
    x, axes = site.inputs[0], site.constant(1)
    if x is None or x.type != "int8" or axes is None:
        return False
    rank = len(x.shape)
    reduced = {int(axis) % rank for axis in axes.reshape(-1)}
    kept = [axis for axis in range(rank) if axis not in reduced]
    row = x.shape[max(kept, default=-1) + 1 :]
    return -1 in row or math.prod(row) > MOST_IN_ROW


LONG_ROWS = Fault(
    "MEAN",
    _is_long_row,
    f"more than {MOST_IN_ROW} values in a sum overflow on x86 without VNNI",
    "average_column",
    change="export the model again",
    knows_open_sizes=True,
)

XNNPACK = Target(
    name="xnnpack",
    title="LiteRT",
    kernels="xnnpack",
    batch_size=None,
    operators=None,
    checks=(_check_lstm, _check_fft),
    source="run: LiteRT runs all files that keras_qat writes",
    faults=(LONG_ROWS,),
)
