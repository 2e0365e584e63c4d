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

    A field is a bool, a scalar tensor or a `Switch`. A `Switch` reads a variable while the graph
    runs. `ScheduledLayer.assumed` contains the variable instead.
    """

    training: Any
    quantizing: Any
    """True if the call quantizes."""
    frozen: Any
    """True if BatchNormalization uses the moving statistics."""
    calibrated: bool = False
    """True if all quantizers certainly have a range."""
    fixed: Any = False
    """True if ranges are frozen. Training then does not observe. With a `Switch`, no range is
    empty."""
    known: int = 0
    """The index of the set of frozen ranges that are constants in the graph. 0 means that ranges
    are not constants."""


IN_FLOAT = Phase(training=False, quantizing=False, frozen=True, calibrated=True)
QUANTIZED = IN_FLOAT._replace(quantizing=True)
"""Phases of a calibrated model at inference."""


def is_exact(phase: Phase | None) -> bool:
    """Returns True if a phase is inference, and all layers quantize and have ranges."""
    if phase is None or phase.training is not False:
        return False
    return phase.quantizing is True and phase.calibrated
