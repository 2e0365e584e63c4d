"""What a layer is made of: its `call` traced on symbolic tensors, as Keras traces models.

What a layer does in Python happens once, while it is traced. So a layer is only opened if the
operations found compute what it computes, on random numbers, and do so in training as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.frontend import graph as graph_lib
from keras_qat.frontend.graph import Call, Graph, Value, map_values, takes_training, values_in
from keras_qat.frontend.keras2.backend import keras, swapped, takes_mask

__all__ = ["CannotOpen", "OnlyTrains", "OpenedLayer", "names_inside", "open_layer"]

SIZE = 8
"""What open sizes are for the numbers that are tried."""


class CannotOpen(Exception):
    """Why a layer cannot be opened: a few words."""


class OnlyTrains(Exception):
    """A layer that passes its input on but in training: `model` is what it does then."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model


@dataclasses.dataclass(frozen=True)
class OpenedLayer:
    """A layer's `call` as calls of other layers and of TensorFlow's operations.

    Args:
        graph: the calls. Its inputs are the tensors that the layer read, then its own weights.
        weights: value of the graph -> the variable that it stands for.
        regularizers: id of a variable -> its regularizer.
    """

    graph: Graph
    weights: dict[Value, Any]
    regularizers: dict[int, Any]


def open_layer(call: Call) -> OpenedLayer:
    """Opens the layer of a call, which is left as it is.

    Raises:
        CannotOpen: if that is not possible.
        OnlyTrains: if it does nothing but in training.
    """
    layer = call.layer
    _check(call)
    trained = takes_training(layer) and call.kwargs.get("training") is None
    with tf.init_scope(), _without_nodes(layer):
        traces = [_Trace(call, phase) for phase in ((True, False) if trained else (None,))]
        if trained:
            _follow_training(*traces)
        _check_numbers(call, traces[-1])
    return traces[0].read()


def _check(call: Call) -> None:
    layer = call.layer
    if any(value.masked for value in call.inputs):
        raise CannotOpen("it reads a mask")
    if layer.activity_regularizer is not None:
        raise CannotOpen("it has an activity regularizer")
    if len(layer._callable_losses) > len(_regularizers(layer)):
        raise CannotOpen("it adds to the loss")
    if layer.compute_dtype != layer.variable_dtype:
        raise CannotOpen("it computes in mixed precision")


def _regularizers(layer: Any) -> dict[int, Any]:
    """Those of a layer's own weights, by the variables' ids."""
    found = {}
    for each in layer._callable_losses:
        loss = each.args[0] if isinstance(each, partial) and each.args else each
        if isinstance(loss, partial) and loss.func.__name__ == "_loss_for_variable":
            found[id(loss.args[0])] = inspect.getclosurevars(loss.func).nonlocals["regularizer"]
    return found


@contextlib.contextmanager
def _without_nodes(layer: Any) -> Iterator[None]:
    """Runs a block after which the layers inside a layer know nothing of calls made in it."""
    inside = list(layer._flatten_layers(include_self=False))
    counts = [(len(each._inbound_nodes), len(each._outbound_nodes)) for each in inside]
    try:
        yield
    finally:
        for each, (inbound, outbound) in zip(inside, counts, strict=True):
            del each._inbound_nodes[inbound:], each._outbound_nodes[outbound:]


class _Trace:
    """One symbolic run of a layer's `call`."""

    def __init__(self, call: Call, training: bool | None) -> None:
        self.layer = layer = call.layer
        own, replaced = _own_variables(layer)
        self.weights = list({id(each): each for each in own}.values())
        symbols = {id(each): graph_lib.symbolic(each.shape, each.dtype) for each in self.weights}
        self.inputs = {value: graph_lib.symbolic(value.shape, value.dtype) for value in call.inputs}
        args, kwargs = map_values(self.inputs.__getitem__, (call.args, dict(call.kwargs)))
        if training is not None:
            kwargs["training"] = training
        elif takes_training(layer):
            kwargs.setdefault("training", None)
        kwargs = {key: each for key, each in kwargs.items() if key != "mask" or takes_mask(layer)}
        put = {name: make(symbols) for name, make in replaced.items()}
        adds = {name: _refuses(name) for name in ("add_loss", "add_metric", "add_update")}
        with tf.GradientTape(watch_accessed_variables=True) as tape:
            try:
                with swapped(layer, **put), _given(layer, adds):
                    self.outputs = layer.call(*args, **kwargs)
            except CannotOpen:
                raise
            except Exception as error:  # Whatever a user's own code may raise.
                raise CannotOpen(_what_stopped(error)) from error
        symbolic = [*self.inputs.values(), *symbols.values()]
        found = tf.nest.flatten(self.outputs)
        if not found or not all(keras.backend.is_keras_tensor(each) for each in found):
            raise CannotOpen("what it gives does not depend on what it reads")
        try:
            self.model = keras.Model(symbolic, self.outputs)
        except ValueError as error:
            raise CannotOpen(_first_line(error)) from error
        called = {id(each) for inner in self.model.layers for each in inner.variables}
        for each in tape.watched_variables():
            if id(each) not in called:
                raise CannotOpen(f"it reads the weight {each.name} of another layer")

    @property
    def nodes(self) -> list[Any]:
        """What was called, in order."""
        return graph_lib.nodes_of(self.model)

    def read(self) -> OpenedLayer:
        """The trace as a graph."""
        try:
            graph = graph_lib.read(self.model)
        except ValueError as error:
            raise CannotOpen(_first_line(error)) from error
        values = values_in(graph.inputs)
        own = values[len(self.inputs) :]
        # The structure of what the layer gave; Keras makes a list of one output a tensor.
        flat = iter(values_in(graph.outputs))
        graph.outputs = tf.nest.map_structure(lambda each: next(flat), self.outputs)
        weights = dict(zip(own, self.weights, strict=True))
        return OpenedLayer(graph, weights, _regularizers(self.layer))

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """What the operations compute from numbers."""
        return tf.nest.flatten(self.model([*inputs, *self.weights], training=False))


