"""Opening: layers that no row lists become the calls that they are made of.

Lambdas, custom layers with or without weights, layers with others inside, activations that are
functions of a user's own. What cannot be opened stays as it is, and computes in float.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from keras_qat.frontend import graph as graph_lib
from keras_qat.frontend.graph import Call, Graph, Value, map_values, values_in
from keras_qat.frontend.helper_layers import TrainingOnly, WeightTensor
from keras_qat.frontend.keras2.backend import keras
from keras_qat.frontend.keras2.trace_layer import (
    CannotOpen,
    OnlyTrains,
    OpenedLayer,
    names_inside,
    open_layer,
)
from keras_qat.frontend.tf_operations import is_operation
from keras_qat.lowering.activations import ACTIVATIONS, split_activation
from keras_qat.lowering.builder import LoweringContext, PartsBuilder
from keras_qat.lowering.weighted_products import with_kernels
from keras_qat.ops.registry import is_listed, is_registered, lists

__all__ = ["open_layers"]

_layers = keras.layers


def open_layers(
    graph: Graph, context: LoweringContext, may_open: Callable[[Call], bool | None]
) -> Graph:
    """`graph` with every layer opened that no row lists.

    Args:
        graph: a graph as it was read.
        context: takes the layers that are made.
        may_open: whether a layer may be opened; True for one that is opened even if it normalizes,
            None for what is usual.
    """

    def is_whole(call: Call) -> bool:
        """Whether a call is a subclassed model, all of it: its parts have their own names."""
        return graph.calls == [call] and isinstance(call.layer, keras.Model)

    closed: dict[str, str] = {}
    anchor = values_in(graph.inputs)[0]

    def expand(call: Call) -> list[Call]:
        said = may_open(call)
        if said is False:
            return [call]
        parts = _unknown_activation(call, context)
        if not parts and _is_closed(call.layer):
            try:
                namer = _Namer(call, "" if is_whole(call) else f"{call.name}/")
                parts = _calls_of(
                    open_layer(call), call, context, anchor, namer, forced=said is True
                )
            except OnlyTrains as found:
                keep = PartsBuilder(call, context)
                layer = keep.new("", TrainingOnly, found.model, weights=found.model.weights)
                return keep.end(layer, call.inputs[0])
            except CannotOpen as error:
                if is_whole(call):
                    raise ValueError(
                        f"The subclassed model '{call.name}' cannot be opened: {error}. Express "
                        f"it in the functional style, keras.Model(inputs, outputs), or quantize "
                        f"the functional models inside it one by one."
                    ) from error
                closed[call.name] = str(error)
        return [each for part in parts for each in expand(part)] or [call]

    calls = [each for call in graph.calls for each in expand(call)]
    return with_kernels(dataclasses.replace(graph, calls=calls, closed=closed), context)


def _is_closed(layer: Any) -> bool:
    """Whether what a layer does is a user's own code."""
    if is_registered(layer) or is_operation(layer):
        return False
    if type(layer) is _layers.Activation:
        return not isinstance(layer.activation, _layers.Layer) and not _is_known(layer.activation)
    if type(layer) is _layers.Lambda:
        return True
    return type(layer).__module__.split(".")[0] not in ("keras", "tf_keras", "keras_qat")


def _is_known(function: Any) -> bool:
    """Whether there is a row or a lowering for an activation function."""
    with contextlib.suppress(TypeError):  # Not everything that can be called has a hash.
        return function in ACTIVATIONS or lists(function)
    return False


def _unknown_activation(call: Call, context: LoweringContext) -> list[Call]:
    """A layer of Keras' with an activation that is a function of a user's own: it and that."""
    layer = call.layer
    function = getattr(layer, "activation", None)
    is_own = is_listed(layer) and not is_registered(layer) and callable(function)
    if not is_own or type(layer) is _layers.Activation or isinstance(function, _layers.Layer):
        return []
    if str(function.__module__).split(".")[0] in ("keras", "tf_keras", "tensorflow"):
        return []
    return split_activation(call, context)


def _itself(layer: Any) -> Any:
    return layer


class _Namer:
    """Names of what is inside a layer, each once."""

    def __init__(self, call: Call, prefix: str) -> None:
        self.call, self.prefix, self.taken = call, prefix, set[str]()
        self.inside = names_inside(call.layer)
        self.of_layer: dict[Any, str] = {}
        self.gave_output = False

    def name(self, inner: Call, gives_output: bool) -> str:
        layer = inner.layer
        if is_operation(layer):
            if gives_output and not self.gave_output:
                self.gave_output = True
                return self.call.name
            return self.unique(str(layer.symbol).rsplit(".", 1)[-1])
        if layer not in self.of_layer:
            self.of_layer[layer] = self.unique(self.inside.get(id(layer), inner.name))
        return self.of_layer[layer]

    def unique(self, base: str) -> str:
        name, count = base, 1
        while name in self.taken:
            name, count = f"{base}_{count}", count + 1
        self.taken.add(name)
        return self.prefix + name


NORMALIZING = {
    *("math.rsqrt", "math.sqrt", "math.reduce_variance", "math.reduce_std", "nn.moments"),
    *("math.l2_normalize", "linalg.l2_normalize", "linalg.normalize", "norm", "linalg.norm"),
    *("nn.batch_normalization", "compat.v1.nn.fused_batch_norm", "nn.local_response_normalization"),
}
"""Operations by which layers divide by the size of what they read."""


