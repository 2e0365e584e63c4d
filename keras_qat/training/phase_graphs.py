"""Traces a separate graph for each phase of training.

A phase says whether layers quantize, and whether statistics and ranges are frozen. A graph for all
phases would need `tf.cond` in every layer, and would take several times longer to trace. Therefore
`fit`, `evaluate` and `predict` call a graph for the phase of the next step. Only custom training
loops use a graph for all phases.

A graph with a switch is for two phases: before and after a change, such as the start of
quantization. It computes the results of both phases, and a variable selects one.
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
from keras_qat.training.calibration.data_checks import explain_array_doubt, explain_range_doubt
from keras_qat.training.calibration.lost_values import explain_losses
from keras_qat.training.fake_quantization.observers import LastValue
from keras_qat.training.fake_quantization.phase import NEVER, Phase
from keras_qat.training.readiness import check_settings
from keras_qat.training.schedule import check_process, list_quantizers, list_scheduled_layers
from keras_qat.training.scheduled_layer import ScheduledLayer, assuming, split_thresholds
from keras_qat.training.steps.custom_training import is_undisturbed
from keras_qat.training.steps.optimizers import check_optimizer, join_updates

FIRST_STEPS = 300
"""A graph with a switch is slower, but saves tracing a second graph. It is used until 300 steps
after a change. The change must be in the first 300 steps, or freeze ranges."""

SMALL_NORMS = 2**15
"""A graph with a switch computes each BatchNormalization twice, with the batch's statistics and
with the moving statistics. Such a graph is only used if all BatchNormalizations together compute
fewer values per example than this. In larger models, the second computation takes too long."""

SWITCHED = "by a variable"
"""Value of a field of `Phase` in a graph with a switch. A variable then decides the value."""

MOST_RANGES = 3
"""Maximum number of graphs with frozen ranges as constants. Changed ranges need another graph."""

Step = Callable[[Any], Any]
"""A function such as `Model.train_function`, which computes the next batches of an iterator."""


class PhasedModel:
    """A Keras model that traces its functions once for each phase."""

    _checked_data: bool = False
    _phase_finder: PhaseFinder | None = None
    undisturbed: bool = False
    """True while `fit` runs, if no code of the user can change weights between training steps."""
    _settled_at: int | None = None
    """`PhaseFinder.steps` at the last call of `settle`, or None to call `settle` again."""

    def make_train_function(self, force: bool = False) -> Step:
        return self._make_phased("train", super().make_train_function, force)  # type: ignore[misc]

    def make_test_function(self, force: bool = False) -> Step:
        return self._make_phased("test", super().make_test_function, force)  # type: ignore[misc]

    def make_predict_function(self, force: bool = False) -> Step:
        return self._make_phased("predict", super().make_predict_function, force)  # type: ignore[misc]

    def reset_metrics(self) -> None:
        """Resets metrics, and forgets the phase. `fit` calls this when an epoch begins."""
        self._forget_phase()
        super().reset_metrics()  # type: ignore[misc]

    def _forget_phase(self) -> None:
        if self._phase_finder is not None:
            self._phase_finder.forget()

    def fit(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains like `keras.Model.fit`, and warns about data outside the model's ranges.

        The first call also warns about data that do not fit the model, and about features that are
        too small for the range of the input.
        """
        given = kwargs.get("callbacks", args[4] if len(args) > 4 else None)
        given = tf.nest.flatten(getattr(given, "callbacks", given))
        callbacks = [callback for callback in given if callback is not None]
        for callback in callbacks:
            if isinstance(callback, type):
                name = callback.__name__
                raise TypeError(f"callbacks=[{name}] contains a class. Pass {name}(...).")
        is_first = not self._checked_data
        reason = explain_array_doubt(self, x) if is_first else ""
        object.__setattr__(self, "_checked_data", True)
        if reason:
            warn_caller(reason)
        check_settings(self)
        with backend.swap_attributes(self, undisturbed=is_undisturbed(self, x, callbacks)):
            history = super().fit(x, *args, **kwargs)  # type: ignore[misc]
        strategy = self.distribute_strategy  # type: ignore[attr-defined]
        if not reason and (excess := explain_range_doubt(self, x)):
            warn_caller(excess)
        elif is_first and not reason and strategy.num_replicas_in_sync == 1:
            for lost in explain_losses(read_model(self)):
                warn_caller(lost)
        return history

    def settle(self, phase: Phase | None) -> None:
        """For subclasses: called before inference if weights may have changed."""

    def choose_inference(self, phase: Phase | None) -> tuple[int, bool]:
        """For subclasses: returns a key. There is one inference graph for each phase and key."""
        return 0, False

    def _make_phased(self, name: str, make: Callable[..., Step], force: bool) -> Step:
        """Return a train, test or predict function that runs the graph of the current phase."""
        attribute = f"{name}_function"
        trains = name == "train"
        check_process(self)
        if trains:
            check_learned_ranges(self)
            check_optimizer(self, self.trainable_variables)  # type: ignore[attr-defined]
            self._forget_phase()
        object.__setattr__(self, "_settled_at", None)  # `fit`, `evaluate` or `predict` begins.
        if getattr(self, attribute) is not None and not force:
            return getattr(self, attribute)
        finder, layers = get_phase_finder(self), list(list_scheduled_layers(self))
        functions: dict[tuple[Phase | None, int, bool], Step] = {}

        def run(iterator: Any) -> Any:
            if trains:
                phase = finder.find_next(iterator, self.undisturbed)
            else:
                phase = finder(False, changed=self._settled_at is None)
            if phase is not None and not phase.calibrated:
                show_once(
                    f"Quantizers of '{self.name}' have seen no data yet, so they do not round. "  # type: ignore[attr-defined]
                    f"For int8 results, train it, or call keras_qat.calibrate(model, data)."
                )
            if not functions and name != "predict":
                with backend.create_quickly():
                    backend.make_training_variables(self, iterator, training=trains)
            if not trains and self._settled_at != finder.steps:
                with backend.create_quickly():  # `settle` may trace a graph.
                    self.settle(phase)
                object.__setattr__(self, "_settled_at", finder.steps)
            key = phase, *((0, False) if trains else self.choose_inference(phase))
            with assuming(finder.insert_switches(phase), layers):
                if key in functions:
                    return functions[key](iterator)
                if trains:
                    check_frozen_ranges(self)
                functions[key] = backend.silence_retracing(make(force=True))
                setattr(self, attribute, run)
                optimizer = self.optimizer if trains else None  # type: ignore[attr-defined]
                with backend.create_quickly(), join_updates(optimizer):
                    return functions[key](iterator)  # The first call traces a graph.

        setattr(self, attribute, run)
        return run


