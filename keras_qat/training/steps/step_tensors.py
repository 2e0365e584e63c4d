"""Computes small operations for all quantizers of a model at once, in each training step.

A quantizer has a dozen operations on a few values. On a GPU, each operation is a kernel launch.
With a hundred quantizers, these are most operations of a step. Operations that do not depend on the
batch are therefore computed for all quantizers together, when the step begins.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic import plain_operations
from keras_qat.arithmetic.fake_quant import LARGE, fake_quantize_channels
from keras_qat.arithmetic.plain_operations import Scalar
from keras_qat.keras2.backend import keras
from keras_qat.messages import set_within

QuantizedWeights = dict[Any, tuple[tf.Tensor, tf.Tensor]]
"""Maps each `WeightQuantizer` to a weight and the quantized weight."""


@dataclasses.dataclass(frozen=True)
class StepTensors:
    """Tensors of one training step that were computed for all quantizers together.

    Args:
        graph: the graph of the tensors. Inner graphs do not use the tensors, because an inner graph
            may be saved alone.
        weights: the weights that are quantized together.
        averages: the results of `_Average.weigh` for each observer, by `counter.ref()`. If a step
            calls an observer again, the observer computes them again.
    """

    graph: Any
    weights: QuantizedWeights
    averages: dict[Any, tuple[tf.Tensor, tf.Tensor]]


_current: ContextVar[StepTensors | None] = ContextVar("tensors of the step", default=None)


def current() -> StepTensors:
    """Returns the tensors of the step that is being traced, or empty `StepTensors`."""
    tensors, graph = _current.get(), tf.compat.v1.get_default_graph()
    if tensors is not None and tensors.graph is graph:
        return tensors
    return StepTensors(graph, {}, {})


def compute_together(layers: Iterable[keras.layers.Layer]) -> AbstractContextManager[None]:
    """Returns a context manager for tracing a training step, with `StepTensors` for `layers`."""
    outer, graph = _current.get(), tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or (outer is not None and outer.graph is graph):
        return contextlib.nullcontext()
    layers = list(layers)
    tensors = StepTensors(graph, _quantize_weights(layers), _count_batches(layers))
    return set_within(_current, tensors)


def _count_batches(layers: list[keras.layers.Layer]) -> dict[Any, tuple[tf.Tensor, tf.Tensor]]:
    rows = collections.defaultdict(list)
    for layer in layers:
        if layer.assumed is not None and layer.assumed.fixed is True:
            continue
        for observer in (item for quantizer in layer.quantizers for item in quantizer.observers):
            for counter in observer.counters:
                rows[observer.weigh].append((counter, observer.decay))
    fixed = None if not layers or layers[0].assumed is None else layers[0].assumed.fixed
    frozen = fixed.value() if isinstance(fixed, tf.Variable) else None
    averages: dict[Any, tuple[tf.Tensor, tf.Tensor]] = {}
    for weigh, counters in rows.items():
        scalars = ((tf.convert_to_tensor(counter), decay) for counter, decay in counters)
        results = apply_to_rows(functools.partial(weigh, frozen=frozen), *scalars)
        averages.update(zip((counter.ref() for counter, _ in counters), results, strict=True))
    return averages


def apply_to_rows(
    function: Callable[..., tuple[tf.Tensor, ...]], *rows: tuple[Scalar | tf.Variable, ...]
) -> list[tuple[tf.Tensor, ...]]:
    """Calls `function` once for the scalar arguments of several calls.

    For example, the rows `(a, b)` and `(c, d)` need one call `function([a, c], [b, d])`. The result
    is the list `[function(a, b), function(c, d)]`.
    """
    if len(rows) == 1:
        return [function(*rows[0])]
    vectors = function(*map(tf.stack, zip(*rows, strict=True)))
    results = (tf.unstack(vector, len(rows)) for vector in vectors)
    return list(zip(*results, strict=True))


def _quantize_weights(layers: list[keras.layers.Layer]) -> QuantizedWeights:
    """Concatenate weights that differ only in the number of channels, and quantize them.

    Large weights are left out, because concatenating would take too long.
    """
    most = LARGE * (4 if plain_operations.has_gpu() else 1)
    groups: dict[Any, list[tuple[Any, tf.Tensor]]] = collections.defaultdict(list)
    for quantizer, weight in (pair for layer in layers for pair in layer.yield_block_weights()):
        sizes = weight.shape.as_list()
        sizes[quantizer.channel_axes[0]] = None
        if weight.shape.num_elements() < most:
            key = quantizer.spec, quantizer.channel_axes, *sizes
            groups[key].append((quantizer, weight))
    quantized: QuantizedWeights = {}
    for group in groups.values():
        if len(group) > 1:
            quantizers, weights = zip(*group, strict=True)
            first, axis = quantizers[0], quantizers[0].channel_axes[0]
            stack = tf.stop_gradient(tf.concat(weights, axis))
            values = fake_quantize_channels(stack, first.limits(stack), first.spec.bits)
            each = tf.split(values, [weight.shape[axis] for weight in weights], axis)
            quantized.update(zip(quantizers, zip(weights, each, strict=True), strict=True))
    return quantized
