"""Operations that all quantizers of a model share in a training step.

A quantizer has a dozen operations on scalars, and a weight as many on few values. In a model with a
hundred quantizers most operations of a step are such, and each costs a GPU a launch. Operations
that do not depend on the batch are computed for all quantizers together when the step begins.
Operations that only gradients need are computed when the first gradient needs them.
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

import tensorflow as tf

from keras_qat.arithmetic import plain_operations
from keras_qat.arithmetic.fake_quant import (
    LARGE,
    ChannelSteps,
    largest_magnitudes,
    replace_zeros,
)
from keras_qat.arithmetic.gradient_masks import Gates, apply_to_rows
from keras_qat.keras2.backend import keras

QuantizedWeights = dict[Any, tuple[tf.Tensor, tf.Tensor]]
"""`WeightQuantizer` -> its weight as it was read, and quantized."""


@dataclasses.dataclass(frozen=True)
class StepTensors:
    """Tensors of one training step of a model.

    Args:
        graph: the graph that holds them. Graphs within it, which may be saved alone, have none.
        steps: layer -> its number of training steps including this one. It holds for the layer's
            first call in the step.
        weights: the weights that are quantized together.
        averages: reference of an observer's counter -> the number of batches including this one,
            and the second result of `weigh`. They hold for the observer's first batch in the step.
        gates: shares the operations on ranges that gradients need.
        values: reference of a variable -> its value, which stays during the step.
    """

    graph: Any
    steps: dict[keras.layers.Layer, tf.Tensor]
    weights: QuantizedWeights
    averages: dict[Any, tuple[tf.Tensor, tf.Tensor]]
    gates: Gates
    values: dict[Any, tf.Tensor] = dataclasses.field(default_factory=dict)

    def value(self, variable: tf.Variable) -> tf.Tensor:
        """Returns the value of a variable that does not change, read once in a graph."""
        key = variable.ref()
        if key not in self.values:
            self.values[key] = variable.value()
        return self.values[key]


_current: ContextVar[StepTensors | None] = ContextVar("tensors of the step", default=None)


def current() -> StepTensors:
    """Returns the tensors of the step that is traced; none if no step is traced."""
    tensors, graph = _current.get(), tf.compat.v1.get_default_graph()
    if tensors is not None and tensors.graph is graph:
        return tensors
    return StepTensors(graph, {}, {}, {}, Gates())


@contextlib.contextmanager
def compute_together(layers: Iterable[keras.layers.Layer]) -> Iterator[None]:
    """Runs a block in which a graph of a training step calls all quantize-aware `layers`."""
    outer, graph = _current.get(), tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or (outer is not None and outer.graph is graph):
        yield
        return
    layers = list(layers)
    tensors = StepTensors(
        graph, _count_steps(layers), _quantize_weights(layers), _count_batches(layers), Gates()
    )
    token = _current.set(tensors)
    try:
        yield
    finally:
        _current.reset(token)


def _count_steps(layers: list[keras.layers.Layer]) -> dict[keras.layers.Layer, tf.Tensor]:
    # Workers of a parameter server count in one variable: steps pluralize between reading and
    # writing would be lost. GPUs unstack integers on the host, and would wait for that.
    server = tf.distribute.experimental.ParameterServerStrategy
    if not layers or plain_operations.has_gpu() or isinstance(tf.distribute.get_strategy(), server):
        return {}
    rows = ((layer.step.read_value(),) for layer in layers)
    steps = apply_to_rows(lambda steps: (steps + 1,), *rows)
    return {layer: step for layer, (step,) in zip(layers, steps, strict=True)}


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


class _Kernel:
    """A weight and its quantizer; its channels are its last axes."""

    def __init__(self, quantizer: Any, weight: tf.Tensor) -> None:
        self.quantizer, self.weight = quantizer, weight
        axes, sizes = quantizer.channel_axes, weight.shape.as_list()
        self.axis = axes[0]
        self.channels = math.prod(sizes[axis] for axis in axes)
        self.rows = weight.shape.num_elements() // self.channels
        own = weight.ref() if weight.shape.num_elements() >= _find_large() else None
        self.kind = axes, quantizer.spec.bits, own
        """Kernels of one kind may share a block. A large one has its kind alone."""
        sizes[self.axis] = None
        self.sizes = tuple(sizes)
        """The sizes that have to agree in a concatenation along the channels."""
        self.is_flat = sizes[:-1] == [1, 1, self.rows]


_Group = list[_Kernel]
"""Kernels of one kind, of equal shapes apart from the number of channels."""


def _find_large() -> int:
    """Returns from how many elements on weights are quantized by themselves.

    Concatenating weights copies them. On a GPU that is faster than more launches.
    """
    return LARGE * (4 if plain_operations.has_gpu() else 1)


class _Block:
    """Kernels of 1x1 pixels, concatenated along their channels and padded with zeros.

    Args:
        groups: the kernels, those with most rows first.
    """

    def __init__(self, groups: list[_Group]) -> None:
        self.bits = groups[0][0].quantizer.spec.bits
        self._groups: list[_Group] = []
        for group in groups:  # Flat kernels need not be concatenated before others are reshaped.
            self._groups += [[kernel] for kernel in group] if group[0].is_flat else [group]
        self._stacks = [
            _concatenate([kernel.weight for kernel in group], group[0].axis)
            for group in self._groups
        ]
        self._flat = [
            stack if group[0].is_flat else tf.reshape(stack, [1, 1, group[0].rows, -1])
            for group, stack in zip(self._groups, self._stacks, strict=True)
        ]
        rows = groups[0][0].rows
        padded = [_pad(kernel, rows) for kernel in self._flat]
        self._values = tf.stop_gradient(_concatenate(padded, -1))
        self.limits = largest_magnitudes(self._values, (-1,))

    def quantize(self, steps: ChannelSteps) -> Iterator[tuple[Any, tuple[tf.Tensor, tf.Tensor]]]:
        """Yields the quantizers with their weights, before and after quantization."""
        kernels = _split(steps.round(self._values), self._flat, -1)
        for kernel, stack, group in zip(kernels, self._stacks, self._groups, strict=True):
            values = kernel[:, :, : group[0].rows] if kernel.shape[2] > group[0].rows else kernel
            values = values if group[0].is_flat else tf.reshape(values, stack.shape)
            weights = [kernel.weight for kernel in group]
            quantized = _split(values, weights, group[0].axis)
            quantizers = [kernel.quantizer for kernel in group]
            yield from zip(quantizers, zip(weights, quantized, strict=True), strict=True)


def _quantize_weights(layers: list[keras.layers.Layer]) -> QuantizedWeights:
    """Quantizes the weights that are not alone, similar ones in one block."""
    groups: dict[Any, _Group] = collections.defaultdict(list)
    for layer in layers:
        for quantizer, weight in layer.yield_block_weights():
            kernel = _Kernel(quantizer, weight)
            groups[kernel.kind, kernel.sizes].append(kernel)
    blocks: dict[int, list[_Block]] = collections.defaultdict(list)
    for block in map(_Block, _form_blocks(groups.values())):
        blocks[block.bits].append(block)
    quantized: QuantizedWeights = {}
    for bits, members in blocks.items():  # Their limits need the same operations.
        limits = [block.limits for block in members]
        levels, *tensors = ChannelSteps.for_limits(replace_zeros(_concatenate(limits, -1)), bits)
        steps = zip(*(_split(tensor, limits, -1) for tensor in tensors), strict=True)
        for block, own in zip(members, steps, strict=True):
            quantized.update(block.quantize(ChannelSteps(levels, *own)))
    return quantized


def _form_blocks(groups: Iterable[_Group]) -> list[list[_Group]]:
    """Puts groups into one block if few zeros make them equally long, and it does not get large.

    A quarter of `_find_large` zeros costs less than the operations of a separate block.
    """
    blocks: list[list[_Group]] = []
    large = _find_large()
    most = large * (2 if plain_operations.has_gpu() else 1)
    for group in sorted(groups, key=lambda group: group[0].rows, reverse=True):
        zeros = {
            index: _size([*block, group]) - _size(block) - _size([group])
            for index, block in enumerate(blocks)
            if block[0][0].kind == group[0].kind and _size([*block, group]) < most
        }
        best = min(zeros, key=zeros.__getitem__, default=None)
        if best is not None and zeros[best] <= large // 4:
            blocks[best].append(group)
        else:
            blocks.append([group])
    return blocks


def _size(block: list[_Group]) -> int:
    return block[0][0].rows * sum(kernel.channels for group in block for kernel in group)


def _pad(kernel: tf.Tensor, rows: int) -> tf.Tensor:
    missing = rows - kernel.shape[2]
    return tf.pad(kernel, [(0, 0), (0, 0), (0, missing), (0, 0)]) if missing else kernel


def _concatenate(tensors: Sequence[tf.Tensor], axis: int) -> tf.Tensor:
    return tensors[0] if len(tensors) == 1 else tf.concat(tensors, axis)


def _split(tensor: tf.Tensor, like: Sequence[tf.Tensor], axis: int) -> list[tf.Tensor]:
    """Splits a tensor into the sizes that others have along an axis."""
    sizes = [other.shape[axis] for other in like]
    return [tensor] if len(sizes) == 1 else tf.split(tensor, sizes, axis)
