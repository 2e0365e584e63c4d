"""Cross-layer equalization: moves factors between layers to make channel ranges similar."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from keras_qat.config.arguments import answers_unknown
from keras_qat.graph.calls import Call, Graph
from keras_qat.graph.read_model import read_model
from keras_qat.imports.keras3 import as_keras_2
from keras_qat.imports.read_float import read_float
from keras_qat.keras2.backend import keras
from keras_qat.keras2.layers_and_models import clone
from keras_qat.lowering import LoweringContext, lower
from keras_qat.messages import warn_caller
from keras_qat.ops.registry import relu_maximum
from keras_qat.placement.fusion_groups import Group, find_groups
from keras_qat.training.schedule import is_quantized
from keras_qat.training.steps.custom_training import trains_itself

_layers = keras.layers
_KERNELS = {
    _layers.Conv1D: (-1,),
    _layers.Conv2D: (-1,),
    _layers.DepthwiseConv1D: (-2, -1),
    _layers.DepthwiseConv2D: (-2, -1),
    _layers.Dense: (-1,),
}
"""Layers that can be equalized -> axes of the output channels."""
_INPUTS = (-2,)
"""Axis of the input channels."""
_BETWEEN = (
    *(_layers.ZeroPadding1D, _layers.ZeroPadding2D, _layers.Dropout, _layers.SpatialDropout2D),
    *(_layers.MaxPooling1D, _layers.MaxPooling2D, _layers.GlobalMaxPooling2D),
    *(_layers.AveragePooling1D, _layers.AveragePooling2D),
    *(_layers.GlobalAveragePooling1D, _layers.GlobalAveragePooling2D),
)
"""Layers for which a factor of an input channel becomes a factor of the output channel."""
_ROUNDS = 20


@answers_unknown()
def equalize(model: keras.Model, *, verbose: int = 0) -> Any:
    """Makes the ranges of channels in a float model similar, without changing its outputs.

    Each output channel of a layer is divided by a factor, and the weights that read this channel in
    the next layer are multiplied by it. Afterwards, a few channels with much larger weights no
    longer determine the range of the entire tensor. Depthwise-separable networks gain most,
    especially with one range for all weights of a layer. Factors are powers of two, so the outputs
    are bit-exact.

    It equalizes pairs of successive convolutions, depthwise convolutions and dense layers, with or
    without BatchNormalization, and with a ReLU, pooling, padding or nothing between them. It skips
    pairs with a ReLU6 between them, because 6 does not scale with the factor. It skips layers whose
    output is read by several layers, as in residual networks.

    Args:
        model: a float model, as for `quantize_model`. It is not changed.
        verbose: 1 prints which layers were equalized, and why others were not.

    Returns:
        A float model with equalized weights.

    Raises:
        ValueError: if the model cannot be read, is quantized, or has a custom `train_step`.

    Warns:
        UserWarning: if nothing can be equalized.

    Example:
        >>> qat = keras_qat.quantize_model(keras_qat.equalize(model))

    Source: Nagel et al. 2019 (arXiv:1906.04721).
    """
    if is_quantized(model):
        raise ValueError(
            f"'{model.name}' is quantized already. Equalize the float model, and quantize that."
        )
    if trains_itself(model):
        raise ValueError(
            f"{type(model).__name__} '{model.name}' defines how it trains, but an equalized "
            f"copy would not. Equalize its layers and set the weights: model.set_weights("
            f"keras_qat.equalize(keras.Model(model.inputs, model.outputs)).get_weights())."
        )
    model, _ = read_float(as_keras_2(model))
    copy = keras.models.clone_model(model, clone_function=clone)
    copy.set_weights(model.get_weights())
    graph = lower(read_model(copy), LoweringContext(activations=False))
    candidates = list(_pairs(graph))
    pairs = [
        (group, following) for group, following, reason in candidates if following and not reason
    ]
    for group, _, reason in candidates if verbose else []:
        print(f"{group.kernel.name}: {reason or 'equalized'}")
    if not pairs:
        reasons = [reason for *_, reason in candidates if reason]
        why = f": {max(reasons, key=reasons.count)}" if reasons else ""
        warn_caller(f"No layers of '{model.name}' can be equalized{why}.")
    layers = {group: _Layer(group, graph) for pair in pairs for group in pair}
    for _ in range(_ROUNDS):
        changes = [_equalize(layers[group], layers[following]) for group, following in pairs]
        if not any(changes):
            break
    for layer in layers.values():
        layer.write()
    return copy


def _pairs(graph: Graph) -> Iterator[tuple[Group, Group | None, str]]:
    """Yield pairs of successive layers, and why they cannot be equalized; "" if they can."""
    all_groups = find_groups(graph, affine=False)
    by_kernel = {group.kernel: group for group in all_groups}
    readers = graph.find_single_consumers()
    for group in all_groups:
        if type(group.kernel.layer) not in _KERNELS:
            continue
        following = readers.get(group.output)
        while following is not None and isinstance(following.layer, _BETWEEN):
            following = readers.get(following.output)
        other = by_kernel.get(following) if following is not None else None
        yield group, other, _explain_skipped(group, other, following)


def _explain_skipped(group: Group, other: Group | None, following: Call | None) -> str:
    """Return the reason why two layers cannot be equalized; "" if they can."""
    if following is None:
        return "its output is read several times, or is an output of the model"
    if other is None or type(following.layer) not in _KERNELS:
        return f"{type(following.layer).__name__} follows"
    if group.shared or other.shared:
        return "one of the layers is called several times"
    maximum = group.activation and relu_maximum(group.activation.layer)
    if group.activation is not None and maximum != np.inf:
        return f"its ReLU ends at {maximum:g}, whatever the factor"
    if group.batch_norm is not None and not group.batch_norm.layer.scale:
        return "its BatchNormalization has no factor (scale=False)"
    layer = other.kernel.layer
    is_last = getattr(layer, "data_format", "channels_last") == "channels_last"
    if getattr(layer, "groups", 1) != 1 or not is_last:
        return "the next convolution has groups, or its channels come first"
    return ""


class _Weight(NamedTuple):
    """A variable and its value."""

    variable: Any
    value: np.ndarray


class _Layer:
    """The weights of a layer and its BatchNormalization as arrays, which equalization changes."""

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

    def _reshape(self, factor: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        rank, shape = self.kernel.value.ndim, self.kernel.value.shape
        sizes = [shape[axis] if axis in axes else 1 for axis in range(-rank, 0)]
        return factor.reshape(sizes) if factor.size > 1 else factor

    def largest(self, axes: tuple[int, ...]) -> np.ndarray:
        """Returns the largest folded weight of each channel along `axes`, as a vector."""
        folded = np.abs(self.kernel.value * self._reshape(self.factor, self.axes))
        rest = tuple(axis for axis in range(-folded.ndim, 0) if axis not in axes)
        return folded.max(rest).reshape(-1)

    def divide_outputs(self, factor: np.ndarray) -> None:
        """Divides each output channel by its factor."""
        for weight in self.scaled:
            by = self._reshape(factor, self.axes) if weight is self.kernel else factor
            np.divide(weight.value, by, out=weight.value)
        if self.norm:
            self.factor = self.factor / factor

    def multiply_inputs(self, factor: np.ndarray) -> None:
        """Multiplies the weights that read each input channel by its factor."""
        np.multiply(self.kernel.value, self._reshape(factor, _INPUTS), out=self.kernel.value)

    def write(self) -> None:
        """Assigns the new values to the variables."""
        for weight in {id(weight): weight for weight in [self.kernel, *self.scaled]}.values():
            weight.variable.assign(weight.value)


def _weights(call: Call, graph: Graph) -> list[_Weight]:
    """Return the weights of a layer, or of the original layer if lowering created it."""
    variables = graph.weights.get(call.layer, call.layer.weights)
    return [_Weight(variable, variable.numpy().copy()) for variable in variables]


def _equalize(layer: _Layer, following: _Layer) -> bool:
    """Equalize the channels between two successive layers, and return whether any changed."""
    out, into = layer.largest(layer.axes), following.largest(_INPUTS)
    is_used = (out > 0) & (into > 0)
    ratio = np.where(is_used, out, 1.0) / np.where(is_used, into, 1.0)
    factor = np.exp2(np.round(np.log2(ratio) / 2)).astype(np.float32)
    layer.divide_outputs(factor)
    following.multiply_inputs(factor)
    return bool(np.any(factor != 1))
