"""Cross-layer equalization: ranges of channels become alike, and the next layer makes up for it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from keras_qat.frontend import graph as graph_lib
from keras_qat.frontend.graph import Call, Graph, values_in
from keras_qat.frontend.keras2.backend import keras
from keras_qat.frontend.keras2.read_float import read_float
from keras_qat.frontend.keras3 import as_keras_2
from keras_qat.lowering import lower
from keras_qat.ops.registry import relu_maximum
from keras_qat.placement.fusion_groups import Group, groups
from keras_qat.training.schedule import is_quantized

__all__ = ["equalize"]

_layers = keras.layers
_KERNELS = {
    _layers.Conv1D: (-1,),
    _layers.Conv2D: (-1,),
    _layers.DepthwiseConv1D: (-2, -1),
    _layers.DepthwiseConv2D: (-2, -1),
    _layers.Dense: (-1,),
}
"""Layers that can be equalized -> axes of the output channels. Their inputs' are along -2."""
_BETWEEN = (
    *(_layers.ZeroPadding1D, _layers.ZeroPadding2D, _layers.Dropout, _layers.SpatialDropout2D),
    *(_layers.MaxPooling1D, _layers.MaxPooling2D, _layers.GlobalMaxPooling2D),
    *(_layers.AveragePooling1D, _layers.AveragePooling2D),
    *(_layers.GlobalAveragePooling1D, _layers.GlobalAveragePooling2D),
)
"""Layers through which a factor of a channel passes."""
_ROUNDS = 20


def equalize(model: Any, *, verbose: int = 0) -> Any:
    """Makes the channels of a float model's layers alike in range, without changing its outputs.

    A ReLU lets factors pass: an output channel of one layer is divided by a factor, and what the
    next one reads of that channel is multiplied by it. Channels whose weights are far larger than
    others' then no longer take the range of the tensor for themselves, which costs the others their
    levels. It pays for depthwise-separable networks, and most with one range for all weights of a
    layer. Factors are powers of two, so that a float model's outputs stay the same to the last bit.

    Equalized are convolutions, depthwise ones and dense layers, with BatchNormalization or without,
    that come one after the other, with a ReLU, pooling, padding or nothing between them. A ReLU6
    ends at 6 whatever the factor, so that pairs with one stay as they are, as do layers with
    several readers, which residual networks have.

    Args:
        model: a float model, as for `quantize_model`. It is not changed.
        verbose: 1 prints what was equalized, and which layers were not and why.

    Returns:
        A float model with other weights.

    Raises:
        ValueError: if the model cannot be read, or is quantized.

    Warns:
        UserWarning: if there is nothing that can be equalized.

    Example:
        >>> qat = keras_qat.quantize_model(keras_qat.equalize(model))

    Source: Nagel et al. 2019 (arXiv:1906.04721).
    """
    if is_quantized(model):
        raise ValueError(
            f"'{model.name}' is quantized already. Equalize the float model, and quantize that."
        )
    model, _ = read_float(as_keras_2(model))
    copy = keras.models.clone_model(model, clone_function=graph_lib.clone)
    copy.set_weights(model.get_weights())
    graph = lower(graph_lib.read(copy), activations=False)
    found = list(_pairs(graph))
    pairs = [(one, other) for one, other, reason in found if other is not None and not reason]
    for one, _, reason in found if verbose else []:
        print(f"{one.kernel.name}: {reason or 'equalized'}")
    if not pairs:
        reasons = [reason for *_, reason in found if reason]
        why = f": {max(reasons, key=reasons.count)}" if reasons else ""
        warnings.warn(f"No layers of '{model.name}' can be equalized{why}.", stacklevel=2)
    layers = {group: _Layer(group, graph) for pair in pairs for group in pair}
    for _ in range(_ROUNDS):
        changes = [_equalize(layers[one], layers[other]) for one, other in pairs]
        if not any(changes):
            break
    for layer in layers.values():
        layer.write()
    return copy


def _pairs(graph: Graph) -> Iterator[tuple[Group, Group | None, str]]:
    """Layers one after the other, and why they cannot be equalized, if so."""
    found = groups(graph, affine=False)
    by_kernel = {group.kernel: group for group in found}
    readers, outputs = graph.consumers(), set(values_in(graph.outputs))

    def reader_of(call: Call) -> Call | None:
        value = call.output
        return readers[value][0] if len(readers[value]) == 1 and value not in outputs else None

    for group in found:
        if type(group.kernel.layer) not in _KERNELS:
            continue
        following = reader_of(group.calls[-1])
        while following is not None and isinstance(following.layer, _BETWEEN):
            following = reader_of(following)
        other = by_kernel.get(following) if following is not None else None
        yield group, other, _why_not(group, other, following)


