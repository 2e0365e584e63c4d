"""The phase of a call: whether a quantize-aware layer trains, quantizes, or has frozen ranges."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

Flag = bool | tf.Tensor
"""A condition: a bool if it is known while a graph is traced, or a scalar tensor."""

NEVER = 2**62
"""The training step of a change that never happens."""


class Phase(NamedTuple):
    """What a quantize-aware layer does in one call.

    A field is a bool if it is known when a graph is traced. Otherwise, the graph reads it while it
    runs, from a scalar tensor or a `Switch`. Phases in `ScheduledLayer.assumed` have variables
    instead.
    """

    training: Any
    quantizing: Any
    """True if the call fake-quantizes."""
    frozen: Any
    """True if BatchNormalization uses the moving statistics."""
    calibrated: bool = False
    """True if it is certain that all quantizers have a range."""
    fixed: Any = False
    """True if ranges are frozen. A `Switch` is only used if no range is empty."""
    known: int = 0
    """The number of a set of frozen ranges that the graph contains as constants, or 0 for none."""


IN_FLOAT = Phase(training=False, quantizing=False, frozen=True, calibrated=True)
QUANTIZED = IN_FLOAT._replace(quantizing=True)
"""`IN_FLOAT` and `QUANTIZED` are inference of a calibrated model without and with quantization."""


def is_exact(phase: Phase | None) -> bool:
    """Returns True for inference in which all layers quantize, and all quantizers have a range."""
    if phase is None or phase.training is not False:
        return False
    return phase.quantizing is True and phase.calibrated