def check_learned_ranges(model: keras.Model) -> None:
    """Raises a `ValueError` if learned ranges have no initial values."""
    blind = [x for x in list_quantizers(model) if x.learns and not x.is_calibrated()]
    if blind:
        raise ValueError(
            f"'{model.name}' has {pluralize(len(blind), 'learned range')} without an initial "
            f"value. Call keras_qat.calibrate(model, data, method='mse') before training."
        )


def check_frozen_ranges(model: keras.Model) -> None:
    """Raises a `ValueError` if ranges are frozen before any data was observed."""
    if not all(
        layer.step.numpy() + 1 >= layer.thresholds()["freeze_ranges_from"].numpy()
        for layer in list_scheduled_layers(model)
    ):
        return
    observing = [quantizer for quantizer in list_quantizers(model) if quantizer.observers]
    if observing and not any(quantizer.is_calibrated() for quantizer in observing):
        raise ValueError(
            f"The ranges of '{model.name}' are frozen from the first step on, but have seen no "
            f"data. Call keras_qat.calibrate(model, data) before training, or freeze them later, "
            f"as with FreezeRanges(1_000)."
        )


def _can_switch_weights(layer: ScheduledLayer) -> bool:
    """Return True if the layer's weights can be quantized in a graph with a switch."""
    return getattr(layer, "fold", "per_channel") == "per_channel" and all(
        quantizer.observer is None and quantizer.learned is None
        for quantizer in layer.weight_quantizers.values()
    )


