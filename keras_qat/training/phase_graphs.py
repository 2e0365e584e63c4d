"""A graph of its own for each phase of training that a model goes through.

In a graph for all phases every layer would branch, on whether it quantizes yet and whether its
BatchNormalization is frozen. Such a graph takes several times longer to trace and to optimize than
the float model's. `fit`, `evaluate` and `predict` know the phase beforehand, so each phase gets a
graph without branches. Custom training loops branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.read_model import read_model
from keras_qat.keras2 import backend
from keras_qat.keras2.backend import keras
from keras_qat.messages import pluralize, show_once, warn_caller
from keras_qat.training.calibration.data_checks import doubt_of_arrays, doubt_of_ranges
from keras_qat.training.calibration.lost_values import lost_parts
from keras_qat.training.fake_quantization.observers import LastValue
from keras_qat.training.fake_quantization.phase import NEVER, Phase, is_exact
from keras_qat.training.first_batch import FirstBatch, first_batch_of
from keras_qat.training.readiness import check_settings
from keras_qat.training.schedule import check_process, quantizers_in, scheduled_layers
from keras_qat.training.scheduled_layer import assuming, thresholds_in
from keras_qat.training.steps.between_steps import is_undisturbed
from keras_qat.training.steps.optimizers import SharedUpdate, check_optimizer

FIRST_STEPS = 300
"""Steps that a graph for both sides of a change serves behind the change, if it did before.

Such a step observes ranges that are frozen, or quantizes in vain during a delay of no more steps.
It takes a little longer, which for so many steps is less than tracing another graph."""

FEW_NUMBERS = 2**15
"""Numbers of an example that BatchNormalization computes, at most, if it does so in both ways.

