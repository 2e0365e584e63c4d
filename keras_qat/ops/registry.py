"""All operators, which of them a call is, and what users register."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from keras_qat.frontend.graph import Call, Value, class_path, values_in
from keras_qat.frontend.tf_operations import is_operation
from keras_qat.ops.all_ops import ROWS
from keras_qat.ops.op import Attributes, Op


class Match(NamedTuple):
    """Which operator a call is: None, and why, for one that is computed in float."""

    op: Op | None
    attributes: Attributes
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Registered:
    """What a layer class was registered as.

    Args:
        match: says which operator a call is.
        weights: attributes of the layer that hold weights.
    """

    match: Callable[[Call], Match]
    weights: tuple[str, ...] = ()


_BY_NAME = {op.name: op for op in ROWS}
_BY_KEY: dict[Any, list[Op]] = {}
"""Rows by what they list."""
for _op in ROWS:
    for _key in (*_op.layers, *_op.paths, *_op.symbols, *_op.functions):
        _BY_KEY.setdefault(_key, []).append(_op)

_REGISTERED: dict[type, Registered] = {}


def match(call: Call) -> Match:
    """The operator of a call with its attributes, or why there is none."""
    registered = _REGISTERED.get(type(call.layer))
    if registered is None:
        return _first(_candidates(call), call)
    _check_weights(call.layer, registered.weights)
    return registered.match(call)


def _check_weights(layer: Any, paths: tuple[str, ...]) -> None:
    """Raises a `ValueError` if a layer has no weights where they were registered."""
    for path in paths:
        try:
            operator.attrgetter(path)(layer)
        except AttributeError as error:
            there = [
                name
                for name, each in vars(layer).items()
                if any(each is weight for weight in layer.weights)
            ]
            raise ValueError(
                f"{type(layer).__name__} was registered with weights in the attribute '{path}', "
                f"which layer '{layer.name}' does not have. Its attributes with weights are: "
                f"{', '.join(there) or 'none'}."
            ) from error


def _candidates(call: Call) -> list[Op]:
    """The rows that list what a call calls."""
    layer = call.layer
    if is_operation(layer):
        return _BY_KEY.get(str(layer.symbol), [])
    found = _BY_KEY.get(type(layer)) or _BY_KEY.get(class_path(layer), [])
    if not found and type(layer).__name__ == "Activation":
        with contextlib.suppress(TypeError):  # Not everything that can be called has a hash.
            found = _BY_KEY.get(layer.activation, [])
    return found


def _first(rows: list[Op], call: Call) -> Match:
    """The first of some rows that accepts a call, or why the first one that says so does not."""
    reason = ""
    for op in rows:
        attributes = op.attributes(call)
        refusal = _refused(op, call) or op.accepts(call, attributes)
        if refusal is None:
            return Match(op, attributes)
        reason = reason or refusal
    return Match(None, {}, reason)


def _refused(op: Op, call: Call) -> str | None:
    """Why an operator has no kernel for such inputs."""
    for x in call.inputs[:1]:
        same = values_in(call.outputs)[0].dtype == x.dtype
        if op.integers is not None and not x.is_float and not (same and x.dtype in op.integers):
            return f"reads {x.dtype}"
    is_large = any(len(each.shape) > op.max_axes for each in call.inputs)
    return f"more than {op.max_axes} axes" if is_large else None


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
    if name not in _BY_NAME:
        near = difflib.get_close_matches(str(name), _BY_NAME, n=1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"There is no operator {name!r}.{meant} There are: {', '.join(_BY_NAME)}.")
    return _BY_NAME[name]


def is_listed(layer: Any) -> bool:
    """Whether a layer is of a class that some row lists, or was registered."""
    activations = type(layer).__name__ == "Activation"
    return activations or type(layer) in _REGISTERED or type(layer) in _BY_KEY


def is_registered(layer: Any) -> bool:
    """Whether a user said what a layer is."""
    return type(layer) in _REGISTERED


def on_request(layer: Any) -> bool:
    """Whether a layer is in float unless an override asks for integers."""
    return not is_registered(layer) and any(op.on_request for op in _BY_KEY.get(type(layer), []))


def lists(function: Any) -> bool:
    """Whether some row lists an activation function."""
    return function in _BY_KEY


def weights_listed(layer: Any) -> tuple[str, ...]:
    """Attributes of a layer that hold a weight, by the rows that list its class."""
    if type(layer) in _REGISTERED:
        return _REGISTERED[type(layer)].weights
    rows = _BY_KEY.get(type(layer), [])
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
        ValueError: on an attribute that the operator has not, or one that is missing.
    """

    def checked(found: Mapping[str, Any]) -> Attributes:
        if set(op.needs) <= set(found) <= {*op.needs, *op.defaults}:
            return {**op.defaults, **found}
        name = layer_class.__name__
        raise ValueError(
            f"{name} as {op.name} needs the attributes {', '.join(op.needs) or 'none'}, and may "
            f"have {', '.join(op.defaults) or 'no others'}; it has "
            f"{', '.join(sorted(found)) or 'none'}. Say where the layer has them, as in "
            f"register_op({name}, {op.name!r}, attributes=lambda layer: {{'axis': layer.axis}})."
        )

    if callable(given):

        def read(call: Call) -> Attributes:
            try:
                return checked(given(call.layer))
            except AttributeError as error:
                raise ValueError(
                    f"{layer_class.__name__} was registered as {op.name} with attributes that "
                    f"cannot be read from layer '{call.layer.name}': {error}."
                ) from error

        return dataclasses.replace(op, attributes=read)
    fixed = checked(given)
    return dataclasses.replace(op, attributes=lambda call: fixed)