def _can_normalize_twice(layers: Iterable[ScheduledLayer]) -> bool:
    """Return True if all BatchNormalizations are small enough for a switch (`SMALL_NORMS`)."""
    size = 0
    for layer in layers:
        for norm in (getattr(layer, name, None) for name in ("layer", "batch_norm")):
            if isinstance(norm, keras.layers.BatchNormalization):
                is_plain = type(norm) is keras.layers.BatchNormalization
                if layer.fold != "per_channel" or not is_plain or norm.renorm:
                    return False
                size += layer.get_output_at(0).shape[1:].num_elements() or SMALL_NORMS
    return size < SMALL_NORMS


def count_alike(counters: Iterable[tuple[int, ...]], most_steps: int) -> int:
    """Returns how many of the next executions are certain to have the same phase.

    An execution is a call of the train function. It has `steps_per_execution` training steps.

    Args:
        counters: for each layer, the number of training steps so far, followed by the first steps
            of quantization, frozen statistics and frozen ranges.
        most_steps: the maximum number of steps that a layer counts in one execution.
    """
    changes = (
        change - step
        for step, *starts in counters
        for start in starts
        for change in (start - most_steps, start - 1, start - 1 + FIRST_STEPS)
        if change > step
    )
    return (min(changes, default=NEVER) - 1) // most_steps


def get_phase_finder(model: keras.Model) -> PhaseFinder:
    if getattr(model, "_phase_finder", None) is None:  # Keras does not track it.
        object.__setattr__(model, "_phase_finder", PhaseFinder(model))
    return model._phase_finder