A step of a small model takes a little longer then, and one of a large model much longer."""

SWITCHED = "by a variable"
"""What a `Phase` says of a state that changes, in a graph for both sides of the change."""

MOST_RANGES = 3
"""Sets of frozen ranges that get a training step of their own, at most."""


class PhasedModel:
    """A Keras model that traces its functions once for each phase that occurs."""

    def make_train_function(self, force: bool = False) -> Any:
        """Makes the function of `fit` and `train_on_batch`, as Keras documents it."""
        return self._phased("train", super().make_train_function, force)  # type: ignore[misc]

    def make_test_function(self, force: bool = False) -> Any:
        """Makes the function of `evaluate` and `test_on_batch`, as Keras documents it."""
        return self._phased("test", super().make_test_function, force)  # type: ignore[misc]

    def make_predict_function(self, force: bool = False) -> Any:
        """Makes the function of `predict` and `predict_on_batch`, as Keras documents it."""
        return self._phased("predict", super().make_predict_function, force)  # type: ignore[misc]

    def reset_metrics(self) -> None:
        """Resets metrics, as Keras documents it, which is how `fit` begins an epoch."""
        self._look_again()
        super().reset_metrics()  # type: ignore[misc]

    def _look_again(self) -> None:
        if self._phase_finder is not None:
            self._phase_finder.forget()

    _looked: bool = False
    _phase_finder: PhaseFinder | None = None
    _first_batch: FirstBatch | None = None
    undisturbed: bool = False
    """Whether this is `fit`, and only training changes weights between the steps of an epoch."""

    def fit(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as Keras documents it.

        The first call warns of arrays that do not fit the model, and of what its ranges lose.
        """
        given = kwargs.get("callbacks", args[4] if len(args) > 4 else None)
        given = tf.nest.flatten(getattr(given, "callbacks", given))
        callbacks = [callback for callback in given if callback is not None]
        for callback in callbacks:
            if isinstance(callback, type):
                name = callback.__name__
                raise TypeError(f"callbacks=[{name}]: make one of the class, {name}(...).")
        is_first = not self._looked
        reason = doubt_of_arrays(self, x) if is_first else ""
        object.__setattr__(self, "_looked", True)
        if reason:
            warn_caller(reason)
        check_settings(self)
        before = self.undisturbed
        object.__setattr__(self, "undisturbed", is_undisturbed(self, x, callbacks))
        try:
            history = super().fit(x, *args, **kwargs)  # type: ignore[misc]
        finally:
            object.__setattr__(self, "undisturbed", before)
            self._look_again()
        strategy = self.distribute_strategy  # type: ignore[attr-defined]
        if not reason and (excess := doubt_of_ranges(self, x)):
            warn_caller(excess)
        elif is_first and not reason and strategy.num_replicas_in_sync == 1:
            for lost in lost_parts(read_model(self)):
                warn_caller(lost)
        return history

    _settled_at: int | None = None
    """The number of training steps when inference last read the weights."""

    def settle(self, phase: Phase | None) -> None:
        """Prepares inference whenever the weights may have changed."""

    @property
    def inference_version(self) -> int:
        """A number that changes when functions traced for inference have to be traced anew."""
        return 0

    def _phased(self, name: str, make: Callable[..., Any], force: bool) -> Any:
        """Makes a function that runs Keras' function for the phase, which it makes on first use."""
        attribute = f"{name}_function"
        check_process(self)
        if name == "train":
            check_started(self)
            check_optimizer(self, self.trainable_variables)  # type: ignore[attr-defined]
            self._look_again()
        object.__setattr__(self, "_settled_at", None)  # `fit`, `evaluate` or `predict` begins.
        if getattr(self, attribute) is not None and not force:
            return getattr(self, attribute)
        look, layers = phase_finder(self), list(scheduled_layers(self))
        functions: dict[tuple[Phase | None, int], Any] = {}
        update = SharedUpdate()

        def function(iterator: Any) -> Any:
            if name == "train":
                phase = look.of_next_step(iterator, self.undisturbed)
            else:
                phase = look(False, changed=self._settled_at is None)
            if phase is not None and not phase.calibrated:
                show_once(
                    f"Quantizers of '{self.name}' have seen no data yet, and pass values through: "  # type: ignore[attr-defined]
                    f"train it, or call keras_qat.calibrate(model, data), to see what int8 gives."
                )
            if not functions and name != "predict":
                with backend.pause_garbage_collection():
                    backend.make_training_variables(self, iterator, training=name == "train")
            if name != "train" and self._settled_at is None and is_exact(phase):
                iterator = first_batch_of(self).look(name, iterator)
            if name != "train" and self._settled_at != look.steps:
                with backend.pause_garbage_collection():  # It may trace.
                    self.settle(phase)
                object.__setattr__(self, "_settled_at", look.steps)
            key = phase, 0 if name == "train" else self.inference_version
            with assuming(look.with_switches(phase), layers):
                if key in functions:
                    return functions[key](iterator)
                if name == "train":
                    check_frozen(self)
                functions[key] = backend.silence_retracing(make(force=True))
                setattr(self, attribute, function)
                optimizer = self.optimizer if name == "train" else None  # type: ignore[attr-defined]
                with backend.pause_garbage_collection(), update.of(optimizer):  # It is traced.
                    return functions[key](iterator)

        setattr(self, attribute, function)
        return function


def _selects(layer: keras.layers.Layer) -> bool:
    """Whether a layer's weights are quantized by one operation or two, with a gradient of ones."""
    return getattr(layer, "fold", "per_channel") == "per_channel" and all(
        quantizer.observer is None and quantizer.learned is None
        for quantizer in layer.weight_quantizers.values()
    )


def _normalizes_twice(layers: Iterable[Any]) -> bool:
    """Whether BatchNormalizations can be computed with both statistics, and in little time."""
    numbers = 0
    for layer in layers:
        parts = [getattr(layer, name, None) for name in ("layer", "batch_norm")]
        for norm in parts:
            if isinstance(norm, backend.keras.layers.BatchNormalization):
                is_plain = type(norm) is backend.keras.layers.BatchNormalization
                if layer.fold != "per_channel" or not is_plain or norm.renorm:
                    return False
                numbers += layer.get_output_at(0).shape[1:].num_elements() or FEW_NUMBERS
    return numbers < FEW_NUMBERS


