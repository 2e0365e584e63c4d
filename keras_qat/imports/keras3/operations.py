"""Converts functions of Keras 3 to Keras 2: activations, and operations on symbolic tensors.

Keras 3's operations (`x + y`, `keras.ops.relu(x)`) call TensorFlow functions. If the tensors are
symbolic tensors of Keras 2, Keras 2 creates a layer for each call. Most operations are converted in
this way. `OPERATIONS` lists operations that would fail or become many layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.helper_layers.operations import Contract
from keras_qat.keras2.backend import is_symbolic, keras, register


@register
def relu6(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.relu6(x)


@register
def leaky_relu(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.leaky_relu(x, 0.2)


@register
def hard_sigmoid(x: tf.Tensor) -> tf.Tensor:
    """Computes relu6(x + 3) / 6. In Keras 2, `hard_sigmoid` clips 0.2 x + 0.5."""
    return tf.nn.relu6(x + 3.0) * (1.0 / 6.0)


@register
def hard_silu(x: tf.Tensor) -> tf.Tensor:
    """Computes x * hard_sigmoid(x), also called hard swish."""
    return x * hard_sigmoid(x)


@register
def hard_tanh(x: tf.Tensor) -> tf.Tensor:
    return tf.clip_by_value(x, -1.0, 1.0)


@register
def log_sigmoid(x: tf.Tensor) -> tf.Tensor:
    return tf.math.log_sigmoid(x)


@register
def log_softmax(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.log_softmax(x)


@register
def celu(x: tf.Tensor) -> tf.Tensor:
    """Computes exp(x) - 1 for negative values, and returns positive values unchanged."""
    return tf.nn.elu(x)


@register
def glu(x: tf.Tensor) -> tf.Tensor:
    """Multiplies one half of the channels by the sigmoid of the other half."""
    values, gates = tf.split(x, 2, axis=-1)
    return values * tf.sigmoid(gates)


@register
def squareplus(x: tf.Tensor) -> tf.Tensor:
    return (x + tf.sqrt(tf.square(x) + 4.0)) / 2.0


@register
def soft_shrink(x: tf.Tensor) -> tf.Tensor:
    """Moves `x` towards 0 by 0.5."""
    return tf.sign(x) * tf.nn.relu(tf.abs(x) - 0.5)


@register
def hard_shrink(x: tf.Tensor) -> tf.Tensor:
    """Sets values within 0.5 of 0 to 0."""
    return tf.where(tf.abs(x) > 0.5, x, tf.zeros_like(x))


@register
def tanh_shrink(x: tf.Tensor) -> tf.Tensor:
    return x - tf.tanh(x)


_SAME = ["elu", "exponential", "gelu", "linear", "mish", "relu", "selu", "sigmoid", "softmax"]
_SAME += ["softplus", "softsign", "tanh"]
_DEFINED_HERE: list[Any] = [celu, glu, hard_shrink, hard_sigmoid, hard_silu, hard_tanh, leaky_relu]
_DEFINED_HERE += [log_sigmoid, log_softmax, relu6, soft_shrink, squareplus, tanh_shrink]

ACTIVATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(keras.activations, name) for name in _SAME},
    **{function.__name__: function for function in _DEFINED_HERE},
    "silu": keras.activations.swish,
}
"""Maps names of functions in Keras 3's `keras.activations` to functions for Keras 2."""


def find_activation(activation: Callable[..., Any], keras_3: Any) -> Callable[..., Any] | None:
    """Returns the Keras 2 function for an activation function of Keras 3, or None.

    Args:
        activation: the function. A custom function stays unchanged.
        keras_3: the module `keras` of Keras 3.
    """
    name = getattr(activation, "__name__", "")
    if getattr(keras_3.activations, name, None) is activation:
        return ACTIVATIONS.get(name)
    return activation


@dataclasses.dataclass(frozen=True)
class Row:
    """A TensorFlow function that is equivalent to an operation of Keras 3.

    Args:
        function: the function. It is called with the operation's tensors.
        options: maps options of `function` to attributes of the operation.
    """

    function: Callable[..., Any]
    options: dict[str, str] = dataclasses.field(default_factory=dict)


def _make_reduction(function: Callable[..., Any]) -> Row:
    return Row(function, {"axis": "axis", "keepdims": "keepdims"})


