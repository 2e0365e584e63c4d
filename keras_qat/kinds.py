"""What kind of computation a call is, and what that means for quantization.

Most of it is data: a table of kinds by layer class, one by operation, one by activation function,
and sets of kinds. A new layer is a new line.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from keras_qat.hard_swish import HardSwish
from keras_qat.inner_layers import Contract, FoldSteps, Regularize, Roll, UnfoldSteps
from keras_qat.keras2.backend import keras
from keras_qat.keras2.graph import Call, class_path
from keras_qat.kernels import AFFINE, KERNELS
from keras_qat.operations import is_operation, number, operands

__all__ = [
    "ceiling_of",
    "is_known",
    "is_left_in_float",
    "is_mean_of_one",
    "kind_of",
    "label",
    "leave_in_float",
]

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
    _layers.ELU: "elu",
    _layers.UnitNormalization: "unit_norm",
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
    "nn.elu": "elu",
    "math.l2_normalize": "unit_norm",
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
    "reverse": "move",
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
    keras.activations.elu: "elu",
    tf.nn.elu: "elu",
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
    "unit_norm": (-1.0, 127 / 128),
}
"""Output ranges that the runtimes' int8 kernels fix: 1/256 or 1/128 per step."""

FIXED_RANGE_INT16 = (-1.0, 32767 / 32768)
"""The range of the same kinds in int16 kernels: 1/32768 per step."""

NO_INT16 = {"hard_swish", "prelu", "elu", "unit_norm"}
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
    return None if kind is None or _lacks_kernel(call, kind) else kind


def _lacks_kernel(call: Call, kind: str) -> bool:
    """Whether a layer is of a kind that has int8 kernels, but not with its options."""
    layer = call.layer
    if kind == "average_pooling":
        return getattr(layer, "data_format", "") == "channels_first"
    if kind == "product":
        return len(call.inputs) != 2 or getattr(layer, "normalize", False)
    if kind == "mean":
        return any(value.masked for value in call.inputs)
    if kind == "unit_norm":
        return not _is_along_last_axis(call)
    if type(layer) in _TRANSPOSED:
        return max(layer.dilation_rate) > 1
    if type(layer) is _layers.ELU:
        return float(layer.alpha) != 1
    if is_operation(layer) and layer.symbol == "compat.v1.pad":
        return not _pads_with_zeros(call)
    return False


def _is_along_last_axis(call: Call) -> bool:
    """Whether a normalization is along the last axis, and of any length but zero."""
    axis, epsilon = getattr(call.layer, "axis", None), None
    if is_operation(call.layer):
        _, axis, epsilon = operands(call, "x", "axis", "epsilon")
    rank = len(call.output.shape)
    axes = [int(each) % rank for each in tf.nest.flatten(axis) if each is not None]
    return rank > 1 and axes == [rank - 1] and (number(epsilon) or 0.0) <= 1e-5


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