def _own_variables(layer: Any) -> tuple[list[Any], dict[str, Any]]:
    """A layer's variables in its attributes, and how to make those attributes with others."""
    found: list[Any] = []

    def variables_in(each: Any) -> list[Any]:
        if isinstance(each, tf.Variable):
            return [each]
        inside = each.values() if isinstance(each, dict) else each
        is_nest = isinstance(each, (list, tuple, dict))
        return [one for item in inside for one in variables_in(item)] if is_nest else []

    def with_symbols(each: Any, symbols: dict[int, Any]) -> Any:
        if isinstance(each, dict):
            return {key: with_symbols(item, symbols) for key, item in each.items()}
        if isinstance(each, (list, tuple)):
            return [with_symbols(item, symbols) for item in each]
        return symbols.get(id(each), each)

    replaced = {}
    for name, each in vars(layer).items():
        if name.startswith(_OF_KERAS) or not variables_in(each):
            continue
        found += variables_in(each)
        replaced[name] = lambda symbols, each=each: with_symbols(each, symbols)
    return found, replaced


PHASE = "keras_qat: the phase"
"""Stands for what a layer is told of the phase."""

_OF_KERAS = ("_trainable_weights", "_non_trainable_weights", "_self_", "_captured", "_obj_ref")
"""Beginnings of attributes in which Keras keeps track of others."""


def names_inside(layer: Any) -> dict[int, str]:
    """Names of the layers that a layer has in its attributes, by their ids.

    Those of the attributes, as Keras numbers the names that it makes up anew in every copy; names
    that were given stay.
    """
    found: dict[int, str] = {}

    def visit(each: Any, path: str) -> None:
        if isinstance(each, keras.layers.Layer):
            parted = re.sub(r"(.)([A-Z][a-z0-9]+)", r"\1_\2", type(each).__name__)
            base = re.sub(r"([a-z])([A-Z])", r"\1_\2", parted).lower()
            is_made_up = re.fullmatch(re.escape(base) + r"(_\d+)?", each.name)
            found.setdefault(id(each), path if is_made_up else each.name)
        elif isinstance(each, dict):
            for key, item in each.items():
                visit(item, f"{path}_{key}")
        elif isinstance(each, (list, tuple)):
            for place, item in enumerate(each):
                visit(item, f"{path}_{place}")

    for name, each in vars(layer).items():
        if not name.startswith(("_self_", "_obj", "_inbound", "_outbound")):
            visit(each, name.strip("_"))
    return found


