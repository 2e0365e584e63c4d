"""What all quantizers of a model compute alike in a training step, computed in one go.

A quantizer has a dozen operations on single numbers, and a weight as many on few. In a model of a
hundred quantizers these are most of the operations of a step, of which each costs a GPU a launch.
What does not depend on the batch is computed for all quantizers when the step begins, and what
only gradients need, when the first gradient needs it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.fake_quant import (
    LARGE,
    ChannelSteps,
    Gates,
    largest_magnitudes,
    without_zeros,
)
from keras_qat.arithmetic.together import stacked


@dataclasses.dataclass(frozen=True)
class StepTensors:
    """Tensors of one training step of a model.

    Args:
        graph: the graph that they are in. Graphs within it, which may be saved alone, have none.
        steps: by the layers, their numbers of training steps with this one. They hold for the
            first call of a layer in the step.
        weights: quantized weights, by their quantizers.
        averages: by their observers, the number of batches with this one and the batch's weight
            in the moving average. They hold for the first batch that an observer sees in the step.
        gates: what the gradients of quantizers need of the ranges.
    """

    graph: Any
    steps: dict[Any, Any]
    weights: dict[Any, Any]
    averages: dict[Any, tuple[Any, Any]]
    gates: Gates


_current: ContextVar[StepTensors | None] = ContextVar("tensors of the step", default=None)


def current() -> StepTensors:
    """Returns the tensors of the step that is traced; none if there is no such step."""
    tensors, graph = _current.get(), tf.compat.v1.get_default_graph()
    if tensors is not None and tensors.graph is graph:
        return tensors
    return StepTensors(graph, {}, {}, {}, Gates())


@contextlib.contextmanager
def computed_together(layers: Iterable[Any]) -> Iterator[None]:
    """Runs a block in which a graph of a training step calls all quantize-aware `layers`."""
    outer, graph = _current.get(), tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or (outer is not None and outer.graph is graph):
        yield
        return
    layers = list(layers)
    tensors = StepTensors(graph, _steps(layers), _weights(layers), _averages(layers), Gates())
    token = _current.set(tensors)
    try:
        yield
    finally:
        _current.reset(token)


def _steps(layers: list[Any]) -> dict[Any, Any]:
    if not layers:
        return {}
    steps = stacked(lambda steps: (steps + 1,), *((layer.step.read_value(),) for layer in layers))
    return {layer: step for layer, (step,) in zip(layers, steps, strict=True)}


def average_weight(batches: Any, decay: Any) -> tuple[Any, Any]:
    """Computes the number of batches with the next one, and its weight in the moving average.

    In float64, so that scalars and vectors, CPUs and GPUs agree on the float32 result.

    Args:
        batches: number of batches so far, float32.
        decay: the decay of the average, float32.
    """
    count = batches + 1.0
    one, decay = tf.constant(1.0, tf.float64), tf.cast(decay, tf.float64)
    weight = (one - decay) / (one - tf.pow(decay, tf.cast(count, tf.float64)))
    return count, tf.cast(weight, tf.float32)


def _averages(layers: list[Any]) -> dict[Any, tuple[Any, Any]]:
    observers = [
        observer
        for layer in layers
        if layer.assumed is None or layer.assumed.fixed is not True
        for quantizer in layer.quantizers
        for observer in quantizer.observers
        if getattr(observer, "batches", None) is not None
    ]
    if not observers:
        return {}
    rows = (
        (tf.convert_to_tensor(observer.batches), np.float32(observer.spec.ema_decay))
        for observer in observers
    )
    return dict(zip(observers, stacked(average_weight, *rows), strict=True))


@dataclasses.dataclass
class _Block:
    """Weights of equal shapes, apart from the number of channels, side by side.

    Args:
        quantizers, weights: the weights with their quantizers.
        axis: the axis of the channels.
    """

    quantizers: list[Any]
    weights: list[Any]
    axis: int

    def __post_init__(self) -> None:
        self.joined = tf.stop_gradient(_joined(self.weights, self.axis))
        self.largest = largest_magnitudes(self.joined, self.quantizers[0].channel_axes)

    @property
    def family(self) -> Any:
        """What the blocks have in common whose limits are joined."""
        first = self.quantizers[0]
        sizes = self.largest.shape.as_list()
        sizes[self.axis] = None
        return tuple(sizes), first.channel_axes, first.spec.bits

    def quantized(self, steps: ChannelSteps) -> Iterator[tuple[Any, Any]]:
        """Yields the quantizers with their quantized weights."""
        rounded = steps.rounded(self.joined)
        return zip(self.quantizers, _parted(rounded, self.weights, self.axis), strict=True)


def _weights(layers: list[Any]) -> dict[Any, Any]:
    """Quantizes weights, those of little difference side by side."""
    blocks: dict[Any, list[tuple[Any, Any]]] = collections.defaultdict(list)
    for quantizer, weight in (pair for layer in layers for pair in layer.weights_to_stack()):
        axis, sizes = quantizer.channel_axes[0], weight.shape.as_list()
        sizes[axis] = weight.ref() if weight.shape.num_elements() >= LARGE else None
        blocks[quantizer.channel_axes, tuple(sizes), quantizer.spec.bits].append(
            (quantizer, weight)
        )
    families: dict[Any, list[_Block]] = collections.defaultdict(list)
    for pairs in blocks.values():
        quantizers, weights = map(list, zip(*pairs, strict=True))
        block = _Block(quantizers, weights, quantizers[0].channel_axes[0])
        families[block.family].append(block)
    quantized: dict[Any, Any] = {}
    for (_, axes, bits), members in families.items():
        largest = [block.largest for block in members]
        joined = without_zeros(_joined(largest, axes[0]))
        levels, *tensors = ChannelSteps.of(joined, bits)
        parts = zip(*(_parted(tensor, largest, axes[0]) for tensor in tensors), strict=True)
        for block, part in zip(members, parts, strict=True):
            quantized.update(block.quantized(ChannelSteps(levels, *part)))
    return quantized


def _joined(tensors: list[Any], axis: int) -> Any:
    return tf.concat(tensors, axis) if len(tensors) > 1 else tensors[0]


def _parted(joined: Any, like: list[Any], axis: int) -> list[Any]:
    """Takes apart what `_joined` has made, into sizes of tensors."""
    if len(like) == 1:
        return [joined]
    return tf.split(joined, [tensor.shape[axis] for tensor in like], axis)
