"""Lists all operators, finds the operator of a call, and registers users' layers."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from keras_qat.graph.calls import Call, Value, flatten_values
from keras_qat.graph.operations import get_kind, is_operation
from keras_qat.keras2.backend import layers
from keras_qat.keras2.layers_and_models import get_class_path
from keras_qat.messages import suggest
from keras_qat.ops.all_ops import ROWS
from keras_qat.ops.op import Attributes, Op


class Match(NamedTuple):
    """The operator of a call; None, with the reason, for a call that computes in float."""

    op: Op | None
    attributes: Attributes
    reason: str = ""


_BY_NAME = {op.name: op for op in ROWS}
_BY_KEY: dict[Any, list[Op]] = {}
"""Layer class, path, kind or function -> rows that list it."""
for _op in ROWS:
    for _key in (*_op.layers, *_op.paths, *_op.kinds, *_op.functions):
        _BY_KEY.setdefault(_key, []).append(_op)

_REGISTERED: dict[type, Op] = {}
"""Layer class of a user -> its row."""


def match(call: Call) -> Match:
    """Returns the operator of a call with its attributes, or the reason why there is none."""
    if any(x.is_complex for x in call.inputs):
        return Match(None, {}, "reads complex numbers")
    row = _REGISTERED.get(type(call.layer))
    if row is None:
        return _first(find_rows(call), call)
    _check_weights(call.layer, weights_listed(call.layer))
    return _first([row], call)


def _check_weights(layer: Any, paths: tuple[str, ...]) -> None:
    """Raises a `ValueError` if a layer lacks the registered weights, or has another than a bias."""
    names = [
        name
        for name, value in vars(layer).items()
        if any(value is weight for weight in layer.weights)
    ]
    for path in paths:
        try:
            operator.attrgetter(path)(layer)
        except AttributeError as error:
            raise ValueError(
                f"{type(layer).__name__} was registered with weights in the attribute '{path}', "
                f"which layer '{layer.name}' does not have. Its attributes with weights are: "
                f"{', '.join(names) or 'none'}."
            ) from error
    others = [name for name in names if name not in (*paths, "bias")]
    if paths and others:
        raise ValueError(
            f"{type(layer).__name__} was registered with weights in {', '.join(paths)}, but layer "
            f"'{layer.name}' has weights in {', '.join(others)} too. Only a bias may be left out, "
            f"in the attribute `bias`."
        )


def find_rows(call: Call) -> list[Op]:
    """Returns the rows that list the layer, operation or function of a call."""
    layer = call.layer
    if is_operation(layer):
        return _BY_KEY.get(get_kind(layer), [])
    rows = _BY_KEY.get(type(layer)) or _BY_KEY.get(get_class_path(layer), [])
    if not rows and type(layer).__name__ == "Activation":
        with contextlib.suppress(TypeError):  # Not everything that can be called has a hash.
            rows = _BY_KEY.get(layer.activation, [])
    return rows


def _first(rows: list[Op], call: Call) -> Match:
    """Returns the first row that accepts a call, or the first reason why none does."""
    reason = ""
    for op in rows:
        attributes = op.attributes(call)
        refusal = _refused(op, call) or op.accepts(call, attributes)
        if refusal is None:
            return Match(op, attributes)
        reason = reason or refusal
    return Match(None, {}, reason)


def _refused(op: Op, call: Call) -> str | None:
    """Returns why an operator has no kernel for such inputs."""
    for x in call.inputs[:1]:
        same = flatten_values(call.outputs)[0].dtype == x.dtype
        if op.integers is not None and not x.is_float and not (same and x.dtype in op.integers):
            return f"reads {x.dtype}"
    is_large = any(len(x.shape) > op.max_axes for x in call.inputs)
    return f"more than {op.max_axes} axes" if is_large else None


def find_op(call: Call) -> Op | None:
    """Returns the operator of a call, None for a call that computes in float."""
    return match(call).op


def find_row(layer: Any) -> Op | None:
    """Returns the row that lists a layer's class, or the first that lists one of its bases.

    Whether or not it accepts the layer's calls.
    """
    own = next((op for op in ROWS if type(layer) in op.layers), None)
    return own or next((op for op in ROWS if isinstance(layer, op.layers)), None)


def count_gates(layer: Any) -> int:
    """Returns how many gates the weights of a layer are split into; 1 for most layers."""
    op = find_row(layer)
    return 1 if op is None else op.gates


def relu_maximum(layer: Any) -> float | None:
    """Returns the maximum of a ReLU layer, which may be infinity; None for other layers."""
    value = Value("x", (None,), "float32")
    op, attributes, _ = match(Call(layer, (value,), {}, value, "x"))
    return float(attributes["maximum"]) if op is not None and op.clips else None


def op_named(name: str) -> Op:
    """Returns the row with this name.

    Raises:
        ValueError: if there is none; the message lists all names.
    """
    if name not in _BY_NAME:
        raise ValueError(
            f"There is no operator {name!r}.{suggest(name, _BY_NAME)} There are: "
            f"{', '.join(_BY_NAME)}."
        )
    return _BY_NAME[name]


def is_listed(layer: Any) -> bool:
    """Returns whether a row lists a layer's class, or a user registered it."""
    activations = type(layer).__name__ == "Activation"
    return activations or type(layer) in _REGISTERED or type(layer) in _BY_KEY


