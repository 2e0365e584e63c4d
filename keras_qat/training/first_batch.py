"""Compares the first batch of `predict` and `evaluate` with the ranges of the model's inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.io.inputs import describe_excess
from keras_qat.keras2 import backend
from keras_qat.keras2.backend import keras
from keras_qat.keras2.layers_and_models import flat_inputs
from keras_qat.messages import warn_caller
from keras_qat.training.layers import Quantize
from keras_qat.training.schedule import list_scheduled_layers

LOOKS = 3
"""Calls of `predict`, and of `evaluate`, whose first batch is looked at, if nothing is wrong."""


class FirstBatch:
    """Warns once if a model is given values far outside of the ranges of its inputs.

    Only the first batch of a few calls is read outside of the traced function, so that no batch
    takes longer.

    Args:
        model: a functional quantization-aware model.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._looks: dict[str, int] = {}

    def look(self, name: str, batches: Any) -> Any:
        """Looks at the next batch of an iterator, and returns an iterator that has it next.

        Args:
            name: the function that reads the batch: "predict" or "test".
            batches: Keras' iterator. It is returned itself if no batch was read.
        """
        if self._looks.get(name, 0) >= LOOKS or not isinstance(batches, tf.data.Iterator):
            return batches
        if backend.get_steps_per_execution(self._model) != 1:
            return batches
        self._looks[name] = self._looks.get(name, 0) + 1
        try:
            batch = next(batches)
        except StopIteration:  # Keras says that there are no data.
            return batches
        if reason := self._doubt(batch):
            self.stop()
            warn_caller(reason)
        # Of the same type as `batches`, or the function would be traced again.
        variant = tf.data.experimental.to_variant(tf.data.Dataset.from_tensors(batch))
        return iter(tf.data.experimental.from_variant(variant, batches.element_spec))

    def stop(self) -> None:
        """Looks at nothing from now on."""
        self._looks = dict.fromkeys(("predict", "test"), LOOKS)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Runs a block in which nothing is looked at, as its caller does so."""
        before, self._looks = self._looks, dict.fromkeys(("predict", "test"), LOOKS)
        try:
            yield
        finally:
            self._looks = before

    def _doubt(self, batch: Any) -> str:
        """Returns why a batch does not fit the model; "" if it does, or cannot be read."""
        x, _, _ = backend.keras.utils.unpack_x_y_sample_weight(batch)
        try:
            inputs = flat_inputs(self._model, x)
        except (TypeError, ValueError, KeyError):  # Keras says what is wrong.
            return ""
        ranges = self._ranges()
        doubts = (
            describe_excess(name, tensor.numpy(), *ranges[name])
            for name, tensor in zip(self._model.input_names, inputs, strict=True)
            if name in ranges and tensor.shape.rank
        )
        return next(filter(None, doubts), "")

    def _ranges(self) -> dict[str, tuple[float, float]]:
        """Returns the range of each input that is quantized, by name."""
        names, ranges = set(self._model.input_names), {}
        for layer in list_scheduled_layers(self._model):
            if isinstance(layer, Quantize) and not names.isdisjoint(layer.tensors):
                low, high = map(float, np.ravel(layer.quantizers[0].current_range()))
                ranges.update(dict.fromkeys(names.intersection(layer.tensors), (low, high)))
        return ranges


def get_first_batch(model: keras.Model) -> FirstBatch:
    """Returns the `FirstBatch` of a model, which has only one."""
    if getattr(model, "_first_batch", None) is None:  # Past Keras, which would track it.
        object.__setattr__(model, "_first_batch", FirstBatch(model))
    return model._first_batch