def _calls_of(
    found: OpenedLayer,
    call: Call,
    context: LoweringContext,
    anchor: Value,
    namer: _Namer,
    forced: bool,
) -> list[Call]:
    """The calls inside a layer, on what it reads, in place of what it gives."""
    parts, graph = PartsBuilder(call, context), found.graph
    inputs = values_in(graph.inputs)
    read = inputs[: len(inputs) - len(found.weights)]
    current: dict[Value, Value] = dict(zip(read, dict.fromkeys(call.inputs), strict=True))
    count = context.opened[call.layer] = context.opened.get(call.layer, 0) + 1
    mark = f"#{count}" if count > 1 else ""
    of_weights = _computed_from_weights(graph, found.weights)
    given = dict(zip(values_in(graph.outputs), values_in(call.outputs), strict=False))
    if len(given) != len(values_in(call.outputs)):
        raise CannotOpen("it gives one tensor twice")

    def tensor_of(value: Value) -> Value:
        """What takes the place of a value inside; weights become tensors where they are read."""
        if value not in current:
            name = namer.unique(_name_of_weight(value, found))
            layer, shape = _weight_tensor(value, found, parts, name)
            current[value] = given.get(value) or Value(name + mark, shape, value.dtype)
            parts.calls.append(Call(layer, (anchor,), {}, current[value], name, source=call.source))
        return current[value]

    for inner in graph.calls:
        if set(values_in(inner.outputs)) <= of_weights:
            continue
        symbol = str(getattr(inner.layer, "symbol", ""))
        if symbol in NORMALIZING and not forced:
            raise CannotOpen(f"it normalizes (tf.{symbol}), which takes more than 8 bits")
        name = namer.name(inner, gives_output=not given.keys().isdisjoint(values_in(inner.outputs)))
        args, kwargs = map_values(tensor_of, (inner.args, inner.kwargs))
        for value in values_in(inner.outputs):
            label = name + mark + value.name.removeprefix(inner.name)
            current[value] = given.get(value) or Value(label, value.shape, value.dtype)
        outputs = map_values(current.__getitem__, inner.outputs)
        layer, source = inner.layer, None
        if is_operation(layer):
            source = call.source
            graph_lib.rename(layer, name.rsplit("/", 1)[-1])
            layer = context.layer(call.layer, f"{symbol} {name}", partial(_itself, layer))
        parts.calls.append(Call(layer, args, kwargs, outputs, name, source=source))
    for value, output in given.items():
        if tensor_of(value) is not output:  # The layer gives what it reads.
            identity = parts.new(f"output_{output.name}", _layers.Activation, "linear")
            parts.calls.append(
                Call(identity, (current[value],), {}, output, call.name, source=call.source)
            )
    for each in parts.calls:
        each.within = (*call.within, call.layer)
    return parts.calls


def _computed_from_weights(graph: Graph, weights: dict[Value, Any]) -> set[Value]:
    """Weights, and values that are computed from weights which nothing else reads."""
    consumers = graph.consumers()
    found = set(weights)
    for call in graph.calls:
        alone = all(len(consumers[each]) == 1 for each in call.inputs)
        if call.inputs and alone and found.issuperset(call.inputs):
            found.update(values_in(call.outputs))
    return found


def _name_of_weight(value: Value, found: OpenedLayer) -> str:
    """The name of a weight's variable, of something that is computed from it that with a mark."""
    if value in found.weights:
        return found.weights[value].name.split(":")[0].rsplit("/", 1)[-1]
    sources = list(_weights_behind(value, found))
    return _name_of_weight(sources[0], found) + "_computed"


def _weights_behind(value: Value, found: OpenedLayer) -> list[Value]:
    """The weights that a value is computed from."""
    if value in found.weights:
        return [value]
    assert value.producer is not None
    inside = [each for read in value.producer.inputs for each in _weights_behind(read, found)]
    return list(dict.fromkeys(inside))


def _weight_tensor(
    value: Value, found: OpenedLayer, parts: PartsBuilder, name: str
) -> tuple[Any, Any]:
    """The layer that gives a value which depends on weights alone, made once, and its shape."""
    sources = _weights_behind(value, found)
    variables = [found.weights[each] for each in sources]
    owner, expression = parts.call.layer, None
    if value not in found.weights:
        graph = dataclasses.replace(
            found.graph,
            inputs=sources,
            outputs=value,
            output_names=["tensor"],
            calls=_behind(value),
            name="expression",
        )
        expression = graph_lib.rebuild(graph)
    layer = parts.context.layer(
        owner,
        f"weight {name}",
        lambda: WeightTensor(
            [tuple(each.shape) for each in variables],
            expression,
            weight_dtype=variables[0].dtype.name,
            frozen=[place for place, each in enumerate(variables) if not each.trainable],
            regularizers=[found.regularizers.get(id(each)) for each in variables],
            constraints=[each.constraint for each in variables],
            trainable=owner.trainable,
            name=name.rsplit("/", 1)[-1],
        ),
        variables,
    )
    return layer, tuple(value.shape)


def _behind(value: Value) -> list[Call]:
    """The calls that a value depends on, in order."""
    call = value.producer
    if call is None:
        return []
    before = [each for read in call.inputs for each in _behind(read)]
    return list(dict.fromkeys([*before, call]))