def check_started(model: keras.Model) -> None:
    """Raises a `ValueError` if ranges that training learns have none to start from."""
    blind = [x for x in quantizers_in(model) if x.learns and not x.is_calibrated()]
    if blind:
        raise ValueError(
            f"'{model.name}' has {pluralize(len(blind), 'learned range')} with no data "
            f"to start from. Call keras_qat.calibrate(model, data, method='mse') before training."
        )


def check_frozen(model: keras.Model) -> None:
    """Raises a `ValueError` if ranges are frozen from the next step on, and none has seen data."""
    if not all(
        layer.step.numpy() + 1 >= layer.thresholds()["freeze_ranges_from"].numpy()
        for layer in scheduled_layers(model)
    ):
        return
    observing = [quantizer for quantizer in quantizers_in(model) if quantizer.observers]
    if observing and not any(quantizer.is_calibrated() for quantizer in observing):
        raise ValueError(
            f"The ranges of '{model.name}' are frozen from the first step on, but have seen no "
            f"data. Call keras_qat.calibrate(model, data) before training, or freeze them later, "
            f"as with FreezeRanges(1_000)."
        )


def executions_alike(counters: Iterable[tuple[int, ...]], most_steps: int) -> int:
    """Returns how many executions after this one are in its phase, at least.

    Args:
        counters: of each layer, its training steps so far and the thresholds.
        most_steps: the most training steps that a layer counts in an execution.
    """
    changes = (
        change - step
        for step, *starts in counters
        for start in starts
        for change in (start - most_steps, start - 1, start - 1 + FIRST_STEPS)
        if change > step
    )
    return (min(changes, default=NEVER) - 1) // most_steps


def phase_finder(model: keras.Model) -> PhaseFinder:
    """Returns the `PhaseFinder` of a model, which has only one, as its functions are traced."""
    if getattr(model, "_phase_finder", None) is None:  # Past Keras, which would track it.
        object.__setattr__(model, "_phase_finder", PhaseFinder(model))
    return model._phase_finder


