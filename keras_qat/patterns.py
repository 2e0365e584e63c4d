"""What kind of computation a call is, and which calls are quantized as one.

All of it is data: a table of kinds by layer class, a table of activations by name, and what each
kind means for quantization. A new layer is a new line.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf

from keras_qat.backend import keras
from keras_qat.graph import Call, Graph, Value, class_path, values_in
from keras_qat.hard_swish import HardSwish
from keras_qat.inner_layers import Contract, FoldSteps, Regularize, Roll, UnfoldSteps
from keras_qat.kernels import AFFINE, FOLDABLE, KERNELS
from keras_qat.operations import is_operation, number, operands

__all__ = ["Group", "groups", "is_left_in_float", "kind_of", "leave_in_float"]

_layers = keras.layers

KINDS: dict[type, str] = {
    **dict.fromkeys(KERNELS, "kernel"),
    **dict.fromkeys(AFFINE, "affine"),
    _layers.Add: "add",
    _layers.Subtract: "subtract",
    _layers.Multiply: "multiply",
    _layers.Maximum: "maximum",
    _layers.Minimum: "maximum",
    _layers.Concatenate: "concatenate",
    _layers.AveragePooling1D: "average_pooling",
    _layers.AveragePooling2D: "average_pooling",
    _layers.GlobalAveragePooling1D: "mean",
    _layers.GlobalAveragePooling2D: "mean",
    _layers.GlobalAveragePooling3D: "mean",
    _layers.LeakyReLU: "leaky_relu",
    _layers.PReLU: "prelu",
    _layers.Softmax: "softmax",
    HardSwish: "hard_swish",
    Contract: "product",
    _layers.Dot: "product",
    FoldSteps: "move",
    Regularize: "move",
    Roll: "move",
    UnfoldSteps: "move",
    **dict.fromkeys(
        (
            _layers.MaxPooling1D,
            _layers.MaxPooling2D,
            _layers.GlobalMaxPooling1D,
            _layers.GlobalMaxPooling2D,
            _layers.Flatten,
            _layers.Reshape,
            _layers.Permute,
            _layers.RepeatVector,
            _layers.ZeroPadding1D,
            _layers.ZeroPadding2D,
            _layers.Cropping1D,
            _layers.Cropping2D,
            _layers.Dropout,
            _layers.SpatialDropout1D,
            _layers.SpatialDropout2D,
            _layers.GaussianNoise,
            _layers.GaussianDropout,
            _layers.AlphaDropout,
            _layers.ActivityRegularization,
            _layers.Identity,
            _layers.RandomFlip,
            _layers.RandomRotation,
            _layers.RandomZoom,
            _layers.RandomTranslation,
            _layers.RandomContrast,
            _layers.RandomBrightness,
            _layers.RandomHeight,
            _layers.RandomWidth,
            _layers.UpSampling1D,
            _layers.UpSampling3D,
            _layers.ZeroPadding3D,
            _layers.Cropping3D,
            _layers.GlobalMaxPooling3D,
            _layers.SpatialDropout3D,
            _layers.InputLayer,
        ),
        "move",
    ),
}
"""Layer class -> kind. Activation layers are told by `_activation_kind`, UpSampling2D by its mode,
operations on symbolic tensors by `OPERATIONS`."""

OPERATIONS: dict[str, str] = {
    "__operators__.add": "add",
    "math.add": "add",
    "math.subtract": "subtract",
    "math.multiply": "multiply",
    "math.maximum": "maximum",
    "math.minimum": "maximum",
    "linalg.matmul": "product",
    "concat": "concatenate",
    "math.reduce_mean": "mean",
    "nn.relu": "relu",
    "nn.relu6": "relu6",
    "nn.softmax": "softmax",
    "math.sigmoid": "sigmoid",
    "math.tanh": "tanh",
    "nn.leaky_relu": "leaky_relu",
    "nn.gelu": "gelu",
    "__operators__.getitem": "move",
    "slice": "move",
    "reshape": "move",
    "transpose": "move",
    "compat.v1.transpose": "move",
    "squeeze": "move",
    "compat.v1.squeeze": "move",
    "compat.v1.gather": "move",
    "compat.v1.pad": "move",
    "tile": "move",
    "expand_dims": "move",
    "identity": "move",
    "stop_gradient": "move",
    "math.reduce_max": "move",
    "math.reduce_min": "move",
    "split": "move",
    "unstack": "move",
    "repeat": "move",
    "nn.depth_to_space": "move",
    "nn.space_to_depth": "move",
    "broadcast_to": "move",
    "stack": "concatenate",
    "nn.max_pool": "move",
    "nn.max_pool2d": "move",
    "nn.avg_pool": "average_pooling",
    "nn.avg_pool2d": "average_pooling",
    "compat.v1.shape": "index",
    "shape": "index",
    "math.argmax": "index",
    "math.argmin": "index",
}
"""TensorFlow's name of an operation on symbolic tensors -> the kind of the layer it stands for."""

