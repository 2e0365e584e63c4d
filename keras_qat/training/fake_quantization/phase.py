"""The phase of training that a call of a quantize-aware layer is in."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

Flag = bool | tf.Tensor
"""A condition: a bool while a graph is traced for it, else a scalar tensor."""

NEVER = 2**62
"""A threshold that no training reaches."""


class Phase(NamedTuple):
    """The state of one call of a layer. A field is a bool, or a scalar tensor of the graph.

    In `assumed` a field is a variable that changes before it pays to trace a step for its value.
    """

    training: Any
    quantizing: Any
    """Whether it quantizes; a `Switch`, if a variable tells."""
    frozen: Any
    """Whether BatchNormalization uses the moving statistics; a `Switch`, if a variable tells."""
    calibrated: bool = False
    """Whether all quantizers are known to have a range."""
    fixed: Any = False
    """Whether ranges are frozen: training no longer observes them. A `Switch`, if a variable tells:
    then they have two ends."""
    known: int = 0
    """Number of the set of frozen ranges that the graph holds as constants; 0 for none."""


IN_FLOAT = Phase(training=False, quantizing=False, frozen=True, calibrated=True)
QUANTIZED = IN_FLOAT._replace(quantizing=True)
"""Phases of a calibrated model at inference."""


def is_exact(phase: Phase | None) -> bool:
    """Whether all layers are known to quantize, to ranges that they have, at inference."""
    if phase is None or phase.training is not False:
        return False
    return phase.quantizing is True and phase.calibrated
