"""Compares the first batch of `predict` and `evaluate` with the ranges of the model's inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_qat.io.inputs import describe_excess
from keras_qat.keras2 import backend
from keras_qat.keras2.backend import keras
from keras_qat.keras2.layers_and_models import flatten_inputs
from keras_qat.messages import warn_caller
from keras_qat.training.layers import Quantize
from keras_qat.training.schedule import list_scheduled_layers

LOOKS = 3
"""Calls of `predict`, and of `evaluate`, for which the first batch is compared."""
NAMES = ("predict", "test")
"""Keras' names of the functions that read the batch."""


class FirstBatch:
    """Warns once if the inputs of a model are far outside of their ranges.

    Only the first batch of a few calls is read outside of the traced function, so no other batch
    takes longer.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._looks = dict.fromkeys(NAMES, 0)

    def look(self, name: str, batches: Iterator[Any]) -> Iterator[Any]:
        """Compares the next batch of an iterator, and returns an iterator that still yields it.

        Args:
            name: the function that reads the batch, one of `NAMES`.
            batches: Keras' iterator. It is returned unchanged if no batch was read.
        """
        if self._looks[name] >= LOOKS or not isinstance(batches, tf.data.Iterator):
            return batches
        if backend.get_steps_per_execution(self._model) != 1:
            return batches
        self._looks[name] += 1
        try:
            batch = next(batches)
        except StopIteration:  # Keras raises an error if there is no data.
            return batches
        if reason := self._explain_doubt(batch):
            self._looks = dict.fromkeys(NAMES, LOOKS)
            warn_caller(reason)
        # With the type of `batches`, or the function would be traced again.
        variant = tf.data.experimental.to_variant(tf.data.Dataset.from_tensors(batch))
        return iter(tf.data.experimental.from_variant(variant, batches.element_spec))

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Runs a block that compares nothing, because its caller does."""
        before, self._looks = self._looks, dict.fromkeys(NAMES, LOOKS)
        try:
            yield
        finally:
            self._looks = before

    def _explain_doubt(self, batch: Any) -> str:
        """Returns why a batch does not fit the model; "" if it does, or cannot be read."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        try:
            inputs = flatten_inputs(self._model, x)
        except (TypeError, ValueError, KeyError):  # Keras raises the error.
            return ""
        ranges = self._find_ranges()
        doubts = (
            describe_excess(name, tensor.numpy(), *ranges[name])
            for name, tensor in zip(self._model.input_names, inputs, strict=True)
            if name in ranges and tensor.shape.rank
        )
        return next(filter(None, doubts), "")

    def _find_ranges(self) -> dict[str, tuple[float, float]]:
        """Returns the range of each input that is quantized, by name."""
        names, ranges = set(self._model.input_names), {}
        for layer in list_scheduled_layers(self._model):
            if isinstance(layer, Quantize) and not names.isdisjoint(layer.tensors):
                own = names.intersection(layer.tensors)
                ranges.update(dict.fromkeys(own, layer.quantizers[0].current_range()))
        return ranges


def get_first_batch(model: keras.Model) -> FirstBatch:
    """Returns the only `FirstBatch` of a model."""
    if getattr(model, "_first_batch", None) is None:  # Past Keras, which would track it.
        object.__setattr__(model, "_first_batch", FirstBatch(model))
    return model._first_batch