class PhaseFinder:
    """Finds the phase of the next call of a model's train, test or predict function.

    Phases depend on weights of the layers, which any code may set. Therefore the weights are read
    before each call. If `fit` runs without code of the user, most reads are left out, because
    reading from a GPU waits for the end of a step.
    """

    steps: int = -1
    """The sum of all layers' training steps when the weights were read last."""

    def __init__(self, model: keras.Model) -> None:
        layers, quantizers = list(list_scheduled_layers(model)), list_quantizers(model)
        observers = [observer for x in quantizers if not x.learns for observer in x.observers]
        self._model = model
        self._layers = layers
        self._ends = [len(x.variables) for x in observers if isinstance(x, LastValue)]
        self._most_calls = max((len(layer.inbound_nodes) for layer in layers), default=0)

        def make_reader(read: Callable[[], list[Any]]) -> Callable[[], tf.Tensor]:
            return backend.trace_after_few_calls(lambda: tf.stack(read()))

        self._counters = make_reader(lambda: [w for layer in layers for w in layer.switches])
        self._calibrated = make_reader(lambda: [True, *(x.is_calibrated() for x in quantizers)])
        self._ranges = make_reader(lambda: [0.0, *(v for x in observers for v in x.variables)])
        self._learns = any(quantizer.learns for quantizer in quantizers)
        self._can_switch = {
            "quantizing": all(map(_can_switch_weights, layers)),
            "frozen": _can_normalize_twice(layers),
            "fixed": True,
        }
        with tf.init_scope():
            self._switches = {
                name: tf.Variable(False, trainable=False) for name in self._can_switch
            }
        self._is_calibrated = False
        self._gates: dict[str, Any] = {}
        """`quantizing`, `frozen` and `fixed` of the last training phase: bools or `SWITCHED`."""
        self._last = b""
        self.known: list[bytes] = []
        self._phase: Phase | None = None
        self._executions_alike = 0
        self._found_for: Any = None

    def forget(self) -> None:
        """Makes the next step read the weights again."""
        self._found_for = None

    def find_next(self, batches: Any, undisturbed: bool) -> Phase | None:
        """Returns the phase of the next training execution.

        Args:
            batches: the iterator over the data.
            undisturbed: True if no code of the user runs between training steps. Weights are then
                read less often.
        """
        found_for = batches, sum(layer.changes for layer in self._layers)
        if undisturbed and self._found_for == found_for and self._executions_alike > 0:
            self._executions_alike -= 1
            return self._phase
        self._found_for, self._phase = found_for, self(True)
        return self._phase

    def __call__(self, training: bool, changed: bool = True) -> Phase | None:
        """Returns the phase of the next execution. Returns None if steps or layers differ in phase.

        For example, quantization may begin in the middle of `steps_per_execution` steps.

        Args:
            training: True if the execution trains.
            changed: True if anything except training may have changed ranges since the last call.
        """
        if not self._layers:  # The recipe quantizes nothing.
            return Phase(training, True, True, True)
        step, *weights = self._counters().numpy().reshape(-1, 3).T
        steps, self.steps = self.steps, int(step.sum())
        counters = np.stack([step, *split_thresholds(*weights).values()], axis=1)
        states = set(map(tuple, counters.tolist()))  # One element if layers agree.
        most_steps = self._most_calls * backend.get_steps_per_execution(self._model) * training
        self._executions_alike = count_alike(states, most_steps) if training else 0
        gates: dict[str, Any] = {}
        begun: list[str] = []
        for index, name in enumerate(self._can_switch, 1):
            distances = [(state[0] - state[index], state[index]) for state in states]
            has_begun = all(distance + training >= 0 for distance, _ in distances)
            if not has_begun and not all(distance + most_steps < 0 for distance, _ in distances):
                return None
            gates[name] = has_begun
            begun += [name] * has_begun
            if training and self._is_switched(name, distances, has_begun):
                gates[name] = SWITCHED
                self._switches[name].assign(has_begun)
        if training and gates != self._gates:  # Another graph needs no switch for past changes.
            self._gates = gates = gates | dict.fromkeys(begun, True)
        quantizing, frozen, fixed = gates.values()
        if training and fixed is True:
            return Phase(training, quantizing, frozen, *self._find_fixed_ranges())
        if not training and (changed or steps != self.steps):
            self._is_calibrated = bool(np.all(self._calibrated()))
        # A training step always has ranges, because it observes before it quantizes.
        return Phase(training, quantizing, frozen, training or self._is_calibrated, fixed)

    def insert_switches(self, phase: Phase | None) -> Phase | None:
        if phase is None:
            return None
        switches = {n: v for n, v in self._switches.items() if getattr(phase, n) == SWITCHED}
        return phase._replace(**switches)

    def _is_switched(self, name: str, distances: list[tuple[int, int]], has_begun: bool) -> bool:
        """Return True if the next step uses a graph with a switch for the field `name` of `Phase`.

        Args:
            name: "quantizing", "frozen" or "fixed".
            distances: for each layer, the steps since the change (negative before it), and the
                step of the change.
            has_begun: True if the change has happened in all layers.
        """
        if self._learns or self._model.distribute_strategy.num_replicas_in_sync > 1:
            return False
        if not self._can_switch[name]:
            return False
        last = NEVER - 1 if name == "fixed" else FIRST_STEPS
        if not all(1 < start <= last and since + 1 < FIRST_STEPS for since, start in distances):
            return False
        return not (name == "fixed" and has_begun and self._has_empty_range())

    def _has_empty_range(self) -> bool:
        values, starts = self._ranges().numpy(), np.cumsum([1, *self._ends])[:-1]
        return bool(np.any(values[starts] == values[starts + 1]))

    def _find_fixed_ranges(self) -> tuple[bool, bool, int]:
        ranges = self._ranges().numpy().tobytes()
        if ranges != self._last:
            self._last, self._is_calibrated = ranges, bool(np.all(self._calibrated()))
            is_new = ranges not in self.known and len(self.known) < MOST_RANGES
            is_alone = self._model.distribute_strategy.num_replicas_in_sync == 1
            if is_new and is_alone and self._is_calibrated:
                self.known.append(ranges)
        known = self.known.index(ranges) + 1 if ranges in self.known else 0
        return self._is_calibrated, True, known