def is_registered(layer: Any) -> bool:
    """Returns whether a user registered a layer's class."""
    return type(layer) in _REGISTERED


def is_on_request(layer: Any) -> bool:
    """Returns whether a layer stays in float unless an override asks for integers."""
    return not is_registered(layer) and any(op.on_request for op in _BY_KEY.get(type(layer), []))


def is_listed_function(function: Any) -> bool:
    """Returns whether a row lists an activation function."""
    return function in _BY_KEY


def weights_listed(layer: Any) -> tuple[str, ...]:
    """Returns the attributes of a layer that hold weights, by the rows that list its class."""
    own = _REGISTERED.get(type(layer))
    rows = _BY_KEY.get(type(layer), []) if own is None else [own]
    return tuple(name for op in rows[:1] for name in op.weights if name)


_CELL = ("kernel", "recurrent_kernel")
_OF_CELL = tuple(f"cell.{name}" for name in _CELL)

WEIGHTS_ONLY: dict[type, tuple[str, ...]] = {
    **dict.fromkeys((layers.Conv3D, layers.Conv3DTranspose), ("kernel",)),
    **dict.fromkeys((layers.LocallyConnected1D, layers.LocallyConnected2D), ("kernel",)),
    **dict.fromkeys((layers.LSTMCell, layers.GRUCell, layers.SimpleRNNCell), _CELL),
    **dict.fromkeys((layers.LSTM, layers.GRU, layers.SimpleRNN), _OF_CELL),
    **dict.fromkeys((layers.ConvLSTM1D, layers.ConvLSTM2D, layers.ConvLSTM3D), _OF_CELL),
}
"""Layer class without int8 operators -> paths of its weights that files hold in 8 bits."""


def weights_only(layer: Any) -> tuple[str, ...]:
    """Returns the paths of weights that a layer in float holds in 8 bits."""
    parts: dict[str, Any] = {}
    if isinstance(layer, layers.Bidirectional):
        parts = {name: getattr(layer, name) for name in ("forward_layer", "backward_layer")}
    elif isinstance(layer, layers.TimeDistributed):
        parts = {"layer": layer.layer}
    elif type(layer) is layers.RNN:
        parts = {"cell": layer.cell}
    elif isinstance(layer, layers.StackedRNNCells):
        parts = {f"cells.{index}": cell for index, cell in enumerate(layer.cells)}
    inner = [f"{name}.{path}" for name, part in parts.items() for path in weights_only(part)]
    return (*WEIGHTS_ONLY.get(type(layer), weights_listed(layer)), *inner)


class Registration:
    """Result of `register_op`, undone by `undo` or at the end of a `with` block."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self.undo = undo

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *error: Any) -> None:
        self.undo()


def register(layer_class: type, row: Op) -> Registration:
    """Registers the row of a layer class. Undoing this restores an earlier registration."""
    earlier = _REGISTERED.get(layer_class)
    _REGISTERED[layer_class] = row

    def undo() -> None:
        if earlier is None:
            _REGISTERED.pop(layer_class, None)
        else:
            _REGISTERED[layer_class] = earlier

    return Registration(undo)


def add_attributes(
    op: Op, layer_class: type, source: Callable[[Any], Mapping[str, Any]] | Mapping[str, Any]
) -> Op:
    """Makes a row for a custom layer with the user's attributes.

    Args:
        op: the row that the layer is like.
        layer_class: the layer's class.
        source: the attributes, or a function that reads them from a layer.

    Raises:
        ValueError: on an unknown or missing attribute.
    """

    def checked(values: Mapping[str, Any]) -> Attributes:
        if set(op.needs) <= set(values) <= {*op.needs, *op.defaults}:
            return {**op.defaults, **values}
        name = layer_class.__name__
        raise ValueError(
            f"{name} as {op.name} needs the attributes {', '.join(op.needs) or 'none'}, and may "
            f"have {', '.join(op.defaults) or 'no others'}; it has "
            f"{', '.join(sorted(values)) or 'none'}. Pass a function that reads them, as in "
            f"register_op({name}, {op.name!r}, attributes=lambda layer: {{'axis': layer.axis}})."
        )

    if callable(source):

        def read(call: Call) -> Attributes:
            try:
                return checked(source(call.layer))
            except AttributeError as error:
                raise ValueError(
                    f"{layer_class.__name__} was registered as {op.name} with attributes that "
                    f"cannot be read from layer '{call.layer.name}': {error}."
                ) from error

        return dataclasses.replace(op, attributes=read)
    fixed = checked(source)
    return dataclasses.replace(op, attributes=lambda call: fixed)
