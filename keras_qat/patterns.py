"""What kind of computation a call is, and which calls are quantized as one.

All of it is data: a table of kinds by layer class, a table of activations by name, and what each
kind means for quantization. A new layer is a new line.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from keras_qat.backend import keras
from keras_qat.graph import Call, Graph, Value, values_in
from keras_qat.kernels import KERNELS

__all__ = ["Group", "groups", "kind_of"]

_layers = keras.layers

KINDS: dict[type, str] = {
    **dict.fromkeys(KERNELS, "kernel"),
    _layers.BatchNormalization: "batch_norm",
    _layers.Add: "add",
    _layers.Multiply: "multiply",
    _layers.Concatenate: "concatenate",
    _layers.AveragePooling2D: "average_pooling",
    _layers.GlobalAveragePooling2D: "mean",
    **dict.fromkeys(
        (
            _layers.MaxPooling2D,
            _layers.GlobalMaxPooling2D,
            _layers.Flatten,
            _layers.Reshape,
            _layers.Permute,
            _layers.ZeroPadding2D,
            _layers.Cropping2D,
            _layers.Dropout,
            _layers.SpatialDropout2D,
            _layers.GaussianNoise,
            _layers.GaussianDropout,
            _layers.AlphaDropout,
            _layers.ActivityRegularization,
            _layers.InputLayer,
        ),
        "move",
    ),
    _layers.Softmax: "softmax",
}
"""Layer class -> kind. Activation layers are told by `_activation_kind`."""

ACTIVATIONS: dict[Any, str] = {
    keras.activations.linear: "linear",
    keras.activations.relu: "relu",
    tf.nn.relu: "relu",
    tf.nn.relu6: "relu6",
    keras.activations.softmax: "softmax",
    tf.nn.softmax: "softmax",
    keras.activations.sigmoid: "sigmoid",
    tf.nn.sigmoid: "sigmoid",
    keras.activations.tanh: "tanh",
    tf.nn.tanh: "tanh",
}
"""Activation function -> kind, for those that have int8 kernels. `relu6` clips to 0..6."""

CLIPS = {"relu", "relu6"}
"""Activations that the runtime merges into the computation before them."""

MERGES_CLIP = {"kernel", "add", "multiply"}
"""Kinds that the runtime merges a clipping activation into."""

RANGE_KEEPING = {"move", "linear", "average_pooling", "concatenate"}
"""Kinds whose output has the range of their inputs."""

ROUNDING = {"average_pooling"}
"""Of these, the kinds whose results lie between the codes and are rounded again."""

FIXED_RANGES: dict[str, tuple[float, float]] = {
    "softmax": (0.0, 255 / 256),
    "sigmoid": (0.0, 255 / 256),
    "tanh": (-1.0, 127 / 128),
}
"""Output ranges that the runtimes' int8 kernels fix: 1/256 or 1/128 per step."""

NON_NEGATIVE = {"relu", "relu6"}
"""Kinds whose output is never below zero."""


def kind_of(call: Call) -> str | None:
    """The kind of computation, or None for a layer that is not known."""
    layer = call.layer
    if type(layer) in (_layers.Activation, _layers.ReLU):
        return _activation_kind(layer)
    kind = KINDS.get(type(layer))
    if kind == "average_pooling" and layer.data_format == "channels_first":
        return None
    return kind


def _activation_kind(layer: Any) -> str | None:
    if isinstance(layer, _layers.ReLU):
        if layer.negative_slope or layer.threshold:
            return None
        limit = None if layer.max_value is None else float(layer.max_value)
        return {None: "relu", 6.0: "relu6"}.get(limit)
    return ACTIVATIONS.get(layer.activation)


@dataclasses.dataclass(eq=False)
class Group:
    """Calls that one wrapper stands for: a kernel, its BatchNormalization, its activation."""

    kernel: Call
    batch_norm: Call | None = None
    activation: Call | None = None

    @property
    def calls(self) -> list[Call]:
        """The calls, in order."""
        return [call for call in (self.kernel, self.batch_norm, self.activation) if call]

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """The attributes that hold weights to quantize -> axes of their output channels."""
        return KERNELS[type(self.kernel.layer)]

    @property
    def output(self) -> Value:
        """What the group as a whole computes."""
        return self.calls[-1].output


def groups(graph: Graph, folds_bias: bool = True) -> list[Group]:
    """Finds the kernel -> [BatchNormalization] -> [activation] sequences, longest first.

    A sequence ends where somebody else reads its result as well. A layer that is called more
    than once takes its BatchNormalization along only if all of its calls share that too, and its
    activation never, as each call has a range of its own.

    Args:
        graph: a lowered graph.
        folds_bias: whether a BatchNormalization folds into a layer that has a bias.
    """
    consumers = graph.consumers()
    counts = graph.call_counts()
    outputs = set(values_in(graph.outputs))

    def only_consumer(value: Value) -> Call | None:
        readers = consumers[value]
        return readers[0] if len(readers) == 1 and value not in outputs else None

    def batch_norm_behind(call: Call) -> Call | None:
        follower = only_consumer(call.output)
        if follower is None or kind_of(follower) != "batch_norm":
            return None
        if not folds_bias and call.layer.use_bias:
            return None
        return follower if _normalizes_channels(follower.layer, call) else None

    norms = {call: batch_norm_behind(call) for call in graph.calls if kind_of(call) == "kernel"}
    found = []
    for call, norm in norms.items():
        if norm is not None:
            partners = {
                other and other.layer for each, other in norms.items() if each.layer is call.layer
            }
            if partners != {norm.layer} or counts[norm.layer] != counts[call.layer]:
                norm = None
        group = Group(call, norm)
        follower = only_consumer(group.output)
        if follower is not None and kind_of(follower) in CLIPS and counts[call.layer] == 1:
            group.activation = follower
        found.append(group)
    return found


def _normalizes_channels(batch_norm: Any, kernel: Call) -> bool:
    axis = batch_norm.axis
    axes = list(axis) if isinstance(axis, (list, tuple)) else [axis]
    rank = len(kernel.output.shape)
    channels_first = getattr(kernel.layer, "data_format", None) == "channels_first"
    channel_axis = 1 if channels_first else rank - 1
    return [each % rank for each in axes] == [channel_axis]
