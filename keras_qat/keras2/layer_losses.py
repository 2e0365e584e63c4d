"""Losses that layers add while they compute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def take_losses(layer: Any) -> Iterator[list[tuple[Any, Any]]]:
    """Take the losses that a layer adds in a block of a function that is traced.

    They are tensors of that function. If the layer kept them, Keras would read them outside, where
    they are not defined. The function must return them instead.

    Args:
        layer: a layer, which may hold other layers.

    Yields:
        A list that has a pair of layer and loss for each of them when the block ends.
    """
    parts = list(layer._flatten_layers())
    kept = {id(loss): loss for part in parts for loss in part._eager_losses}
    taken: list[tuple[Any, Any]] = []
    yield taken
    for part in parts:
        taken += [(part, loss) for loss in part._eager_losses if id(loss) not in kept]
        part._eager_losses = [loss for loss in part._eager_losses if id(loss) in kept]
