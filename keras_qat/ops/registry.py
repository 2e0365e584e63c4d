"""Finds the operator of a call, and registers operators for custom layers."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from keras_qat.graph.calls import Call, Value, flatten_values
from keras_qat.graph.operations import get_kind, is_operation
from keras_qat.keras2.backend import keras, layers
from keras_qat.keras2.layers_and_models import get_class_path
from keras_qat.messages import suggest
from keras_qat.ops.all_ops import ROWS
from keras_qat.ops.op import Attributes, Op

Layer: TypeAlias = keras.layers.Layer


class Match(NamedTuple):
    """The operator and the attributes of a call. `op` is None if the call stays in float."""

    op: Op | None
    attributes: Attributes
    reason: str = ""


_BY_NAME = {op.name: op for op in ROWS}
_BY_KEY: dict[object, list[Op]] = {}
"""Maps a layer class, class path, kind of operation or activation function to its operators."""
for _op in ROWS:
    for _key in (*_op.layers, *_op.paths, *_op.kinds, *_op.functions):
        _BY_KEY.setdefault(_key, []).append(_op)

_REGISTERED: dict[type, Op] = {}
"""Maps each class that was passed to `register_op` to its operator."""


def match(call: Call) -> Match:
    """Returns the operator that computes a call, and its attributes."""
    if any(x.is_complex for x in call.inputs):
        return Match(None, {}, "reads complex numbers")
    row = _REGISTERED.get(type(call.layer))
    if row is None:
        return _match_first(find_rows(call), call)
    _check_weights(call.layer, _list_weights(call.layer))
    return _match_first([row], call)


def _check_weights(layer: Layer, paths: tuple[str, ...]) -> None:
    """Raise a `ValueError` if the user registered wrong weights.

    Each attribute in `paths` must exist, and `paths` must contain all weights except `bias`.
    """
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
            f"'{layer.name}' also has weights in {', '.join(others)}. List them in `weights`, too. "
            f"Only an attribute called `bias` can be omitted."
        )


def find_rows(call: Call) -> list[Op]:
    """Returns the operators that list the call's layer class, operation or activation function."""
    layer = call.layer
    if is_operation(layer):
        return _BY_KEY.get(get_kind(layer), [])
    rows = _BY_KEY.get(type(layer)) or _BY_KEY.get(get_class_path(layer), [])
    if not rows and type(layer).__name__ == "Activation":
        with contextlib.suppress(TypeError):  # Some callables are not hashable.
            rows = _BY_KEY.get(layer.activation, [])
    return rows


def _match_first(rows: list[Op], call: Call) -> Match:
    """Return the first of several operators that accepts a call. If none does, return a reason."""
    reason = ""
    for op in rows:
        attributes = op.attributes(call)
        refusal = _find_refusal(op, call) or op.accepts(call, attributes)
        if refusal is None:
            return Match(op, attributes)
        reason = reason or refusal
    return Match(None, {}, reason)


def _find_refusal(op: Op, call: Call) -> str | None:
    """Return a reason if an operator does not support the types or shapes of a call's inputs."""
    for x in call.inputs[:1]:
        same = flatten_values(call.outputs)[0].dtype == x.dtype
        if op.integers is not None and not x.is_float and not (same and x.dtype in op.integers):
            return f"reads {x.dtype}"
    is_large = any(len(x.shape) > op.max_axes for x in call.inputs)
    return f"more than {op.max_axes} axes" if is_large else None


def find_op(call: Call) -> Op | None:
    return match(call).op


def find_row(layer: Layer) -> Op | None:
    """Returns the operator for a layer's class. If there is none, returns one for a base class."""
    own = next((op for op in ROWS if type(layer) in op.layers), None)
    return own or next((op for op in ROWS if isinstance(layer, op.layers)), None)


def count_gates(layer: Layer) -> int:
    """Returns 4 for an LSTM, which has one scale for each gate. Returns 1 for other layers."""
    op = find_row(layer)
    return 1 if op is None else op.gates


def relu_maximum(layer: Layer) -> float | None:
    """Returns the maximum of a ReLU layer, such as 6.0 or `inf`. Returns None for other layers."""
    value = Value("x", (None,), "float32")
    op, attributes, _ = match(Call(layer, (value,), {}, value, "x"))
    return float(attributes["maximum"]) if op is not None and op.clips else None


def op_named(name: str) -> Op:
    if name not in _BY_NAME:
        raise ValueError(
            f"There is no operator {name!r}.{suggest(name, _BY_NAME)} The operators are: "
            f"{', '.join(_BY_NAME)}."
        )
    return _BY_NAME[name]


def is_listed(layer: Layer) -> bool:
    """Returns True if keras_qat knows a layer's class, or if the user has registered it."""
    kind = type(layer)
    return kind.__name__ == "Activation" or kind in _REGISTERED or kind in _BY_KEY


def is_registered(layer: Layer) -> bool:
    return type(layer) in _REGISTERED


def is_on_request(layer: Layer) -> bool:
    """Returns True if a layer stays in float unless an override has `quantize=True`."""
    return not is_registered(layer) and any(op.on_request for op in _BY_KEY.get(type(layer), []))


def is_listed_function(function: object) -> bool:
    return function in _BY_KEY


def _list_weights(layer: Layer) -> tuple[str, ...]:
    """Return the names of a layer's attributes that hold quantized weights."""
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
"""Maps a layer class to the paths of its weights. Files store these weights as int8 even if the
layer computes in float."""