def _why_not(group: Group, other: Group | None, following: Call | None) -> str:
    """The reason why two layers cannot be equalized; "" if they can."""
    if following is None:
        return "its output is read several times, or is one of the model's"
    if other is None:
        return f"{type(following.layer).__name__} follows"
    if type(other.kernel.layer) not in _KERNELS:
        return f"{type(other.kernel.layer).__name__} follows"
    if group.shared or other.shared:
        return "one of the layers is called several times"
    maximum = group.activation and relu_maximum(group.activation.layer)
    if group.activation is not None and maximum != np.inf:
        return f"its ReLU ends at {maximum:g}, whatever the factor"
    if group.batch_norm is not None and not group.batch_norm.layer.scale:
        return "its BatchNormalization has no factor (scale=False)"
    layer = other.kernel.layer
    last = getattr(layer, "data_format", "channels_last") == "channels_last"
    if getattr(layer, "groups", 1) != 1 or not last:
        return "the next convolution has groups, or its channels come first"
    return ""


class _Weight(NamedTuple):
    """A variable and its value."""

    variable: Any
    value: np.ndarray


class _Layer:
    """The weights of a group as numbers, and what they become."""

    def __init__(self, group: Group, graph: Graph) -> None:
        self.axes = _KERNELS[type(group.kernel.layer)]
        kernel, *self.biases = _weights(group.kernel, graph)
        self.kernel = kernel
        self.norm = [] if group.batch_norm is None else _weights(group.batch_norm, graph)
        self.factor = np.ones(1, np.float32)
        if group.batch_norm is not None:
            norm = group.batch_norm.layer
            gamma = self.norm[0].value if norm.scale else np.float32(1)
            self.factor = gamma / np.sqrt(self.norm[-1].value + norm.epsilon)
            self.scaled = self.norm[: norm.scale + norm.center]
        else:
            self.scaled = [kernel, *self.biases]

    def _shaped(self, factor: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        rank, shape = self.kernel.value.ndim, self.kernel.value.shape
        sizes = [shape[axis] if axis in axes else 1 for axis in range(-rank, 0)]
        return factor.reshape(sizes) if factor.size > 1 else factor

    def _folded(self) -> np.ndarray:
        return np.abs(self.kernel.value * self._shaped(self.factor, self.axes))

    def ranges_out(self) -> np.ndarray:
        """The largest folded weight of each output channel."""
        rank = self.kernel.value.ndim
        rest = tuple(axis for axis in range(-rank, 0) if axis not in self.axes)
        return self._folded().max(rest).reshape(-1)

    def ranges_in(self) -> np.ndarray:
        """The largest folded weight of each input channel."""
        rank = self.kernel.value.ndim
        return self._folded().max(tuple(axis for axis in range(-rank, 0) if axis != -2))

    def divide_outputs(self, factor: np.ndarray) -> None:
        """Divides each output channel by its factor."""
        for weight in self.scaled:
            by = self._shaped(factor, self.axes) if weight is self.kernel else factor
            np.divide(weight.value, by, out=weight.value)
        if self.norm:
            self.factor = self.factor / factor

    def multiply_inputs(self, factor: np.ndarray) -> None:
        """Multiplies what is read of each channel by its factor."""
        np.multiply(self.kernel.value, self._shaped(factor, (-2,)), out=self.kernel.value)

    def write(self) -> None:
        """Gives the variables their new values."""
        for weight in {id(each): each for each in [self.kernel, *self.scaled]}.values():
            weight.variable.assign(weight.value)


def _weights(call: Call, graph: Graph) -> list[_Weight]:
    """Of a layer, or of that which lowering took a part from."""
    variables = graph.weights.get(call.layer, call.layer.weights)
    return [_Weight(each, each.numpy().copy()) for each in variables]


def _equalize(one: _Layer, other: _Layer) -> bool:
    """Makes the ranges of a pair's channels alike; whether anything changed."""
    out, into = one.ranges_out(), other.ranges_in()
    known = (out > 0) & (into > 0)
    ratio = np.where(known, out, 1.0) / np.where(known, into, 1.0)
    factor = np.exp2(np.round(np.log2(ratio) / 2)).astype(np.float32)
    one.divide_outputs(factor)
    other.multiply_inputs(factor)
    return bool(np.any(factor != 1))
