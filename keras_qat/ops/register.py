"""Operators for layers that keras_qat does not know."""

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
    """Says which operator a custom layer is. Without that it computes in float.

    Register the class with Keras too (`keras.utils.register_keras_serializable`), or a saved model
    cannot be loaded. Registrations are not saved: repeat them where a model is exported.

    Args:
        layer_class: the layer's class; subclasses need registrations of their own.
        op: name of the operator, as in the first column of docs/operators.md: "softmax",
            "minimum", "leaky_relu", "move" for a layer that only moves values...
        attributes: the operator's options in this layer, as a dict or a function that reads them
            from a layer. Those without a default have to be there.
        weights: for operators with weights: attribute of the layer that holds the weight -> axes
            of its output channels, counted from the end; `()` for one scale for all.

    Returns:
        The registration: `undo()` takes it back, as does the end of a `with` block.

    Raises:
        ValueError: on an unknown operator, or attributes that are missing or unknown.

    Example:
        >>> axis_of = lambda layer: {"axis": layer.dim}
        >>> keras_qat.register_op(MySoftmax, "softmax", attributes=axis_of)
        >>> with keras_qat.register_op(ChannelShuffle, "move"):
        ...     qat = keras_qat.quantize_model(model)
    """
    _check_class(layer_class)
    row = registry.with_attributes(registry.op_named(op), layer_class, attributes or {})
    if bool(weights) != row.is_weighted:
        wanted = "weights: say where the layer has them" if row.is_weighted else "no weights"
        raise ValueError(f"{op} has {wanted}. You gave weights={weights!r}.")
    if weights:
        row = dataclasses.replace(row, weights=_axes(weights))
    return registry.register(layer_class, registry.as_row(row))


def register_rule(
    layer_class: type, *, weights: dict[str, tuple[int, ...]] | None = None, kind: str | None = None
) -> Registration:
    """The short form of `register_op`: for layers whose operator has no options.

    Args:
        layer_class: the layer's class; subclasses need rules of their own.
        weights: attribute of the layer that holds a weight (of the shape of a kernel) -> axes of
            its output channels, counted from the end; `()` for one scale for all. The layer's
            `call` has to read the weight from that attribute, and to be a matrix product or a
            convolution with it: that is found out by tracing. A layer with several weights holds
            them in 8 bits and computes in float.
        kind: for a layer without such weights the operator that it is: `"move"` for one that only
            moves values (its output has its input's range), `"add"`, `"mean"`...

    Returns:
        The registration: `undo()` takes it back, as does the end of a `with` block.

    Raises:
        ValueError: unless exactly one of `weights` and `kind` is given, on an unknown kind, or one
            that has options: `register_op` takes them.

    Example:
        >>> keras_qat.register_rule(MyDense, weights={"kernel": (-1,)})
        >>> keras_qat.register_rule(ChannelShuffle, kind="move")
    """
    if (weights is None) == (kind is None):
        raise ValueError("Give either the layer's weights or its kind.")
    if kind is not None:
        return register_op(layer_class, kind)
    _check_class(layer_class)
    return registry.register(layer_class, traced(_axes(weights or {})))


def _axes(weights: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    for name, axes in weights.items():
        if not isinstance(axes, (tuple, list)) or not all(axis < 0 for axis in axes):
            raise ValueError(
                f"weights={{{name!r}: {axes!r}}}: give the axes of the output channels as a tuple, "
                f"counted from the end: (-1,), or () for one scale for all."
            )
    return {name: tuple(axes) for name, axes in weights.items()}


def _check_class(layer_class: Any) -> None:
    if not isinstance(layer_class, type):
        raise ValueError(
            f"Expected a layer class, got {layer_class!r}: pass {type(layer_class).__name__}, "
            f"without parentheses."
        )