def _einsum(*operands: Any, subscripts: str) -> Any:
    if len(operands) == 2:  # Keras 2 cannot load a call of tf.einsum.
        return Contract(subscripts.replace(" ", ""))(list(operands))
    return tf.einsum(subscripts, *operands)


def _swap(x: tf.Tensor, first: int, second: int) -> tf.Tensor:
    axes = list(range(len(x.shape)))
    axes[first], axes[second] = axes[second], axes[first]
    return tf.transpose(x, axes)


def _move(x: tf.Tensor, source: Any, destination: Any) -> tf.Tensor:
    rank = len(x.shape)
    moved = {
        to % rank: origin % rank
        for origin, to in zip(tf.nest.flatten(source), tf.nest.flatten(destination), strict=True)
    }
    remaining = iter(axis for axis in range(rank) if axis not in moved.values())
    return tf.transpose(x, [moved[at] if at in moved else next(remaining) for at in range(rank)])


def _make_arg_function(function: Callable[..., Any]) -> Callable[..., Any]:
    def compute(x: tf.Tensor, axis: int | None, keepdims: bool) -> tf.Tensor:
        if axis is None:
            raise NotImplementedError("it has no axis")
        indices = function(x, axis, output_type=tf.int32)
        return tf.expand_dims(indices, axis) if keepdims else indices

    return compute


def _take(x: tf.Tensor, indices: Any, axis: int | None) -> tf.Tensor:
    if axis is None or tf.is_tensor(indices) or is_symbolic(indices):
        raise NotImplementedError("it has no axis, or its indices are not constant")
    indices = np.asarray(indices)
    if np.any(indices < 0):
        indices = indices + np.where(indices < 0, x.shape[axis], 0)
    return tf.gather(x, indices.tolist(), axis=axis)


_MEAN, _MAX, _MIN = map(_make_reduction, (tf.reduce_mean, tf.reduce_max, tf.reduce_min))

OPERATIONS: dict[str, Row] = {
    "Amax": _MAX,
    "Amin": _MIN,
    "Argmax": Row(_make_arg_function(tf.argmax), {"axis": "axis", "keepdims": "keepdims"}),
    "Argmin": Row(_make_arg_function(tf.argmin), {"axis": "axis", "keepdims": "keepdims"}),
    "Einsum": Row(_einsum, {"subscripts": "subscripts"}),
    "Matmul": Row(tf.matmul),
    "Max": _MAX,
    "Mean": _MEAN,
    "Mish": Row(keras.activations.mish),
    "Min": _MIN,
    "Moveaxis": Row(_move, {"source": "source", "destination": "destination"}),
    "OneHot": Row(tf.one_hot, {"depth": "num_classes", "axis": "axis", "dtype": "dtype"}),
    "Sum": _make_reduction(tf.reduce_sum),
    "Squeeze": Row(tf.squeeze, {"axis": "axis"}),
    "Swapaxes": Row(_swap, {"first": "axis1", "second": "axis2"}),
    "Take": Row(_take, {"axis": "axis"}),
}
"""Maps classes of Keras 3 operations to TensorFlow functions."""

_SAME_TYPE = {"Amax", "Amin", "Einsum", "Matmul", "Max", "Mean", "Min", "Sum"}
"""`OPERATIONS` applies to these operations only if inputs and outputs have the same type."""


def call_operation(operation: Any, args: Any, kwargs: dict[str, Any], dtypes: set[str]) -> Any:
    """Calls an operation of Keras 3 on tensors of Keras 2.

    Args:
        operation: the operation.
        args: positional arguments, with tensors of Keras 2.
        kwargs: keyword arguments.
        dtypes: the data types of inputs and outputs in Keras 3.

    Raises:
        ValueError: if Keras 2 cannot express the operation.
    """
    name = type(operation).__name__
    row = OPERATIONS.get(name)
    if row and len(dtypes) > 1 and name in _SAME_TYPE:
        row = None
    try:
        if row is None:
            return operation.call(*args, **kwargs)
        options = {key: getattr(operation, name) for key, name in row.options.items()}
        return row.function(*args, **kwargs, **options)
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise ValueError(
            f"Operation '{operation.name}' ({name}) of Keras 3 cannot be converted: {error}. Move "
            f"it into a Lambda layer, or express it with other operations."
        ) from error
