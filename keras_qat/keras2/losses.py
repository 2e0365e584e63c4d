"""Reads the losses of a compiled model, and the losses that layers add."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from keras_qat.keras2.backend import keras

Kind = Literal["classes", "decisions", "values", "directions", "custom"]

KINDS: dict[str, Kind] = {
    "binary_crossentropy": "decisions",
    "binary_focal_crossentropy": "decisions",
    "categorical_crossentropy": "classes",
    "categorical_focal_crossentropy": "classes",
    "categorical_hinge": "classes",
    "cosine_similarity": "directions",
    "hinge": "decisions",
    "huber": "values",
    "log_cosh": "values",
    "mean_absolute_error": "values",
    "mean_absolute_percentage_error": "values",
    "mean_squared_error": "values",
    "mean_squared_logarithmic_error": "values",
    "poisson": "values",
    "sparse_categorical_crossentropy": "classes",
    "squared_hinge": "decisions",
}
"""Maps a Keras loss to the kind of outputs that it trains. "decisions" are binary classes."""


@dataclasses.dataclass(frozen=True)
class CompiledLoss:
    """The loss of one output.

    Args:
        name: the name of the loss function, such as `mean_squared_error`.
        kind: the kind of values in the output, from `KINDS`, or "custom" for a custom loss.
        function: a function that maps targets and predictions to the error of each example.
    """

    name: str
    kind: Kind
    function: Callable[[Any, Any], Any]

    def per_example(self, targets: np.ndarray, predicted: np.ndarray) -> np.ndarray | None:
        """Returns the error of each example, or None if the loss function fails."""
        try:
            errors = self.function(tf.constant(targets, tf.float32), tf.constant(predicted))
            errors = np.asarray(errors, np.float64)
        except Exception:  # Custom functions may raise any error.
            return None
        if errors.shape[:1] != predicted.shape[:1] or not np.isfinite(errors).all():
            return None
        return errors.reshape(len(errors), -1).mean(-1)


def find_losses(model: keras.Model, names: Sequence[str]) -> list[CompiledLoss | None]:
    """Returns the loss of each output in `names`, or None for an output without a loss."""
    losses = getattr(model, "loss", None) or None
    if isinstance(losses, dict):
        own_names = getattr(model, "output_names", None) or names
        keys = own_names if len(own_names) == len(names) else names
        found = [losses.get(key, losses.get(name)) for key, name in zip(keys, names, strict=True)]
    elif isinstance(losses, (list, tuple)):
        found = list(losses) if len(losses) == len(names) else [None] * len(names)
    else:  # Keras uses a single loss for all outputs.
        found = [losses] * len(names)
    return list(map(_read_loss, found))


def _read_loss(loss: Any) -> CompiledLoss | None:
    if isinstance(loss, str):
        try:
            loss = keras.losses.get(loss)
        except ValueError:
            return None
    if isinstance(loss, keras.losses.Loss):
        function = getattr(loss, "fn", None) or type(loss)
        compute = loss.call
    elif callable(loss):
        function = compute = loss
    else:
        return None
    name = getattr(function, "__name__", type(function).__name__)
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    return CompiledLoss(name, KINDS.get(name, "custom"), compute)


@contextlib.contextmanager
def take_losses(layer: keras.layers.Layer) -> Iterator[list[tuple[Any, Any]]]:
    """Removes the losses that layers add inside a `with` block.

    Inside a `tf.function`, these losses are symbolic. Keras fails if it reads them later, outside
    of this function.

    Yields:
        A list. After the block, the list contains a pair (layer, loss) for each loss.
    """
    layers = list(layer._flatten_layers())
    kept = {id(loss): loss for inner in layers for loss in inner._eager_losses}
    removed: list[tuple[Any, Any]] = []
    yield removed
    for inner in layers:
        removed += [(inner, loss) for loss in inner._eager_losses if id(loss) not in kept]
        inner._eager_losses = [loss for loss in inner._eager_losses if id(loss) in kept]