_TRANSPOSED = (_layers.Conv1DTranspose, _layers.Conv2DTranspose)
"""Layers that have no kernels with dilation."""

_APPLICATIONS = {"applications.convnext.LayerScale": "affine"}
"""Layers that keras.applications defines but does not export, by `graph.class_path`."""

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
    tf.nn.leaky_relu: "leaky_relu",
    keras.activations.gelu: "gelu",
    tf.nn.gelu: "gelu",
}
"""Activation function -> kind, for those that have int8 kernels. `relu6` clips to 0..6."""

CLIPS = {"relu", "relu6", "relu_n"}
"""Activations that the runtime merges into the computation before them."""

MERGES_CLIP = {"kernel", "affine", "add", "subtract", "multiply"}
"""Kinds that the runtime merges a clipping activation into."""

RANGE_KEEPING = {"move", "linear", "maximum", "average_pooling", "resize", "concatenate"}
"""Kinds whose output has the range of their inputs."""

ROUNDING = {"average_pooling", "resize"}
"""Of these, the kinds whose results lie between the codes and are rounded again."""

POOLING = (_layers.MaxPooling2D, _layers.AveragePooling2D)
"""Layers that the runtime merges a clipping activation into, in the range of their input."""

FIXED_RANGES: dict[str, tuple[float, float]] = {
    "softmax": (0.0, 255 / 256),
    "sigmoid": (0.0, 255 / 256),
    "tanh": (-1.0, 127 / 128),
}
"""Output ranges that the runtimes' int8 kernels fix: 1/256 or 1/128 per step."""

FIXED_RANGE_INT16 = (-1.0, 32767 / 32768)
"""The range of the same kinds in int16 kernels: 1/32768 per step."""

NO_INT16 = {"hard_swish", "prelu"}
"""Kinds that have int8 kernels, but no int16 ones."""

NON_NEGATIVE = {"relu", "relu6", "relu_n"}
"""Kinds whose output is never below zero."""


def kind_of(call: Call) -> str | None:
    """The kind of computation, or None for a layer that is not known or was left in float."""
    layer = call.layer
    if is_left_in_float(layer):
        return None
    if type(layer) in (_layers.Activation, _layers.ReLU):
        return _activation_kind(layer)
    if type(layer) in (_layers.UpSampling2D, _layers.Resizing):
        return {"nearest": "move", "bilinear": "resize"}.get(layer.interpolation)
    if type(layer) is _layers.Softmax and len(call.inputs) > 1:  # With a mask.
        return None
    if is_mean_of_one(call):
        return "move"
    return _table_kind(call)


def leave_in_float(layer: Any) -> None:
    """Makes a layer of a quantization-aware model one of no kind, as its plan says."""
    layer._keras_qat_in_float = True


def is_left_in_float(layer: Any) -> bool:
    """Whether `leave_in_float` was called on a layer."""
    return getattr(layer, "_keras_qat_in_float", False)


def _table_kind(call: Call) -> str | None:
    layer = call.layer
    kind = OPERATIONS.get(str(layer.symbol)) if is_operation(layer) else None
    kind = kind or KINDS.get(type(layer)) or _APPLICATIONS.get(class_path(layer))
    if getattr(layer, "data_format", "") == "channels_first" and kind == "average_pooling":
        return None
    if type(layer) in _TRANSPOSED and max(layer.dilation_rate) > 1:
        return None
    if kind == "product" and (len(call.inputs) != 2 or getattr(layer, "normalize", False)):
        return None
    if kind == "mean" and any(value.masked for value in call.inputs):
        return None
    if is_operation(layer) and layer.symbol == "compat.v1.pad" and not _pads_with_zeros(call):
        return None
    return kind


def _pads_with_zeros(call: Call) -> bool:
    """Whether padding adds zeros or copies, which lie in any range."""
    names = ("tensor", "paddings", "mode", "name", "constant_values")
    padded = operands(call, *names)[-1]
    return padded is None or number(padded) == 0


