"""Training functions for the phase that training is in.

In a graph that serves all phases every layer branches, on whether it quantizes yet and whether its
BatchNormalization is frozen. Such a graph takes several times longer to trace and to optimize than
the float model's. `fit` knows before each execution which way all layers will go, so it gets a
function traced for that phase, without the branches. Custom training loops branch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.layers.scheduled import Phase, ScheduledLayer, assuming

__all__ = ["PhasedTraining"]


class PhasedTraining:
    """A Keras model that traces its training function once for each phase that it meets."""

    def make_train_function(self, force: bool = False) -> Callable[[Any], Any]:
        """As Keras documents it: called by `fit` and `train_on_batch`."""
        model: Any = self
        if model.train_function is not None and not force:
            return model.train_function
        make = super().make_train_function  # type: ignore[misc]
        find_phase = phase_finder(model)
        functions: dict[Phase | None, Callable[[Any], Any]] = {}

        def train_function(iterator: Any) -> Any:
            phase = find_phase()
            if phase not in functions:
                functions[phase] = make(force=True)
                model.train_function = train_function
            with assuming(phase):
                return functions[phase](iterator)

        model.train_function = train_function
        return train_function


def phase_finder(model: Any) -> Callable[[], Phase | None]:
    """A function that gives the phase of all layers in the next execution of training steps.

    None if they differ, or if it changes during the execution. It looks at the layers' weights
    each time, so it does not matter how they were set.
    """
    layers = [each for each in model._flatten_layers() if isinstance(each, ScheduledLayer)]
    most_calls = max(len(layer.inbound_nodes) for layer in layers)

    @tf.function
    def counters() -> Any:
        names = ("step", "quantize_from", "freeze_from")
        return [tf.stack([getattr(layer, name) for layer in layers]) for name in names]

    def find() -> Phase | None:
        done, quantize_from, freeze_from = (each.numpy() for each in counters())
        last = done + most_calls * int(model._steps_per_execution)
        gates = []
        for threshold in (quantize_from, freeze_from):
            reached, ahead = (done + 1 >= threshold).all(), (last < threshold).all()
            if not reached and not ahead:
                return None
            gates.append(bool(reached))
        return Phase(True, *gates)

    return find
