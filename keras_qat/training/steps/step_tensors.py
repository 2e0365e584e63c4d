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
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic import plain_operations
from keras_qat.arithmetic.fake_quant import (
    LARGE,
    ChannelSteps,
    largest_magnitudes,
    replace_zeros,
)
from keras_qat.arithmetic.gradient_masks import Gates, apply_to_rows

RECENT = 10.0
"""An average spans at most this many batches, or 1 / RECENT of all. Ranges so keep up with weights,
which change most when training begins; the average of all batches would clip what grows."""


@dataclasses.dataclass(frozen=True)
class StepTensors:
    """Tensors of one training step of a model.

    Args:
        graph: the graph that they are in. Graphs within it, which may be saved alone, have none.
        steps: by the layers, their numbers of training steps with this one. They hold for the
            first call of a layer in the step.
        weights: by their quantizers, weights as they were read and quantized.
        averages: by the references of observers' counters, the number of batches with this one and
            what the observer's `weigh` says of it. They hold for the first batch in the step.
        gates: what the gradients of quantizers need of the ranges.
        values: by the variables' references, the values of variables that stay in the step.
    """

    graph: Any
    steps: dict[Any, Any]
    weights: dict[Any, tuple[Any, Any]]
    averages: dict[Any, tuple[Any, Any]]
    gates: Gates
    values: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def value(self, variable: tf.Variable) -> Any:
        """Returns the value of a variable that stays as it is, read once in a graph."""
        key = variable.ref()
        if key not in self.values:
            self.values[key] = variable.value()
        return self.values[key]


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
    # GPUs take whole numbers apart on the host, which would wait.
    if not layers or plain_operations.has_gpu() or _is_shared():
        return {}
    steps = apply_to_rows(
        lambda steps: (steps + 1,), *((layer.step.read_value(),) for layer in layers)
    )
    return {layer: step for layer, (step,) in zip(layers, steps, strict=True)}


def _is_shared() -> bool:
    """Returns whether workers that do not wait for each other count steps in one variable.

    A step that another worker counts between reading and writing would be lost.
    """
    strategy = tf.distribute.get_strategy()
    return isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy)


def average_weight(batches: Any, decay: tf.Tensor, frozen: Any = None) -> tuple[Any, Any]:
    """Computes the number of batches with the next one, and its weight in the moving average.

    In float64, so that scalars and vectors, CPUs and GPUs agree on the float32 result.

    Args:
        batches: number of batches so far, float32.
        decay: the decay of the average, float32.
        frozen: whether the average is frozen, which is true of all or none; None for no.
    """
    count = batches + 1.0
    one, decay = tf.constant(1.0, tf.float64), tf.cast(decay, tf.float64)
    number = tf.cast(count, tf.float64)
    unbiased = (one - decay) / (one - tf.pow(decay, number))
    recent = RECENT / tf.maximum(number, RECENT * RECENT)
    weight = tf.cast(tf.maximum(unbiased, recent), tf.float32)
    if frozen is None:
        return count, weight
    return tf.where(frozen, batches, count), tf.where(frozen, 0.0, weight)


def known_share(batches: Any, decay: tf.Tensor, frozen: Any = None) -> tuple[Any, Any]:
    """Computes the number of batches with the next one, and how much is known of their average.

    TensorFlow 1's average begins at zero and is divided by that: 1 - decay^n. The power is computed
    in float64, for the reason given at `average_weight`, which has the same arguments.
    """
    count = batches + 1.0
    power = tf.pow(tf.cast(decay, tf.float64), tf.cast(count, tf.float64))
    known = 1.0 - tf.cast(power, tf.float32)
    return count if frozen is None else tf.where(frozen, batches, count), known


def _averages(layers: list[Any]) -> dict[Any, tuple[Any, Any]]:
    counted = collections.defaultdict(list)
    for layer in layers:
        if layer.assumed is not None and layer.assumed.fixed is True:
            continue
        for observer in (item for quantizer in layer.quantizers for item in quantizer.observers):
            for counter in observer.counters:
                counted[observer.weigh].append((counter, observer.decay))
    fixed = None if not layers or layers[0].assumed is None else layers[0].assumed.fixed
    frozen = fixed.value() if isinstance(fixed, tf.Variable) else None
    averages: dict[Any, tuple[Any, Any]] = {}
    for weigh, rows in counted.items():
        numbers = ((tf.convert_to_tensor(counter), decay) for counter, decay in rows)
        results = apply_to_rows(functools.partial(weigh, frozen=frozen), *numbers)
        averages.update(zip((counter.ref() for counter, _ in rows), results, strict=True))
    return averages


_Group = list[tuple[Any, Any]]
"""Pairs of a quantizer and its weight, of equal shapes apart from the number of channels."""


def _large() -> int:
    """Returns from how many numbers on weights are quantized by themselves.

    Copying them side by side takes time, on a GPU less than launches. A fourth as many zeros take
    less time than the operations of a group by itself.
    """
    return LARGE * (4 if plain_operations.has_gpu() else 1)


