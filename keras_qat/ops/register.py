"""Registers operators for a user's own layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from keras_qat.ops import registry
from keras_qat.ops.registry import Registration
from keras_qat.ops.trace_weighted import traced


def register_op(
    layer_class: type,
    op: str,
    *,
    attributes: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] | None = None,
    weights: dict[str, tuple[int, ...]] | None = None,
) -> Registration:
    """Registers the operator that a custom layer is. Other custom layers compute in float.

    Register the class with Keras too (`keras.utils.register_keras_serializable`), so that saved
    models load. Registrations are not saved: repeat them before you export a loaded model.

    Args:
        layer_class: the layer's class; subclasses need their own registrations.
        op: name of the operator, as in the first column of docs/operators.md: "softmax", "minimum",
            "leaky_relu", or "move" for a layer that only moves values.
        attributes: the operator's options in this layer: a dict, or a function that reads them from
            a layer. Options without a default are required.
        weights: for weighted operators: attribute of the layer that holds the weight -> axes of its
            output channels, counted from the end; `()` for one scale for all.

    Returns:
        The registration. `undo()` or the end of a `with` block takes it back.

    Raises:
        ValueError: on an unknown operator, or missing or unknown attributes.

    Example:
        >>> axis_of = lambda layer: {"axis": layer.dim}
        >>> keras_qat.register_op(MySoftmax, "softmax", attributes=axis_of)
        >>> with keras_qat.register_op(ChannelShuffle, "move"):
        ...     qat = keras_qat.quantize_model(model)
    """
    _check_class(layer_class)
    row = registry.with_attributes(registry.op_named(op), layer_class, attributes or {})
    if bool(weights) != row.is_weighted:
        needs = "weights: name their attribute" if row.is_weighted else "no weights"
        raise ValueError(f"{op} has {needs}, got weights={weights!r}.")
    if weights:
        row = dataclasses.replace(row, weights=_axes(weights))
    return registry.register(layer_class, registry.as_row(row))


def register_rule(
    layer_class: type, *, weights: dict[str, tuple[int, ...]] | None = None, kind: str | None = None
) -> Registration:
    """Registers a layer whose operator has no options, a short form of `register_op`.

    Args:
        layer_class: the layer's class; subclasses need their own registrations.
        weights: attribute of the layer that holds a weight -> axes of its output channels, counted
            from the end; `()` for one scale for all. The layer's `call` has to read the weight from
            that attribute and compute a matrix product or a convolution with it, which is checked
            by tracing. A layer with several weights holds them in 8 bits and computes in float.
        kind: the operator of a layer without such weights: `"add"`, `"mean"`, or `"move"` for a
            layer that only moves values, whose output has its input's range.

    Returns:
        The registration. `undo()` or the end of a `with` block takes it back.

    Raises:
        ValueError: unless exactly one of `weights` and `kind` is given, or if the kind is unknown
            or has options, which `register_op` takes.

    Example:
        >>> keras_qat.register_rule(MyDense, weights={"kernel": (-1,)})
        >>> keras_qat.register_rule(ChannelShuffle, kind="move")
    """
    _check_class(layer_class)
    if (weights is None) == (kind is None):
        raise ValueError(
            "Pass either weights={'kernel': (-1,)}, with the names of the attributes that hold "
            "weights, or kind='move', 'add' or 'mean'."
        )
    if kind is not None:
        return register_op(layer_class, kind)
    return registry.register(layer_class, traced(_axes(weights or {})))


def _axes(weights: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    for name, axes in weights.items():
        if not isinstance(axes, (tuple, list)) or not all(axis < 0 for axis in axes):
            raise ValueError(
                f"weights={{{name!r}: {axes!r}}}: pass the axes of the output channels as a tuple, "
                f"counted from the end: (-1,), or () for one scale for all."
            )
    return {name: tuple(axes) for name, axes in weights.items()}


def _check_class(layer_class: Any) -> None:
    if isinstance(layer_class, str):
        raise ValueError(f"Expected a layer class, got {layer_class!r}: pass the class itself.")
    if not isinstance(layer_class, type):
        raise ValueError(
            f"Expected a layer class, got {layer_class!r}: pass {type(layer_class).__name__}, "
            f"without parentheses."
        )
