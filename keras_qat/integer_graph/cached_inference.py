"""Inference with ranges and weights as of one moment.

Folding BatchNormalization, quantizing weights, the multipliers of kernels: all of that follows from
ranges and weights alone and takes many small operations. So it is prepared once after the weights
have changed, not for each batch. What was prepared lies in variables, and inference is traced once
to read those. It is traced anew only where other numbers take other branches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.frontend.graph import Graph, values_in
from keras_qat.frontend.keras2.backend import traced_in_time
from keras_qat.integer_graph.execute import Numbers
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.number_store import NumberStore, ones_like
from keras_qat.integer_graph.resolve import resolve_in_graph

__all__ = ["CachedInference"]

DECIDES = 3
"""Times that inference is traced for the branches that ranges and weights choose. If they go on
changing, it is traced with all branches."""

Prepare = Callable[[ResolvedGraph], Numbers]
Compute = Callable[[ResolvedGraph, Numbers, list[Any]], list[Any]]


class CachedInference:
    """A function of a model's inputs, its ranges and weights being those of the last `refresh`.

    Args:
        model: a quantization-aware model.
        graph: the same, read.
        prepare: computes what follows from ranges and weights.
        compute: computes tensors from the resolved graph, what was prepared, and the inputs.
    """

    def __init__(self, model: Any, graph: Graph, prepare: Prepare, compute: Compute) -> None:
        self.model, self.graph = model, graph
        self._prepare, self._compute = prepare, compute
        self.version = 0
        """Times that inference was traced. Functions of an earlier version are out of date."""
        self._weights: list[Any] = []
        """The values of the model's weights in the last `refresh`."""
        # In a function, as reading them one by one takes ten times as long.
        self._read = traced_in_time(lambda: [each.value() for each in model.weights])

    def refresh(self) -> None:
        """Takes ranges and weights as they are now."""
        weights = self._read()
        if self.is_ready and all(map(_unchanged, self._weights, weights)):
            return
        resolved = resolve_in_graph(self.graph, self.model.target)
        numbers: Any = self._prepare(resolved)
        diverged = not all(map(_is_finite, weights))
        if diverged:  # Tables have no entry for NaN.
            numbers = ones_like(numbers)
        # Added to real outputs, as a float model would return NaN.
        numbers = numbers, tf.constant(np.nan if diverged else 0.0)
        is_new = not self.is_ready
        if is_new:
            self._store = NumberStore(numbers)
        if is_new or not self._store.assign(numbers):
            self._trace(resolved)
        self._weights = weights

    @property
    def is_ready(self) -> bool:
        """Whether there was a `refresh`."""
        return self.version > 0

    def __call__(self, *inputs: Any) -> list[Any]:
        """The tensors, from one tensor for each input."""
        return list(self._traced(*inputs))

    def _trace(self, resolved: ResolvedGraph) -> None:
        """Traces the inference."""
        inputs = [tf.TensorSpec(each.shape, each.dtype) for each in values_in(self.graph.inputs)]

        def compute(*inputs: Any) -> list[Any]:
            numbers, offset = self._store.read(decides=self.version < DECIDES)
            tensors = self._compute(known.pop(), numbers, list(inputs))
            return [y + tf.cast(offset, y.dtype) if y.dtype.is_floating else y for y in tensors]

        known = [resolved]  # Which holds weights: no reason to keep them with what was traced.
        self._traced = tf.function(compute, autograph=False).get_concrete_function(*inputs)
        self.version += 1


def _unchanged(before: Any, now: Any) -> bool:
    """Whether a variable has the value it had. What is still held is never overwritten."""
    one, other = np.asarray(before), np.asarray(now)
    return one.ctypes.data == other.ctypes.data or np.array_equal(one, other)


def _is_finite(weight: Any) -> bool:
    values = np.asarray(weight)
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())
