"""Converts operations of Keras 3 on symbolic tensors (`x + y`, `keras.ops.relu(x)`) to Keras 2.

Keras 3's operations compute with TensorFlow functions, and Keras 2 makes a layer of each function
that is called on its symbolic tensors. So most operations convert by calling them on Keras 2's
tensors. `OPERATIONS` lists those that fail that way or would become needlessly many layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.helper_layers.operations import Contract
from keras_qat.keras2.backend import keras


@dataclasses.dataclass(frozen=True)
class Row:
    """A TensorFlow function that computes what an operation does.

    Args:
        function: called with the operation's tensors.
        options: name of the function's option -> name of the operation's attribute that holds it.
    """

    function: Callable[..., Any]
    options: dict[str, str] = dataclasses.field(default_factory=dict)


def _reduction(function: Any) -> Row:
    return Row(function, {"axis": "axis", "keepdims": "keepdims"})


def _einsum(*operands: Any, subscripts: str) -> Any:
    if len(operands) == 2:  # Keras 2 cannot load a call of tf.einsum.
        return Contract(subscripts.replace(" ", ""))(list(operands))
    return tf.einsum(subscripts, *operands)


def _swap(x: Any, first: int, second: int) -> Any:
    axes = list(range(len(x.shape)))
    axes[first], axes[second] = axes[second], axes[first]
    return tf.transpose(x, axes)


def _move(x: Any, source: Any, destination: Any) -> Any:
    rank = len(x.shape)
    moved = {
        to % rank: origin % rank
        for origin, to in zip(tf.nest.flatten(source), tf.nest.flatten(destination), strict=True)
    }
    remaining = iter(axis for axis in range(rank) if axis not in moved.values())
    return tf.transpose(x, [moved[at] if at in moved else next(remaining) for at in range(rank)])


def _position(function: Any) -> Callable[..., Any]:
    def compute(x: Any, axis: int | None, keepdims: bool) -> Any:
        if axis is None:
            raise NotImplementedError("without an axis")
        indices = function(x, axis, output_type=tf.int32)
        return tf.expand_dims(indices, axis) if keepdims else indices

    return compute


def _take(x: Any, indices: Any, axis: int | None) -> Any:
    if axis is None or tf.is_tensor(indices) or hasattr(indices, "node"):
        raise NotImplementedError("only numbers along an axis can be taken")
    indices = np.asarray(indices)
    if np.any(indices < 0):
        indices = indices + np.where(indices < 0, x.shape[axis], 0)
    return tf.gather(x, indices.tolist(), axis=axis)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    scale: float | None = None,
    **options: Any,
) -> Any:
    """Computes attention on [batch, steps, heads, head size], Keras 3's layout."""
    if bias is not None or mask is not None or any(options.values()):
        raise NotImplementedError("it has a mask, a bias or a cap")
    scale = float(query.shape[-1]) ** -0.5 if scale is None else scale
    scores = Contract("bqhd,bkhd->bhqk")([query * scale, key])
    return Contract("bhqk,bkhd->bqhd")([tf.nn.softmax(scores), value])


_MEAN, _MAX, _MIN = map(_reduction, (tf.reduce_mean, tf.reduce_max, tf.reduce_min))

OPERATIONS: dict[str, Row] = {
    "Amax": _MAX,
    "Amin": _MIN,
    "Argmax": Row(_position(tf.argmax), {"axis": "axis", "keepdims": "keepdims"}),
    "Argmin": Row(_position(tf.argmin), {"axis": "axis", "keepdims": "keepdims"}),
    "DotProductAttention": Row(_attention, {"causal": "is_causal", "cap": "attn_logits_soft_cap"}),
    "Einsum": Row(_einsum, {"subscripts": "subscripts"}),
    "Matmul": Row(tf.matmul),
    "Max": _MAX,
    "Mean": _MEAN,
    "Mish": Row(keras.activations.mish),
    "Min": _MIN,
    "Moveaxis": Row(_move, {"source": "source", "destination": "destination"}),
    "OneHot": Row(tf.one_hot, {"depth": "num_classes", "axis": "axis", "dtype": "dtype"}),
    "Sum": _reduction(tf.reduce_sum),
    "Squeeze": Row(tf.squeeze, {"axis": "axis"}),
    "Swapaxes": Row(_swap, {"first": "axis1", "second": "axis2"}),
    "Take": Row(_take, {"axis": "axis"}),
}
"""Class of an operation of Keras 3 -> the row that computes it."""

SAME_TYPE = {"Amax", "Amin", "Einsum", "Matmul", "Max", "Mean", "Min", "Sum"}
"""Operations whose rows need one type for inputs and outputs; with others Keras 3 converts
types."""


def call_operation(operation: Any, args: Any, kwargs: Any, dtypes: set[str]) -> Any:
    """Calls an operation of Keras 3 on tensors of Keras 2.

    Args:
        operation: the operation.
        args: its positional arguments, with tensors of Keras 2.
        kwargs: its keyword arguments.
        dtypes: the types of its input and output tensors in Keras 3.

    Raises:
        ValueError: if Keras 2 cannot express it.
    """
    name = type(operation).__name__
    row = OPERATIONS.get(name)
    if row and len(dtypes) > 1 and name in SAME_TYPE:
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
