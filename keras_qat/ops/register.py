"""Registers operators for a user's own layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from keras_qat.ops import registry
from keras_qat.ops.op import Op
from keras_qat.ops.registry import Registration


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
        ValueError: on an unknown operator, missing or unknown attributes, or other output channels
            than the operator has.

    Example:
        >>> axis_of = lambda layer: {"axis": layer.dim}
        >>> keras_qat.register_op(MySoftmax, "softmax", attributes=axis_of)
        >>> with keras_qat.register_op(ChannelShuffle, "move"):
        ...     qat = keras_qat.quantize_model(model)
    """
    _check_class(layer_class)
    row = registry.add_attributes(registry.op_named(op), layer_class, attributes or {})
    if bool(weights) != row.is_weighted:
        needs = "weights: name their attribute" if row.is_weighted else "no weights"
        raise ValueError(f"{op} has {needs}, got weights={weights!r}.")
    if weights:
        row = dataclasses.replace(row, weights=_axes(weights, row), folds_batch_norm=False)
    return registry.register(layer_class, row)


def _axes(weights: dict[str, tuple[int, ...]], row: Op) -> dict[str, tuple[int, ...]]:
    """Returns the axes of output channels, checked against the operator's."""
    for name, axes in weights.items():
        if not isinstance(axes, (tuple, list)) or not all(axis < 0 for axis in axes):
            raise ValueError(
                f"weights={{{name!r}: {axes!r}}}: pass the axes of the output channels as a tuple, "
                f"counted from the end: (-1,), or () for one scale for all."
            )
        if tuple(axes) not in ((), *row.weights.values()):
            raise ValueError(
                f"weights={{{name!r}: {axes!r}}}: the output channels of {row.name} are axes "
                f"{', '.join(map(str, row.weights.values()))}."
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
