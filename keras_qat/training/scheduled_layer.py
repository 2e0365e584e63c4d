"""The base class of quantize-aware layers, which begin to quantize and to freeze at given steps.

Each layer counts training steps, and compares the count with the steps at which changes begin (the
thresholds). All these numbers are weights. Therefore changes happen at the exact step, even with
`steps_per_execution`, and a loaded model continues at the saved step.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, TypeVar

import tensorflow as tf

from keras_qat.arithmetic.control_flow import Switch, cond
from keras_qat.config.recipe import Recipe
from keras_qat.keras2 import backend
from keras_qat.keras2.backend import keras
from keras_qat.keras2.readability import is_graph_model
from keras_qat.messages import set_within, show_once
from keras_qat.training.fake_quantization.activation_quantizer import ActivationQuantizer
from keras_qat.training.fake_quantization.phase import NEVER, Flag, Phase
from keras_qat.training.fake_quantization.weight_quantizer import WeightQuantizer

_RANGES = 2**31
"""The weight `freeze_from` stores two steps. It is the first step with frozen statistics, plus
`_RANGES` times the first step with frozen ranges. `split_thresholds` separates the steps.

Two weights would be simpler, but `.h5` files of version 0.1.0 have only this weight."""

Count = TypeVar("Count")


def split_thresholds(quantize_from: Count, freeze_from: Count) -> dict[str, Count]:
    """Returns the steps of all changes. `_RANGES` explains the two steps in `freeze_from`."""
    weight: Any = freeze_from
    ranges = weight % NEVER // _RANGES
    return {
        "quantize_from": quantize_from,
        "freeze_from": weight - ranges * _RANGES,
        "freeze_ranges_from": ranges - (ranges - 1) // _RANGES * NEVER,  # 0 means NEVER.
    }


@contextlib.contextmanager
def assuming(phase: Phase | None, layers: Iterable[ScheduledLayer]) -> Iterator[None]:
    """Sets the phase of all calls of `layers` inside a `with` block.

    Graphs that are traced inside the block have no branches for other phases. If `phase` is None,
    each call reads the weights of the layer to find the phase.
    """
    for layer in layers:
        object.__setattr__(layer, "assumed", phase)  # Keras does not track it.
    try:
        yield
    finally:
        for layer in layers:
            object.__setattr__(layer, "assumed", None)


_shapes_only: ContextVar[bool] = ContextVar("shapes only", default=False)


def shapes_only() -> AbstractContextManager[None]:
    """Returns a context manager for building a model. Inside, layers only infer output shapes.

    Outside, Keras traces every layer, which is the slowest part of building a model.
    """
    return set_within(_shapes_only, True)


def shapes_are_enough() -> bool:
    return _shapes_only.get()


def note_plain_model(recipe: Recipe | None, training: Flag | None) -> None:
    """Shows a note if users predict with a `keras.Model` that they built from these layers."""
    model, of_model = backend.find_calling_layer()
    if not is_graph_model(model) or hasattr(type(model), "exact_inference"):
        return
    is_inference = (of_model if training is None else training) in (None, False)
    if is_inference and getattr(recipe, "fold", "") != "correction" and not backend.is_building():
        show_once(
            f"Keras built '{model.name}' from quantization-aware layers. It predicts with fake "
            f"quantization, as in training, and its file may return values that differ by one "
            f"step. keras_qat.quantize_model({model.name}) returns a copy that predicts the "
            f"results of the file."
        )


class ScheduledLayer(keras.layers.Layer):
    """The base class of quantize-aware layers. It counts training steps.

    The weight `step` is the number of completed training steps. `quantize_from` is the first step
    that quantizes, counted from 1. `freeze_from` is the first step with frozen BatchNormalization.
    It also encodes the first step with frozen ranges (`_RANGES`).

    The layer computes in float32. Wrapped layers follow their own dtype policies.

    Args:
        mixed: True if the model computes in half precision. Training then skips steps with infinity
            or NaN. Ranges must not observe these steps.
    """

    recipe: Recipe | None = None
    """The recipe of the layer's model. Models that users build from the layer also have it."""
    made_for: Callable[[], Any] | None = None
    """A weak reference to the layer's model."""
    make_exact: Callable[[Any], None]
    """Function for a `keras.Model` that users built from such layers. It makes `predict` return the
    results of the exported file."""
    made_in: int = 0
    """The id of the process that created the weights."""
    weight_quantizers: Mapping[str, WeightQuantizer] = MappingProxyType({})
    changes: int = 0
    """Number of calls of `set_thresholds`. `PhaseFinder` compares it to notice a change."""
    assumed: Phase | None = None
    """The phase of all calls inside `assuming`, with a variable in place of each `Switch`. It is an
    attribute, not a context variable, because the threads of all replicas read it."""

    def __init__(self, mixed: bool = False, **kwargs: Any) -> None:
        super().__init__(autocast=False, **kwargs)
        self.mixed = mixed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        note_plain_model(self.recipe, kwargs.get("training"))
        return super().__call__(*args, **kwargs)

    @backend.without_autograph
    def call(self, inputs: tf.Tensor, training: Flag | None = None, **kwargs: Any) -> tf.Tensor:
        kwargs.pop("mask", None)  # Keras passes a mask to calls with **kwargs.
        if _shapes_only.get():
            with tf.init_scope():  # Keras computes the shapes of custom layers in eager mode.
                shapes = tf.nest.map_structure(lambda x: x.shape, inputs)
                shape = self.compute_output_shape(shapes)
            return tf.raw_ops.Placeholder(dtype=self.output_dtype(inputs), shape=shape)
        with backend.AUTOGRAPH_AS_USUAL:  # AutoGraph converts the code of wrapped layers.
            return self.compute(inputs, training, **kwargs)

    def output_dtype(self, inputs: tf.Tensor) -> tf.DType:
        """Returns the data type of the output."""
        return inputs.dtype

    def build(self, input_shape: tf.TensorShape) -> None:
        self.made_in = os.getpid()
        self.step = backend.add_scalar(self, "step", 0, "int64")
        self.quantize_from = backend.add_scalar(self, "quantize_from", 0, "int64")
        self.freeze_from = backend.add_scalar(self, "freeze_from", NEVER, "int64")
        super().build(input_shape)

    def thresholds(self) -> dict[str, tf.Tensor]:
        """Returns the steps at which quantization and freezing begin, by name."""
        return split_thresholds(self.quantize_from.read_value(), self.freeze_from.read_value())

    def set_thresholds(self, **thresholds: int) -> None:
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
        self.changes += 1  # After the weights have changed.

    @property
    def switches(self) -> list[tf.Variable]:
        """The weights that determine the phase of a call."""
        return [self.step, self.quantize_from, self.freeze_from]

    @property
    def quantizers(self) -> list[ActivationQuantizer]:
        """The quantizers of activations in this layer."""
        return []

    def yield_block_weights(self) -> Iterator[tuple[WeightQuantizer, tf.Tensor]]:
        """Yields (quantizer, weight) for weights that `step_tensors` can quantize together."""
        yield from ()

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **({"mixed": True} if self.mixed else {})}

    def advance(self, training: Flag | None) -> Phase:
        """Counts a step in training, and returns the phase of the call."""
        training = backend.resolve_training(training)
        known = self.assumed
        if known is not None and known.training is training:
            if training:
                self.step.assign_add(1, read_value=False)
            quantizing, frozen, fixed = (
                state if isinstance(state, bool) else Switch(state.value())
                for state in (known.quantizing, known.frozen, known.fixed)
            )
            return known._replace(quantizing=quantizing, frozen=frozen, fixed=fixed)
        step = cond(training, lambda: self.step.assign_add(1), self.step.read_value)
        starts = self.thresholds()
        return Phase(
            training,
            step >= starts["quantize_from"],
            step >= starts["freeze_from"],
            fixed=step >= starts["freeze_ranges_from"],
        )
