"""Graphs for the phase that a model is in.

In a graph that serves all phases every layer branches, on whether it quantizes yet and whether its
BatchNormalization is frozen. Such a graph takes several times longer to trace and to optimize than
the float model's. `fit`, `evaluate` and `predict` know beforehand which way all layers will go, so
each phase gets a graph of its own, without the branches. Custom training loops branch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.frontend.keras2 import backend
from keras_qat.training.layers.scheduled_layer import Phase, assuming, thresholds_in
from keras_qat.training.schedule import scheduled_layers

__all__ = ["PhaseFinder", "PhasedModel", "check_started", "phase_finder"]


MOST_RANGES = 3
"""For so many different frozen ranges the training step is traced anew."""


class PhasedModel:
    """A Keras model that traces its functions once for each phase that it meets."""

    def make_train_function(self, force: bool = False) -> Any:
        """As Keras documents it: called by `fit` and `train_on_batch`."""
        return self._phased("train", super().make_train_function, force)  # type: ignore[misc]

    def make_test_function(self, force: bool = False) -> Any:
        """As Keras documents it: called by `evaluate` and `test_on_batch`."""
        return self._phased("test", super().make_test_function, force)  # type: ignore[misc]

    def make_predict_function(self, force: bool = False) -> Any:
        """As Keras documents it: called by `predict` and `predict_on_batch`."""
        return self._phased("predict", super().make_predict_function, force)  # type: ignore[misc]

    _settled_at: int | None = None
    """The training steps that were done when inference last took the weights as they are."""

    def settle(self, phase: Phase | None) -> None:
        """Called in front of inference whenever the weights may have changed."""

    @property
    def inference_version(self) -> int:
        """Changes where functions that were traced for inference have to be made anew."""
        return 0

    def _phased(self, name: str, make: Callable[..., Any], force: bool) -> Any:
        """A function that runs, and makes where it is missing, Keras' function for the phase."""
        attribute = f"{name}_function"
        if name == "train":
            check_started(self)
        object.__setattr__(self, "_settled_at", None)  # One of Keras' verbs begins.
        if getattr(self, attribute) is not None and not force:
            return getattr(self, attribute)
        look, layers = phase_finder(self), list(scheduled_layers(self))
        functions: dict[tuple[Phase | None, int], Any] = {}

        def function(iterator: Any) -> Any:
            phase = look(name == "train", changed=self._settled_at is None)
            if not functions and name != "predict":
                backend.make_training_variables(self, iterator, training=name == "train")
            if name != "train" and self._settled_at != look.steps:
                self.settle(phase)
                object.__setattr__(self, "_settled_at", look.steps)
            key = phase, 0 if name == "train" else self.inference_version
            with assuming(phase, layers):
                if key in functions:
                    return functions[key](iterator)
                functions[key] = backend.without_warnings(make(force=True))
                setattr(self, attribute, function)
                with backend.without_collection():  # It is traced.
                    return functions[key](iterator)

        setattr(self, attribute, function)
        return function


def check_started(model: Any) -> None:
    """Raises a `ValueError` if ranges that training learns have none to start from."""
    learned = [
        each for layer in scheduled_layers(model) for each in layer.quantizers if each.learns
    ]
    blind = [each for each in learned if not each.is_calibrated()]
    if blind:
        raise ValueError(
            f"{len(blind)} ranges of '{model.name}' are learned, and have none to start from. Call "
            f"keras_qat.calibrate(model, data, method='mse') before training."
        )


def phase_finder(model: Any) -> PhaseFinder:
    """The one of a model: there is one for each, as it is traced."""
    if getattr(model, "_phase_finder", None) is None:  # Past Keras, which would track it.
        object.__setattr__(model, "_phase_finder", PhaseFinder(model))
    return model._phase_finder


class PhaseFinder:
    """Says which phase all layers of a model will be in during the next execution.

    It looks at the layers' weights each time, so it does not matter how they were set.
    """

    steps: int = -1
    """The training steps of all layers together, as last seen."""

    def __init__(self, model: Any) -> None:
        layers = list(scheduled_layers(model))
        self._model = model
        self._has_layers = bool(layers)
        self._most_calls = max((len(layer.inbound_nodes) for layer in layers), default=0)

        @backend.traced_in_time
        def counters() -> Any:
            names = ("step", "quantize_from", "freeze_from")
            step, *rest = (tf.stack([getattr(layer, name) for layer in layers]) for name in names)
            return [step, *thresholds_in(*rest).values()]

        @backend.traced_in_time
        def all_calibrated() -> Any:
            calibrated = [each.is_calibrated() for layer in layers for each in layer.quantizers]
            return tf.reduce_all(tf.stack([True, *calibrated]))

        @backend.traced_in_time
        def ranges() -> Any:
            quantizers = [each for layer in layers for each in layer.quantizers if not each.learns]
            observers = [observer for each in quantizers for observer in each.observers]
            found = [each for observer in observers for each in getattr(observer, "variables", ())]
            return tf.stack([0.0, *found])

        self._counters, self._all_calibrated, self._ranges = counters, all_calibrated, ranges
        self._is_calibrated = False
        self._last = b""
        self.known: list[bytes] = []

    def __call__(self, training: bool, changed: bool = True) -> Phase | None:
        """The phase; None if layers differ, or if a phase ends within the execution.

        Args:
            training: whether a training step follows.
            changed: whether ranges may have changed since the last call other than by training.
        """
        if not self._has_layers:  # The recipe has found nothing to quantize.
            return Phase(training, True, True, True)
        done, *thresholds = (each.numpy() for each in self._counters())
        steps, self.steps = self.steps, int(done.sum())
        next_step = done + training
        steps_per_execution = backend.steps_per_execution(self._model)
        last_step = done + self._most_calls * steps_per_execution * training
        gates: list[bool] = []
        for threshold in thresholds:
            if np.all(next_step >= threshold):
                gates.append(True)
            elif np.all(last_step < threshold):
                gates.append(False)
            else:
                return None
        quantizing, frozen, fixed = gates
        if training and fixed:
            return Phase(training, quantizing, frozen, *self._fixed_ranges())
        if not training and (changed or steps != self.steps):
            self._is_calibrated = bool(self._all_calibrated())
        # A training step that observes does so before it quantizes.
        return Phase(training, quantizing, frozen, training or self._is_calibrated, fixed)

    def _fixed_ranges(self) -> tuple[bool, bool, int]:
        """What a `Phase` says of ranges that training leaves as they are, but others may change."""
        ranges = self._ranges().numpy().tobytes()
        if ranges != self._last:
            self._last, self._is_calibrated = ranges, bool(self._all_calibrated())
            is_new = ranges not in self.known and len(self.known) < MOST_RANGES
            is_alone = self._model.distribute_strategy.num_replicas_in_sync == 1
            if is_new and is_alone and self._is_calibrated:
                self.known.append(ranges)
        known = self.known.index(ranges) + 1 if ranges in self.known else 0
        return self._is_calibrated, True, known
