"""The phase of a call: whether a quantize-aware layer trains, quantizes, or has frozen ranges."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

Flag = bool | tf.Tensor
"""A condition. It is a bool if it is known when a graph is traced, otherwise a scalar tensor."""

NEVER = 2**62
"""Stands for the training step of a change, such as quantization, that never happens."""


class Phase(NamedTuple):
    """What a quantize-aware layer does in one call.

    A field is a bool if it is known when a graph is traced. Otherwise, it is a scalar tensor or
    a `Switch`, which the graph reads while it runs.
    """

    training: Any
    quantizing: Any
    """True if the call fake-quantizes."""
    frozen: Any
    """True if BatchNormalization uses the moving statistics."""
    calibrated: bool = False
    """True if it is certain that all quantizers have a range."""
    fixed: Any = False
    """True if ranges are frozen. A `Switch` is off as long as any range is empty."""
    known: int = 0
    """A number for the frozen ranges that the graph contains as constants. 0 without constants."""


IN_FLOAT = Phase(training=False, quantizing=False, frozen=True, calibrated=True)
QUANTIZED = IN_FLOAT._replace(quantizing=True)
"""`IN_FLOAT` is inference in float, and `QUANTIZED` is inference with fake quantization."""


def is_exact(phase: Phase | None) -> bool:
    """Returns True for quantized inference, if all quantizers are known to have a range."""
    if phase is None or phase.training is not False:
        return False
    return phase.quantizing is True and phase.calibrated
