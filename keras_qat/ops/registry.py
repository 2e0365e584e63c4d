"""All operators, which of them a call is, and what users register."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from keras_qat.keras2.graph import Call, Value, class_path
from keras_qat.operations import is_operation
from keras_qat.ops.embedding import EMBEDDING
from keras_qat.ops.op import Attributes, Op
from keras_qat.ops.rows import ROWS

__all__ = [
    "Match",
    "Registration",
    "is_listed",
    "match",
    "op_named",
    "op_of",
    "register",
    "relu_maximum",
    "weights_listed",
]


class Match(NamedTuple):
    """Which operator a call is: None, and why, for one that is computed in float."""

    op: Op | None
    attributes: Attributes
    reason: str = ""


class _Index:
    """Rows by what they list."""

    def __init__(self, rows: list[Op]) -> None:
        self.by_key: dict[Any, list[Op]] = {}
        self.by_name = {op.name: op for op in rows}
        for op in rows:
            for key in (*op.layers, *op.paths, *op.symbols, *op.functions):
                self.by_key.setdefault(key, []).append(op)

    def candidates(self, call: Call) -> list[Op]:
        """The rows that list what a call calls."""
        layer = call.layer
        if is_operation(layer):
            return self.by_key.get(str(layer.symbol), [])
        found = self.by_key.get(type(layer)) or self.by_key.get(class_path(layer), [])
        if not found and type(layer).__name__ == "Activation":
            with contextlib.suppress(TypeError):  # Not everything that can be called has a hash.
                found = self.by_key.get(layer.activation, [])
        return found


@dataclasses.dataclass(frozen=True)
class Registered:
    """What a layer class was registered as.

    Args:
        match: says which operator a call is.
        weights: attributes of the layer that hold weights.
    """

    match: Callable[[Call], Match]
    weights: tuple[str, ...] = ()


_INDEX = _Index(ROWS)
_REGISTERED: dict[type, Registered] = {}


def match(call: Call) -> Match:
    """The operator of a call with its attributes, or why there is none."""
    registered = _REGISTERED.get(type(call.layer))
    return registered.match(call) if registered else _first(_INDEX.candidates(call), call)


def _first(rows: list[Op], call: Call) -> Match:
    """The first of some rows that accepts a call, or why the first one that says so does not."""
    reason = ""
    for op in rows:
        attributes = op.attributes(call)
        refusal = _reads_integers(op, call) or op.accepts(call, attributes)
        if refusal is None:
            return Match(op, attributes)
        reason = reason or refusal
    return Match(None, {}, reason)


def _reads_integers(op: Op, call: Call) -> str | None:
    """Why weights are not multiplied: with integers, which only tables look up."""
    if not op.weights or op.compute is EMBEDDING.compute or call.inputs[0].is_float:
        return None
    return f"reads {call.inputs[0].dtype}"


def op_of(call: Call) -> Op | None:
    """The operator of a call, None for one that is computed in float."""
    return match(call).op


def relu_maximum(layer: Any) -> float | None:
    """Where an activation layer ends if it is a ReLU, infinity for nowhere; else None."""
    ends = [Value(name, (None,), "float32") for name in ("x", "y")]
    op, attributes, _ = match(Call(layer, (ends[0],), {}, ends[1], "y"))
    return float(attributes["maximum"]) if op is not None and op.clips else None


def op_named(name: str) -> Op:
    """The row of that name.

    Raises:
        ValueError: if there is none; the message lists all.
    """
    if name not in _INDEX.by_name:
        raise ValueError(f"There is no operator {name!r}. Use one of {', '.join(_INDEX.by_name)}.")
    return _INDEX.by_name[name]


def is_listed(layer: Any) -> bool:
    """Whether a layer is of a class that some row lists, or was registered."""
    activations = type(layer).__name__ == "Activation"
    return activations or type(layer) in _REGISTERED or type(layer) in _INDEX.by_key


def weights_listed(layer: Any) -> tuple[str, ...]:
    """Attributes of a layer that hold a weight, by the rows that list its class."""
    if type(layer) in _REGISTERED:
        return _REGISTERED[type(layer)].weights
    rows = _INDEX.by_key.get(type(layer), [])
    return tuple(name for op in rows[:1] for name in op.weights if name)


class Registration:
    """What `register_op` returns: undone by `undo`, or at the end of a `with` block."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self.undo = undo

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *error: Any) -> None:
        self.undo()


def register(layer_class: type, registered: Registered) -> Registration:
    """Says what a layer class is; an earlier registration of it is restored when undone."""
    before = _REGISTERED.get(layer_class)
    _REGISTERED[layer_class] = registered

    def undo() -> None:
        if before is None:
            _REGISTERED.pop(layer_class, None)
        else:
            _REGISTERED[layer_class] = before

    return Registration(undo)


def as_row(op: Op) -> Registered:
    """A layer class that is one operator."""
    return Registered(lambda call: _first([op], call), tuple(name for name in op.weights if name))


def with_attributes(
    op: Op, layer_class: type, given: Callable[[Any], Mapping[str, Any]] | Mapping[str, Any]
) -> Op:
    """A row for a custom layer: its attributes come from the user, all of them.

    Args:
        op: the row that the layer is like.
        layer_class: the layer's class.
        given: the attributes, or what reads them from a layer.

    Raises:
        ValueError: on an attribute that the operator has not.
    """
    unknown = set() if callable(given) else set(given) - {*op.needs, *op.defaults}
    if unknown:
        known = ", ".join((*op.needs, *op.defaults)) or "none"
        raise ValueError(
            f"{op.name} has no attribute {', '.join(sorted(unknown))}; it has {known}."
        )
    missing = [] if callable(given) else [name for name in op.needs if name not in given]
    if missing:
        raise ValueError(
            f"{layer_class.__name__} as {op.name} needs {', '.join(missing)}: say where the layer "
            f"has them, as in register_op({layer_class.__name__}, {op.name!r}, attributes=lambda "
            f"layer: {{{missing[0]!r}: layer.{missing[0]}}})."
        )

    def attributes(call: Call) -> Attributes:
        found = dict(given(call.layer) if callable(given) else given)
        lacking = [name for name in op.needs if name not in found]
        if lacking or set(found) - {*op.needs, *op.defaults}:
            raise ValueError(
                f"The attributes of '{call.layer.name}' as {op.name} are {sorted(found)}; they "
                f"have to be {', '.join(op.needs)}, and may be {', '.join(op.defaults) or 'none'}."
            )
        return {**op.defaults, **found}

    return dataclasses.replace(op, attributes=attributes)