class PhaseFinder:
    """Tells which phase all layers of a model will be in during the next execution.

    It reads the layers' weights each time, so it does not matter how they were set. Only between
    steps of `fit` it does not, as a GPU would have to finish a step before it can be read.
    """

    steps: int = -1
    """The sum of all layers' training steps when they were last read."""

    def __init__(self, model: keras.Model) -> None:
        layers, quantizers = list(scheduled_layers(model)), quantizers_in(model)
        self._model = model
        self._layers = layers
        self._most_calls = max((len(layer.inbound_nodes) for layer in layers), default=0)

        @backend.trace_after_few_calls
        def counters() -> Any:
            return tf.stack([weight for layer in layers for weight in layer.switches])

        @backend.trace_after_few_calls
        def all_calibrated() -> Any:
            return tf.reduce_all(tf.stack([True, *(x.is_calibrated() for x in quantizers)]))

        @backend.trace_after_few_calls
        def ranges() -> Any:
            observers = [observer for x in quantizers if not x.learns for observer in x.observers]
            variables = [v for observer in observers for v in observer.variables]
            return tf.stack([0.0, *variables])

        @backend.trace_after_few_calls
        def has_empty() -> Any:
            known = (observer for x in quantizers for observer in x.observers)
            ends = [(x.minimum, x.maximum) for x in known if isinstance(x, LastValue)]
            low, high = tf.unstack(tf.stack([(0.0, 1.0), *ends]), axis=1)
            return tf.reduce_any(low == high)

        self._counters, self._all_calibrated, self._ranges = counters, all_calibrated, ranges
        self._has_empty = has_empty
        self._learns = any(quantizer.learns for quantizer in quantizers)
        selects = all(_selects(layer) for layer in layers)
        self._selects = {"quantizing": selects, "frozen": _normalizes_twice(layers), "fixed": True}
        with tf.init_scope():
            self._switches = {name: tf.Variable(False, trainable=False) for name in self._selects}
        self._switched_on = dict.fromkeys(self._switches, False)
        self._is_calibrated = False
        self._last = b""
        self.known: list[bytes] = []
        self._phase: Phase | None = None
        self._executions_alike = 0
        self._asked_for: Any = None

    def forget(self) -> None:
        """Reads weights before the next step, whatever the last one knew."""
        self._asked_for = None

    def of_next_step(self, batches: Any, undisturbed: bool) -> Phase | None:
        """Returns the phase of the next training execution.

        Args:
            batches: the iterator that it takes data from.
            undisturbed: whether only training changes weights since the last execution with the
                same iterator, but for those that call `forget` or `set_thresholds`.
        """
        asked_for = batches, sum(layer.changes for layer in self._layers)
        if undisturbed and self._asked_for == asked_for and self._executions_alike > 0:
            self._executions_alike -= 1
            return self._phase
        self._asked_for, self._phase = asked_for, self(True)
        return self._phase

    def __call__(self, training: bool, changed: bool = True) -> Phase | None:
        """Returns the phase; None if layers differ, or if a phase ends within the execution.

        Args:
            training: whether the execution trains.
            changed: whether anything but training may have changed ranges since the last call.
        """
        if not self._layers:  # The recipe quantizes nothing.
            return Phase(training, True, True, True)
        step, *weights = self._counters().numpy().reshape(-1, 3).T
        steps, self.steps = self.steps, int(step.sum())
        counters = np.stack([step, *thresholds_in(*weights).values()], axis=1)
        states = set(map(tuple, counters.tolist()))  # One, unless layers differ.
        most_steps = self._most_calls * backend.get_steps_per_execution(self._model) * training
        self._executions_alike = executions_alike(states, most_steps) if training else 0
        gates: dict[str, Any] = {}
        for index, name in enumerate(("quantizing", "frozen", "fixed"), 1):
            distances = [(state[0] - state[index], state[index]) for state in states]
            is_behind = all(distance + training >= 0 for distance, _ in distances)
            if not is_behind and not all(distance + most_steps < 0 for distance, _ in distances):
                return None
            gates[name] = is_behind
            if training and self._is_switched(name, distances, is_behind):
                gates[name] = SWITCHED
                if self._switched_on[name] != is_behind:
                    self._switches[name].assign(is_behind)
                    self._switched_on[name] = is_behind
        quantizing, frozen, fixed = gates.values()
        if training and fixed is True:
            return Phase(training, quantizing, frozen, *self._fixed_ranges())
        if not training and (changed or steps != self.steps):
            self._is_calibrated = bool(self._all_calibrated())
        # A training step observes ranges before it quantizes, so it always has them.
        return Phase(training, quantizing, frozen, training or self._is_calibrated, fixed)

    def with_switches(self, phase: Phase | None) -> Phase | None:
        """Returns a phase that holds variables where it says `SWITCHED`."""
        if phase is None:
            return None
        switches = {n: v for n, v in self._switches.items() if getattr(phase, n) == SWITCHED}
        return phase._replace(**switches)

    def _is_switched(self, name: str, distances: list[tuple[int, int]], is_behind: bool) -> bool:
        """Whether a variable tells if a step is behind a threshold, before it and a while after.

        Args:
            name: the state that changes.
            distances: training steps since the threshold of each layer, and the threshold.
            is_behind: whether the step is behind all of them.
        """
        if self._learns or self._model.distribute_strategy.num_replicas_in_sync > 1:
            return False
        if not self._selects[name]:
            return False
        last = NEVER - 1 if name == "fixed" else FIRST_STEPS
        if not all(1 < start <= last and since + 1 < FIRST_STEPS for since, start in distances):
            return False
        return not (name == "fixed" and is_behind and bool(self._has_empty()))

    def _fixed_ranges(self) -> tuple[bool, bool, int]:
        """Returns `calibrated`, `fixed` and `known` of a `Phase` with frozen ranges."""
        ranges = self._ranges().numpy().tobytes()
        if ranges != self._last:
            self._last, self._is_calibrated = ranges, bool(self._all_calibrated())
            is_new = ranges not in self.known and len(self.known) < MOST_RANGES
            is_alone = self._model.distribute_strategy.num_replicas_in_sync == 1
            if is_new and is_alone and self._is_calibrated:
                self.known.append(ranges)
        known = self.known.index(ranges) + 1 if ranges in self.known else 0
        return self._is_calibrated, True, known