def weights_only(layer: Layer) -> tuple[str, ...]:
    """Returns the paths of weights that files store as int8 even if the layer computes in float."""
    inner: dict[str, Layer] = {}
    if isinstance(layer, layers.Bidirectional):
        inner = {name: getattr(layer, name) for name in ("forward_layer", "backward_layer")}
    elif isinstance(layer, layers.TimeDistributed):
        inner = {"layer": layer.layer}
    elif type(layer) is layers.RNN:
        inner = {"cell": layer.cell}
    elif isinstance(layer, layers.StackedRNNCells):
        inner = {f"cells.{index}": cell for index, cell in enumerate(layer.cells)}
    paths = [f"{name}.{path}" for name, part in inner.items() for path in weights_only(part)]
    return (*WEIGHTS_ONLY.get(type(layer), _list_weights(layer)), *paths)


class Registration:
    """A registration by `register_op`. `undo()` or the end of a `with` block reverts it."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self.undo = undo

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


def register_op(
    layer_class: type,
    op: str,
    *,
    attributes: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] | None = None,
    weights: dict[str, tuple[int, ...]] | None = None,
) -> Registration:
    """Registers the operator that computes a custom layer.

    Register the class with Keras too (`keras.utils.register_keras_serializable`). Otherwise, saved
    models do not load. Registrations are not saved. Repeat them before you export a loaded model.

    Args:
        layer_class: the layer's class. Subclasses need separate registrations.
        op: the name of the operator, as in the first column of docs/operators.md. Examples are
            "softmax", "minimum" and "leaky_relu". Use "move" for a layer that only moves values.
        attributes: the operator's options in this layer. Pass a dict, or a function that reads the
            options from a layer. Options without a default are required.
        weights: the weights of a weighted operator. Each key is the layer's attribute that holds a
            weight. Each value is the axes of output channels, counted from the end. `()` means one
            scale per tensor.

    Returns:
        The registration. `undo()` or the end of a `with` block reverts it.

    Raises:
        ValueError: if the operator is unknown, if attributes are missing or unknown, or if the
            output channels differ from the operator's.

    Example:
        >>> axis_of = lambda layer: {"axis": layer.dim}
        >>> keras_qat.register_op(MySoftmax, "softmax", attributes=axis_of)
        >>> with keras_qat.register_op(ChannelShuffle, "move"):
        ...     qat = keras_qat.quantize_model(model)
    """
    _check_class(layer_class)
    row = _add_attributes(op_named(op), layer_class, attributes or {})
    if bool(weights) != row.is_weighted:
        needs = "weights, so name their attribute" if row.is_weighted else "no weights"
        raise ValueError(f"weights={weights!r}: the operator {op} has {needs}.")
    if weights:
        row = dataclasses.replace(row, weights=_check_axes(weights, row), folds_batch_norm=False)
    earlier = _REGISTERED.get(layer_class)
    _REGISTERED[layer_class] = row

    def undo() -> None:
        if earlier is None:
            _REGISTERED.pop(layer_class, None)
        else:
            _REGISTERED[layer_class] = earlier

    return Registration(undo)


def _check_class(layer_class: object) -> None:
    if isinstance(layer_class, str):
        raise ValueError(f"Expected a layer class, got {layer_class!r}: pass the class itself.")
    if not isinstance(layer_class, type):
        raise ValueError(
            f"Expected a layer class, got {layer_class!r}: pass {type(layer_class).__name__}, "
            f"without parentheses."
        )


def _check_axes(weights: dict[str, tuple[int, ...]], row: Op) -> dict[str, tuple[int, ...]]:
    """Return axes as tuples. Raise a `ValueError` for axes that the operator does not have."""
    for name, axes in weights.items():
        if not isinstance(axes, (tuple, list)) or not all(axis < 0 for axis in axes):
            raise ValueError(
                f"weights={{{name!r}: {axes!r}}}: pass the axes of the output channels as a tuple, "
                f"counted from the end: (-1,), or () for one scale per tensor."
            )
        if tuple(axes) not in ((), *row.weights.values()):
            raise ValueError(
                f"weights={{{name!r}: {axes!r}}}: the output channels of {row.name} are axes "
                f"{', '.join(map(str, row.weights.values()))}."
            )
    return {name: tuple(axes) for name, axes in weights.items()}


def _add_attributes(
    op: Op, layer_class: type, source: Callable[[Layer], Mapping[str, Any]] | Mapping[str, Any]
) -> Op:
    """Return an operator with the user's attributes for a custom layer.

    Unknown or missing attributes raise a `ValueError`. If `source` is a function, the error is
    raised later, when the function reads the attributes of a layer.
    """

    def check(values: Mapping[str, Any]) -> Attributes:
        if set(op.needs) <= set(values) <= {*op.needs, *op.defaults}:
            return {**op.defaults, **values}
        name = layer_class.__name__
        raise ValueError(
            f"{name} as {op.name} needs the attributes {', '.join(op.needs) or 'none'}, and may "
            f"have {', '.join(op.defaults) or 'no others'}; it has "
            f"{', '.join(sorted(values)) or 'none'}. Pass a function that reads them, as in "
            f"register_op({name}, {op.name!r}, attributes=lambda layer: {{'axis': layer.axis}})."
        )

    def read(call: Call) -> Attributes:
        assert callable(source)
        try:
            return check(source(call.layer))
        except AttributeError as error:
            raise ValueError(
                f"{layer_class.__name__} was registered as {op.name} with attributes that "
                f"cannot be read from layer '{call.layer.name}': {error}."
            ) from error

    if callable(source):
        return dataclasses.replace(op, attributes=read)
    fixed = check(source)
    return dataclasses.replace(op, attributes=lambda call: fixed)