def _refuses(name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise CannotOpen(f"it calls {name}")

    return refuse


@contextlib.contextmanager
def _given(layer: Any, attributes: dict[str, Any]) -> Iterator[None]:
    """Runs a block in which a layer has attributes that hide those of its class."""
    vars(layer).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(layer)[name]


def _follow_training(trained: _Trace, tested: _Trace) -> None:
    """Makes layers inside follow the model's phase where the layer tells them its own.

    Raises:
        CannotOpen, OnlyTrains: if it computes otherwise in training.
    """
    does_nothing = _passes_on(tested) and not trained.weights
    otherwise: Exception = CannotOpen("it computes otherwise in training")
    if does_nothing and len(trained.inputs) == 1 and _varies_alike(trained):
        otherwise = OnlyTrains(trained.model)
    known = [{id(each): at for at, each in enumerate(_symbols(t))} for t in (trained, tested)]
    if list(map(_what, trained.nodes)) != list(map(_what, tested.nodes)):
        raise otherwise

    def common(a: Any, b: Any) -> Any:
        if a is True and b is False:
            return PHASE
        if known[0].get(id(a)) != known[1].get(id(b)) or (
            id(a) not in known[0] and not _equal(a, b)
        ):
            raise otherwise
        return a

    for one, other in zip(trained.nodes, tested.nodes, strict=True):
        given = [(each.call_args, dict(each.call_kwargs)) for each in (one, other)]
        try:
            args, kwargs = tf.nest.map_structure(common, *given)
        except (ValueError, TypeError) as error:
            raise otherwise from error
        if any(each is PHASE for each in args):  # By position.
            args = args[: next(place for place, each in enumerate(args) if each is PHASE)]
        one.call_args = args
        one.call_kwargs = {key: None if each is PHASE else each for key, each in kwargs.items()}


def _passes_on(trace: _Trace) -> bool:
    """Whether what was traced gives what it reads, maybe by way of `tf.identity`."""
    symbols = {getattr(node.layer, "symbol", "") for node in trace.nodes}
    return symbols <= {"identity"} and keras.backend.is_keras_tensor(trace.outputs)


def _varies_alike(trained: _Trace) -> bool:
    """Whether what was traced is random in training if the layer is."""
    symbols = [str(getattr(node.layer, "symbol", "")) for node in trained.nodes]
    if any("random" in each or "dropout" in each for each in symbols):
        return True  # Even if it drops but one of a thousand examples.
    (x,) = _numbers(trained)
    runs: Any = (lambda: trained.layer(x, training=True)), (lambda: trained.model(x, training=True))
    return len({all(np.all(run() == run()) for _ in range(8)) for run in runs}) == 1


def _symbols(trace: _Trace) -> list[Any]:
    made = [tf.nest.flatten(node.outputs) for node in trace.nodes]
    return [*trace.model.inputs, *(each for found in made for each in found)]


def _what(node: Any) -> Any:
    """What computes: of layers without weights, such as `keras.layers.add` makes, any such one."""
    layer = node.layer
    symbol = getattr(layer, "symbol", None)
    if symbol:
        return type(layer), symbol
    if layer.weights or type(layer).__module__.split(".")[0] not in ("keras", "tf_keras"):
        return layer
    return type(layer), {**layer.get_config(), "name": ""}


def _equal(a: Any, b: Any) -> bool:
    if tf.is_tensor(a) or isinstance(a, np.ndarray):
        return np.shape(a) == np.shape(b) and bool(np.all(np.asarray(a) == np.asarray(b)))
    return bool(a is b or a == b)


def _numbers(trace: _Trace) -> list[Any]:
    """Random inputs."""
    draw = np.random.default_rng(0)
    found = []
    for value in trace.inputs:
        sizes = [SIZE if size is None else size for size in value.shape]
        sizes[:1] = [2 if value.shape[0] is None else value.shape[0]] if sizes else []
        drawn = draw.normal(size=sizes) if value.is_float else draw.integers(0, 2, sizes)
        found.append(tf.cast(drawn, value.dtype))
    return found


def _check_numbers(call: Call, trace: _Trace) -> None:
    """Raises `CannotOpen` unless the operations compute what the layer computes."""
    numbers = dict(zip(trace.inputs, _numbers(trace), strict=True))
    args, kwargs = map_values(numbers.__getitem__, (call.args, dict(call.kwargs)))
    if takes_training(call.layer) and kwargs.get("training") is None:
        kwargs["training"] = False
    try:
        expected = [tf.nest.flatten(call.layer(*args, **kwargs)) for _ in range(2)]
    except Exception:  # Sizes that do not fit: nothing to compare with.
        return
    found = trace(list(numbers.values()))
    for a, b, c in zip(*expected, found, strict=True):
        size = float(tf.reduce_max(tf.abs(tf.cast(a, tf.float32)))) if tf.size(a) else 0.0
        for other in (b, c):
            if not np.allclose(a, other, rtol=1e-4, atol=1e-5 * size + 1e-12, equal_nan=True):
                raise CannotOpen("it does not compute the same each time")


def _what_stopped(error: Exception) -> str:
    """An error of a layer's own code, with the line of that code."""
    ours = ("site-packages", str(Path(__file__).parent.parent), "<", "__autograph_generated")
    frames = traceback.extract_tb(error.__traceback__)
    lines = [each for each in frames if not any(part in each.filename for part in ours)]
    where = f" in `{lines[-1].line}` (line {lines[-1].lineno})" if lines else ""
    return f"{type(error).__name__}{where}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    return text if len(text) < 120 else text[:117] + "..."
