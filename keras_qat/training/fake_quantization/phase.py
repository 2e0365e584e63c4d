"""The phase of a call of a quantize-aware layer: training, quantizing, frozen and so on."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

Flag = bool | tf.Tensor
"""A condition: a bool if it is known while a graph is traced, or a scalar tensor."""

NEVER = 2**62
"""A threshold that is larger than any number of steps."""


class Phase(NamedTuple):
    """The state of one call of a layer.

    A field is a bool, a scalar tensor, or a `Switch` if a variable decides while the graph runs. In
    `ScheduledLayer.assumed`, it is a bool or that variable.
    """

    training: Any
    quantizing: Any
    """Whether the call quantizes."""
    frozen: Any
    """Whether BatchNormalization uses the moving statistics."""
    calibrated: bool = False
    """Whether all quantizers are known to have a range."""
    fixed: Any = False
    """Whether ranges are frozen, so training does not observe. If it is a `Switch`, no range is
    empty."""
    known: int = 0
    """The index of the set of frozen ranges that are constants in the graph; 0 without
    constants."""


IN_FLOAT = Phase(training=False, quantizing=False, frozen=True, calibrated=True)
QUANTIZED = IN_FLOAT._replace(quantizing=True)
"""Phases of a calibrated model at inference."""


def is_exact(phase: Phase | None) -> bool:
    """Whether a phase is inference, and all layers quantize and have ranges."""
    if phase is None or phase.training is not False:
        return False
    return phase.quantizing is True and phase.calibrated