class _Block:
    """Weights side by side along their channels, with zeros behind the shorter ones.

    Args:
        groups: the weights, the longest first.
    """

    def __init__(self, groups: list[_Group]) -> None:
        longest, *others = groups
        quantizer, weight = longest[0]
        is_plain = _kernel_shape(quantizer, weight) == weight.shape.as_list()
        self.groups = [*([pair] for pair in longest), *others] if is_plain else groups
        self.axis, self.kernel_axes = quantizer.channel_axes[0], _kernel_axes(quantizer)
        self.stacks = [_joined([weight for _, weight in group], self.axis) for group in self.groups]
        self.kernels = self.stacks
        if others or weight.shape.rank != 4 or len(quantizer.channel_axes) > 1:
            shapes = (_kernel_shape(quantizer, stack) for stack in self.stacks)
            self.kernels = list(map(tf.reshape, self.stacks, shapes))
        self.joined = tf.stop_gradient(_joined(self.kernels, self.kernel_axes[0]))
        self.largest = largest_magnitudes(self.joined, self.kernel_axes)
        sizes = self.largest.shape.as_list()
        sizes[self.kernel_axes[0]] = None
        self.family = tuple(sizes), self.kernel_axes[0], quantizer.spec.bits
        """What the blocks have in common whose limits are joined."""

    def quantized(self, steps: ChannelSteps) -> Iterator[tuple[Any, tuple[Any, Any]]]:
        """Yields the quantizers with their weights and these quantized."""
        kernels = _parted(steps.round(self.joined), self.kernels, self.kernel_axes[0])
        for kernel, stack, group in zip(kernels, self.stacks, self.groups, strict=True):
            quantizers, weights = zip(*group, strict=True)
            own = kernel if kernel.shape == stack.shape else tf.reshape(kernel, stack.shape)
            parts = _parted(own, weights, self.axis)
            yield from zip(quantizers, zip(weights, parts, strict=True), strict=True)


def _weights(layers: list[Any]) -> dict[Any, tuple[Any, Any]]:
    """Quantizes weights, those of little difference side by side."""
    groups: dict[Any, _Group] = collections.defaultdict(list)
    for quantizer, weight in (pair for layer in layers for pair in layer.weights_to_stack()):
        sizes = weight.shape.as_list()
        sizes[quantizer.channel_axes[0]] = None
        groups[_kind(quantizer, weight), tuple(sizes)].append((quantizer, weight))
    families: dict[Any, list[_Block]] = collections.defaultdict(list)
    for block in map(_Block, _side_by_side(groups.values())):
        families[block.family].append(block)
    quantized: dict[Any, tuple[Any, Any]] = {}
    for (_, axis, bits), members in families.items():
        largest = [block.largest for block in members]
        levels, *tensors = ChannelSteps.for_limits(replace_zeros(_joined(largest, axis)), bits)
        parts = zip(*(_parted(tensor, largest, axis) for tensor in tensors), strict=True)
        for block, part in zip(members, parts, strict=True):
            quantized.update(block.quantized(ChannelSteps(levels, *part)))
    return quantized


def _side_by_side(groups: Iterable[_Group]) -> list[list[_Group]]:
    """Puts groups together that few zeros make equally long, as long as a block is not large."""
    blocks: list[list[_Group]] = []
    large = _large()
    most = large * (2 if plain_operations.has_gpu() else 1)
    for group in sorted(groups, key=lambda group: _rows([group]), reverse=True):
        zeros = {
            index: _size([*block, group]) - _size(block) - _size([group])
            for index, block in enumerate(blocks)
            if _kind(*block[0][0]) == _kind(*group[0]) and _size([*block, group]) < most
        }
        best = min(zeros, key=zeros.__getitem__, default=None)
        if best is not None and zeros[best] <= large // 4:
            blocks[best].append(group)
        else:
            blocks.append([group])
    return blocks


def _kind(quantizer: Any, weight: tf.Tensor) -> Any:
    """Returns what weights have in common that may be side by side; a large one has it alone."""
    own = weight.ref() if weight.shape.num_elements() >= _large() else None
    return quantizer.channel_axes, quantizer.spec.bits, len(_kernel_shape(quantizer, weight)), own


def _rows(block: list[_Group]) -> int:
    axis = _kernel_axes(block[0][0][0])[0]
    longest = np.max([_kernel_shape(*pair) for group in block for pair in group], axis=0)
    return math.prod(np.delete(longest, axis).tolist())


def _size(block: list[_Group]) -> int:
    axis = _kernel_axes(block[0][0][0])[0]
    return _rows(block) * sum(_kernel_shape(*pair)[axis] for group in block for pair in group)


def _kernel_axes(quantizer: Any) -> tuple[int, ...]:
    """Returns the axes of the channels in weights of `_kernel_shape`."""
    axes = quantizer.channel_axes
    return (-1,) if axes == tuple(range(-len(axes), 0)) else axes


def _kernel_shape(quantizer: Any, weight: tf.Tensor) -> list[int]:
    """Returns a weight's shape, as a kernel of `Conv2D` for one pixel if its channels come last."""
    shape, axes = weight.shape.as_list(), quantizer.channel_axes
    if _kernel_axes(quantizer) != (-1,):
        return shape
    channels = math.prod(shape[axis] for axis in axes)
    return [1, 1, weight.shape.num_elements() // channels, channels]


def _joined(tensors: Sequence[Any], axis: int) -> Any:
    """Puts tensors side by side along an axis, with zeros behind those shorter in another axis."""
    if len(tensors) == 1:
        return tensors[0]
    missing = np.max([tensor.shape for tensor in tensors], axis=0) - [t.shape for t in tensors]
    missing[:, axis] = 0
    padded = (
        tf.pad(tensor, [(0, count) for count in counts]) if counts.any() else tensor
        for tensor, counts in zip(tensors, missing, strict=True)
    )
    return tf.concat(list(padded), axis)


def _parted(joined: Any, like: Sequence[Any], axis: int) -> list[Any]:
    """Takes apart what `_joined` has made, into the shapes of tensors."""
    if len(like) == 1:
        return [joined]
    parts = tf.split(joined, [tensor.shape[axis] for tensor in like], axis)
    return [
        part if part.shape == tensor.shape else tf.slice(part, [0] * part.shape.rank, tensor.shape)
        for part, tensor in zip(parts, like, strict=True)
    ]