def is_mean_of_one(call: Call) -> bool:
    """Whether a call is a mean over axes of size 1.

    Converters drop such a mean, and a range of its own with it.
    """
    if _table_kind(call) != "mean":
        return False
    before, after = call.inputs[0].shape, call.output.shape
    if not before or not after:  # Without a batch axis.
        return False
    known = [[size for size in shape[1:] if size is not None] for shape in (before, after)]
    if len(known[0]) < len(before) - 1 or len(known[1]) < len(after) - 1 or before[0] != after[0]:
        return False
    return math.prod(known[0]) == math.prod(known[1])


def is_known(layer: Any) -> bool:
    """Whether a layer is Keras' own, and not a custom one with a rule."""
    return is_operation(layer) or type(layer).__module__.split(".")[0] in ("keras", "tf_keras")


def _activation_kind(layer: Any) -> str | None:
    if isinstance(layer, _layers.ReLU):
        if layer.threshold or (layer.negative_slope and layer.max_value is not None):
            return None
        if layer.negative_slope:
            return "leaky_relu"
        limit = None if layer.max_value is None else float(layer.max_value)
        return {None: "relu", 6.0: "relu6"}.get(limit, "relu_n")
    return ACTIVATIONS.get(layer.activation)


def label(layer: Any) -> str:
    """What to call a layer in a sentence: an activation or operation by its own name."""
    if is_operation(layer):
        return f"tf.{layer.symbol}"
    if type(layer) is _layers.Activation:
        return str(getattr(layer.activation, "__name__", layer.activation))
    return type(layer).__name__


def ceiling_of(layer: Any) -> float | None:
    """Where an activation layer clips, if it is a ReLU: infinity for one without a maximum."""
    kind = OPERATIONS.get(str(layer.symbol)) if is_operation(layer) else _activation_kind(layer)
    if kind == "relu_n":
        return float(layer.max_value)
    return {"relu": math.inf, "relu6": 6.0}.get(str(kind))


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
        return KERNELS.get(type(self.kernel.layer), {})

    @property
    def output(self) -> Value:
        """What the group as a whole computes."""
        return self.calls[-1].output


def groups(graph: Graph, folds_bias: bool = True, affine: bool = True) -> list[Group]:
    """Finds the kernel -> [BatchNormalization] -> [activation] sequences, longest first.

    A sequence ends where somebody else reads its result as well. A layer that is called more
    than once takes its BatchNormalization along only if all of its calls share that too, and its
    activation never, as each call has a range of its own.

    Args:
        graph: a lowered graph.
        folds_bias: whether a BatchNormalization folds into a layer that has a bias.
        affine: whether layers in `kernels.AFFINE` that are not folded are kernels of their own.
    """
    consumers = graph.consumers()
    counts = graph.call_counts()
    outputs = set(values_in(graph.outputs))

    def only_consumer(value: Value) -> Call | None:
        readers = consumers[value]
        return readers[0] if len(readers) == 1 and value not in outputs else None

    def batch_norm_behind(call: Call) -> Call | None:
        follower = only_consumer(call.output)
        if follower is None or not is_batch_norm(follower):
            return None
        if type(call.layer) not in FOLDABLE:
            return None
        if not folds_bias and call.layer.use_bias:
            return None
        return follower if _is_per_channel(follower, _channel_axis(call)) else None

    norms = {call: batch_norm_behind(call) for call in graph.calls if kind_of(call) == "kernel"}
    for call, norm in norms.items():
        if norm is not None:
            partners = {
                other and other.layer for each, other in norms.items() if each.layer is call.layer
            }
            if partners != {norm.layer} or counts[norm.layer] != counts[call.layer]:
                norms[call] = None
    folded = set(norms.values())
    found = []
    for call in graph.calls:
        alone = affine and kind_of(call) == "affine" and call not in folded
        if not (call in norms or (alone and _is_per_channel(call, _channel_axis(call)))):
            continue
        group = Group(call, norms.get(call))
        follower = only_consumer(group.output)
        if follower is not None and kind_of(follower) in CLIPS and counts[call.layer] == 1:
            group.activation = follower
        found.append(group)
    return found


def is_batch_norm(call: Call) -> bool:
    """Whether a call is a BatchNormalization."""
    return isinstance(call.layer, _layers.BatchNormalization)


def _channel_axis(call: Call) -> int:
    channels_first = getattr(call.layer, "data_format", None) == "channels_first"
    return 1 if channels_first else len(call.output.shape) - 1


def _is_per_channel(call: Call, channel_axis: int) -> bool:
    """Whether an affine layer has one factor and offset for each channel."""
    axis = getattr(call.layer, "axis", channel_axis)
    axes = list(axis) if isinstance(axis, (list, tuple)) else [axis]
    rank = len(call.output.shape)
    return rank > 1 and [each % rank for each in axes] in ([channel_axis], [])
