"""Names for the calls and weights inside an opened layer."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Generator
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call, Value, flatten_values
from keras_qat.graph.facts import describe_arguments, solve
from keras_qat.graph.operations import is_operation, name_in_tensorflow, read_array
from keras_qat.helper_layers.operations import WeightTensor
from keras_qat.keras2.layer_names import name_inner_calls
from keras_qat.tracing.trace_layer import TracedLayer
from keras_qat.tracing.whole_graph import WholeGraph


class InnerNames:
    """Gives unique names to the calls inside a layer.

    Args:
        call: the call of the layer.
        prefix: what names begin with.
        named: name -> what it names, in all calls of the layer.
        taken: names that others have already, without the prefix.
    """

    def __init__(self, call: Call, prefix: str, named: dict[str, Any], taken: set[str]) -> None:
        self.call, self.prefix, self.taken, self.named = call, prefix, taken, named
        whole = isinstance(call.layer, WholeGraph)
        self.inside = call.layer.names if whole else name_inner_calls(call.layer)
        self.of_layer: dict[Any, str] = {}
        self.gave_output = False

    def name(self, inner: Call, arguments: Any, gives_output: bool) -> str:
        """Returns the name of an inner call, which is the layer's own if it gives its output.

        Args:
            inner: the call.
            arguments: those that it is given. With other weights it has another name.
            gives_output: whether its output is the layer's.
        """
        layer = inner.layer
        if is_operation(layer):
            symbol = name_in_tensorflow(layer)
            named = symbol, weights_in(arguments)
            is_first = gives_output and not self.gave_output
            if is_first and self.named.setdefault("", named) == named:
                self.gave_output = True
                return self.call.name
            return self.unique(symbol.rsplit(".", 1)[-1], named)
        if layer not in self.of_layer:
            base = self.inside.get(id(layer), inner.name)
            self.of_layer[layer] = self.unique(base, id(layer))
        return self.of_layer[layer]

    def unique(self, base: str, named: Any) -> str:
        """Returns a name that is new in this call, and names the same in the layer's other calls.

        Args:
            base: how it should begin.
            named: what tells an operation, a layer or a weight from others.
        """
        name, count = base, 1
        while name in self.taken or self.named.setdefault(name, named) != named:
            name, count = f"{base}_{count}", count + 1
        self.taken.add(name)
        return self.prefix + name


def weights_in(arguments: Any) -> list[Any]:
    """Returns what tells the weights and the constants of several numbers among arguments."""
    leaves = tf.nest.flatten(arguments)
    producers = [leaf.producer for leaf in leaves if isinstance(leaf, Value)]
    weights = [id(call.layer) for call in producers if call and type(call.layer) is WeightTensor]
    arrays = [read_array(leaf) for leaf in leaves if not isinstance(leaf, Value)]
    return weights + [x.tobytes() for x in arrays if x is not None and x.ndim]


def name_of_weight(value: Value, opened: TracedLayer) -> str:
    """Names a weight after its variable; a tensor computed from weights gets a suffix."""
    if value in opened.weights:
        return opened.weights[value].name.split(":")[0].rsplit("/", 1)[-1]
    return name_of_weight(weights_behind(value, opened)[0], opened) + "_computed"


def expression_of(value: Value, opened: TracedLayer) -> str:
    """Returns a hash of how a value is computed from weights: the same for equal computations."""
    return solve(value, functools.partial(_find_expression, opened=opened))


def _find_expression(value: Value, opened: TracedLayer) -> Generator[Value, Any, str]:
    if value in opened.weights:
        return f"weight {id(opened.weights[value])}"
    call = value.producer
    assert call is not None
    layer, index = call.layer, flatten_values(call.outputs).index(value)
    expressions = {}
    for read in call.inputs:
        expressions[read] = yield read
    what = name_in_tensorflow(layer) if is_operation(layer) else id(layer)
    arguments = describe_arguments(call, expressions.__getitem__)
    return hashlib.sha256(repr((what, arguments, index)).encode()).hexdigest()


def weights_behind(value: Value, opened: TracedLayer) -> list[Value]:
    """Returns the weights that a value is computed from."""
    return solve(value, functools.partial(_find_weights, opened=opened))


def _find_weights(value: Value, opened: TracedLayer) -> Generator[Value, Any, list[Value]]:
    if value in opened.weights:
        return [value]
    assert value.producer is not None
    weights: dict[Value, None] = {}
    for read in value.producer.inputs:
        weights.update(dict.fromkeys((yield read)))
    return list(weights)
