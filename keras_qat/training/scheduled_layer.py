"""The base class of quantize-aware layers, which know when to quantize and when to freeze.

Each layer counts its own training steps and compares them with thresholds. Both are weights, so
the change happens inside the training graph, at the exact step however many steps Keras runs per
execution, and a reloaded model continues where it was.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_qat.arithmetic.control_flow import Switch, cond
from keras_qat.keras2 import backend
from keras_qat.keras2.readability import is_graph_model
from keras_qat.messages import show_once
from keras_qat.training.fake_quantization.phase import NEVER, Flag, Phase
from keras_qat.training.steps import step_tensors

if TYPE_CHECKING:
    from keras_qat.training.fake_quantization.activation_quantizer import ActivationQuantizer
    from keras_qat.training.fake_quantization.weight_quantizer import WeightQuantizer

_RANGES = 2**31
"""The weight `freeze_from` holds two thresholds: this times that of ranges, plus its own.

A weight for each would be ordinary, but `.h5` files of version 0.1.0 lack it, and Keras refuses
files with another number of weights before a layer is asked. `thresholds_in` takes them apart.
"""


def thresholds_in(quantize_from: Any, freeze_from: Any) -> dict[str, Any]:
    """Returns the thresholds that the weights of a layer, or of several, hold.

    The weights are tensors or arrays; what is returned is of the same kind.
    """
    ranges = freeze_from % NEVER // _RANGES
    return {
        "quantize_from": quantize_from,
        "freeze_from": freeze_from - ranges * _RANGES,
        "freeze_ranges_from": ranges - (ranges - 1) // _RANGES * NEVER,  # NEVER for 0.
    }


@contextlib.contextmanager
def assuming(phase: Phase | None, layers: Iterable[ScheduledLayer]) -> Iterator[None]:
    """Runs a block in which all calls of `layers` are in `phase`, or in any phase if None.

    Graphs that are traced inside have no branches for other phases.
    """
    for layer in layers:
        object.__setattr__(layer, "assumed", phase)  # Past Keras, which would track the tuple.
    try:
        yield
    finally:
        for layer in layers:
            object.__setattr__(layer, "assumed", None)


_shapes_only: ContextVar[bool] = ContextVar("shapes only", default=False)


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Runs a block in which calls of layers on symbolic tensors only compute shapes.

    Keras would trace every layer, which takes most of the time of building a model.
    """
    token = _shapes_only.set(True)
    try:
        yield
    finally:
        _shapes_only.reset(token)


def shapes_are_enough() -> bool:
    """Whether the caller is within `shapes_only`."""
    return _shapes_only.get()


def tell_of_plain_model(recipe: Any, training: Flag | None) -> None:
    """Tells that the model around a call is a plain one, whose file would differ from it.

    Args:
        recipe: the recipe of the quantization-aware layer or model that is called.
        training: the argument of the call.
    """
    model, of_model = backend.find_calling_layer()
    if not is_graph_model(model) or hasattr(type(model), "exact_inference"):
        return
    is_inference = (of_model if training is None else training) in (None, False)
    if is_inference and getattr(recipe, "fold", "") != "correction" and not backend.is_building():
        show_once(
            f"Keras made '{model.name}' of quantization-aware layers: it predicts as training "
            f"simulates quantization, and its file may return values that are a step off. "
            f"keras_qat.quantize_model({model.name}) returns a copy that predicts what the file "
            f"returns."
        )


class ScheduledLayer(backend.keras.layers.Layer):
    """A layer that knows the training step.

    Its weights are `step`, the number of training steps so far; `quantize_from`, the first step
    (counted from 1) that quantizes; and `freeze_from`, the first step with BatchNormalization's
    moving statistics. The latter also holds the first step with frozen ranges: see `_RANGES`.

    It computes in float32; the layers inside follow their own dtype policies.

    Args:
        mixed: whether the model computes in half precision. Training then skips steps with
            infinity or NaN, and ranges must not observe them.
    """

    recipe: Any = None
    """The recipe of the model that it was made for, for models that users make of its layers."""
    made_for: Callable[[], Any] | None = None
    """A weak reference to that model."""
    make_exact: Callable[[Any], None]
    """Makes a model that users made of such layers predict what its file computes."""
    made_in: int = 0
    """The id of the process that made its weights."""
    weight_quantizers: Mapping[str, WeightQuantizer] = MappingProxyType({})
    """The quantizers of the weights inside, by the paths of the weights."""
    changes: int = 0
    """How often thresholds have been set."""
    assumed: Phase | None = None
    """The phase of all calls, if known. No thread local: replicas run in threads of their own."""

    def __init__(self, mixed: bool = False, **kwargs: Any) -> None:
        super().__init__(autocast=False, **kwargs)
        self.mixed = mixed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tell_of_plain_model(self.recipe, kwargs.get("training"))
        return super().__call__(*args, **kwargs)

    def call(self, inputs: tf.Tensor, training: Flag | None = None, **kwargs: Any) -> Any:
        kwargs.pop("mask", None)  # Keras passes it to calls with **kwargs.
        if _shapes_only.get():
            with tf.init_scope():  # Keras computes the shapes of custom layers in eager mode.
                shapes = tf.nest.map_structure(lambda x: x.shape, inputs)
                shape = self.compute_output_shape(shapes)
            return tf.raw_ops.Placeholder(dtype=self.output_dtype(inputs), shape=shape)
        return self.compute(inputs, training, **kwargs)

    def output_dtype(self, inputs: tf.Tensor) -> Any:
        """Returns the type of the output."""
        return inputs.dtype

    def build(self, input_shape: tf.TensorShape) -> None:
        self.made_in = os.getpid()
        self.step = backend.add_scalar(self, "step", 0, "int64")
        self.quantize_from = backend.add_scalar(self, "quantize_from", 0, "int64")
        self.freeze_from = backend.add_scalar(self, "freeze_from", NEVER, "int64")
        super().build(input_shape)

    def thresholds(self) -> dict[str, Any]:
        """Returns the first step of each change, as tensors."""
        return thresholds_in(self.quantize_from.read_value(), self.freeze_from.read_value())

    def set_thresholds(self, **thresholds: int) -> None:
        """Sets some thresholds; the others stay."""
        if "quantize_from" in thresholds:
            self.quantize_from.assign(thresholds["quantize_from"])
        if not thresholds.keys() <= {"quantize_from"}:
            before = self.freeze_from.read_value()
            ranges = before % NEVER // _RANGES * _RANGES
            norm = before - ranges
            if (step := thresholds.get("freeze_ranges_from")) is not None:
                ranges = min(max(step, 1), _RANGES - 1) * _RANGES if step < NEVER else 0
            if (step := thresholds.get("freeze_from")) is not None:
                norm = min(step, _RANGES - 1) if step < NEVER else NEVER
            self.freeze_from.assign(ranges + norm)
        self.changes += 1  # Last: who sees it reads what was set.

    @property
    def switches(self) -> list[Any]:
        """The weights that decide the phase of a call."""
        return [self.step, self.quantize_from, self.freeze_from]

    @property
    def quantizers(self) -> list[ActivationQuantizer]:
        """The layer's activation quantizers."""
        return []

    def weights_to_stack(self) -> Iterator[tuple[WeightQuantizer, Any]]:
        """Yields weights that this step quantizes, and that others can be quantized beside."""
        yield from ()

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **({"mixed": True} if self.mixed else {})}

    def _next_step(self) -> Any:
        step = step_tensors.current().steps.pop(self, None)
        if step is None:
            return self.step.assign_add(1, read_value=True)
        self.step.assign(step, read_value=False)
        return step

    def advance(self, training: Flag | None) -> Phase:
        """Counts the step if this is training, and returns the phase of the call."""
        training = backend.resolve_training(training)
        known = self.assumed
        if known is not None and known.training is not training:
            known = None
        if known is not None and training is False:
            return known
        step = cond(training, self._next_step, self.step.read_value)
        if known is not None:
            value = step_tensors.current().value
            quantizing, frozen, fixed = (
                state if isinstance(state, bool) else Switch(value(state))
                for state in (known.quantizing, known.frozen, known.fixed)
            )
            return known._replace(quantizing=quantizing, frozen=frozen, fixed=fixed)
        starts = self.thresholds()
        return Phase(
            training,
            step >= starts["quantize_from"],
            step >= starts["freeze_from"],
            fixed=step >= starts["freeze_ranges_from"],
        )
