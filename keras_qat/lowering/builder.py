"""Builds the calls that replace a call, and stores the new layers of these calls."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, drop_unused_calls
from keras_qat.graph.facts import solve
from keras_qat.graph.precision import get_policy
from keras_qat.keras2.backend import keras
from keras_qat.keras2.layers_and_models import clone

Layer: TypeAlias = keras.layers.Layer

VERIFY = "KERAS_QAT_VERIFY_PASSES"
"""Environment variable: 1 checks the graph after each pass, and raises errors of expansions."""

_PLAIN = bool, int, float, str, np.generic
"""Types of settings that are compared with `==`."""


@dataclasses.dataclass
class LoweringContext:
    """The options of lowering, and the layers that it has created.

    All calls of a shared layer use the same new layers.

    Args:
        activations: whether to replace activations by operators that runtimes have.
            `recipes.contrib` keeps them, like tf.contrib.quantize, and does not trace layers.
        may_trace: function that returns whether to trace a call's layer; None for default rules.
        has_int16: whether the target supports 16 bits. If not, lowering uses 16 bits only where 8
            bits would lose all values.
        has_float: whether calls that replace NaN stay in float. If not, inputs must not hold NaN.
    """

    activations: bool = True
    may_trace: Callable[[Call], bool | None] = lambda call: None
    has_int16: bool = True
    has_float: bool = True

    def __post_init__(self) -> None:
        self.verifies = bool(os.environ.get(VERIFY))
        self.weights: dict[Layer, list[tf.Variable]] = {}
        """New layer -> the initial values of its weights."""
        self.compared: dict[Hashable, bool] = {}
        """Call -> whether the expansion of the call returned the same results for random inputs."""
        self._layers: dict[tuple[Hashable, str], Layer] = {}
        self._settings: dict[tuple[Layer, str], list[Any]] = {}

    def clear(self) -> None:
        """Remove all layers, before lowering begins again."""
        for known in (self.weights, self._layers, self._settings):
            known.clear()

    def layer(
        self,
        source: Hashable,
        part: str,
        make: Callable[[], Layer],
        weights: Iterable[tf.Variable] = (),
    ) -> Layer:
        """Return the component `part` of a layer, or create it with the function `make`."""
        if (source, part) not in self._layers:
            layer = self._layers[source, part] = make()
            self.weights[layer] = list(weights)
        return self._layers[source, part]

    def part_for(self, source: Layer, part: str, settings: object) -> str:
        """Return a component's name, with a number if another call uses different settings.

        Settings may depend on a tensor's size, which can differ between calls of a layer.
        """
        leaves = [leaf if isinstance(leaf, _PLAIN) else None for leaf in tf.nest.flatten(settings)]
        known = self._settings.setdefault((source, part), [])
        if leaves not in known:
            known.append(leaves)
        index = known.index(leaves)
        return f"{part}_variant_{index}" if index else part

    def keep(
        self, source: Layer, part: str, layer: Layer, weights: Iterable[tf.Variable] = ()
    ) -> Layer:
        """Register a layer as the component `part` if there is none. Return the component."""
        return self.layer(source, part, lambda: layer, weights)

    def find_split_layers(self) -> set[Layer]:
        """Return each layer that has a weight from which several new layers are initialized."""
        starts: dict[tuple[Hashable, int], set[Layer]] = {}
        for (source, _), layer in self._layers.items():
            for weight in self.weights[layer]:
                starts.setdefault((source, id(weight)), set()).add(layer)
        return {source for (source, _), layers in starts.items() if len(layers) > 1}

    def clone(
        self, source: Layer, part: str, weights: Iterable[tf.Variable], **config: Any
    ) -> Layer:
        """Return the component `part`, a copy of the layer that has the settings `config`."""
        return self.layer(source, part, lambda: clone(source, **config), weights)

    def get_weights(self, layer: Layer) -> list[tf.Variable]:
        """Return a layer's initial weights, even if the layer is not built."""
        return self.weights.get(layer, layer.weights)


Lowering = Callable[[Call, LoweringContext], list[Call]]
"""A function that returns the calls that replace a call; [] if the call stays unchanged."""


class PartsBuilder:
    """Builds the calls that replace a call."""

    def __init__(self, call: Call, context: LoweringContext) -> None:
        self.call, self.context, self.calls = call, context, list[Call]()

    def new(
        self,
        part: str,
        make: Callable[..., Layer],
        *args: Any,
        weights: Iterable[tf.Variable] = (),
        **options: Any,
    ) -> Layer:
        """Return a new layer, named after the call's layer and the component.

        The layer has the precision of the call's output, unless it is a clone or `dtype` is given.

        Args:
            part: name of the component; "" for the name of the call's layer.
            make: function or class that creates the layer from `args`, `options` and the name.
            weights: the initial weights.
        """
        layer = self.call.layer
        part = self.context.part_for(layer, part, (args, options))
        name = f"{layer.name}_{part}" if part else layer.name
        if make is not clone:
            options = {"dtype": get_policy(self.call.output.dtype), **options}
        return self.context.layer(layer, part, lambda: make(*args, **options, name=name), weights)

    def add(
        self,
        layer: Layer,
        *args: Any,
        kwargs: Mapping[str, Any] | None = None,
        shape: Sequence[int | None] | None = None,
        output: Any = None,
    ) -> Any:
        """Add a call of a layer, and return its output.

        Args:
            layer: the layer.
            args, kwargs: the arguments of the call.
            shape: the output's shape; None for the shape that the layer infers.
            output: the output, by default a new tensor.
        """
        if output is None:
            if shape is None:
                shapes = tf.nest.map_structure(lambda value: value.shape, args[0])
                shape = layer.compute_output_shape(shapes)
            output = self.between(layer, shape)
        self.calls.append(Call(layer, args, dict(kwargs or {}), output, self.path(layer)))
        return output

    def end(self, layer: Layer, *args: Any, kwargs: Mapping[str, Any] | None = None) -> list[Call]:
        """Add the last call, which computes the original outputs, and return all calls."""
        self.add(layer, *args, kwargs=kwargs, output=self.call.outputs)
        return self.calls

    def chain(self, *layers: Layer) -> list[Call]:
        """Add calls of layers, each on the output of the call before it, and return all calls."""
        args, kwargs = self.call.args, self.call.kwargs
        for layer in layers[:-1]:
            args, kwargs = (self.add(layer, *args, kwargs=kwargs),), {}
        return self.end(layers[-1], *args, kwargs=kwargs)

    def path(self, layer: Layer) -> str:
        """Return the name of a component's call: the call's path with the component's name."""
        name = self.call.layer.name
        if layer.name.startswith(name):
            return self.call.name + layer.name.removeprefix(name)
        return self.call.name.removesuffix(name) + layer.name

    def between(self, layer: Layer, shape: Sequence[int | None]) -> Value:
        """Return a new tensor that the component `layer` computes for the next component."""
        name, output = self.path(layer), self.call.output
        label = f"{name}_before_activation" if name == self.call.name else name
        return Value(label + get_suffix(output.name, self.call.name), tuple(shape), output.dtype)


def get_suffix(tensor: str, call: str) -> str:
    """Return the part of a tensor's name after the name of its call: `:1` for `split:1`.

    A call inside a layer may compute the layer's output, whose name starts with the layer's name.
    """
    if tensor.startswith(call):
        return tensor.removeprefix(call)
    counts = re.search(r"[#:]\d.*", tensor)
    return counts[0] if counts else ""


def replace_calls(graph: Graph, replaced: Mapping[Call, list[Call]]) -> Graph:
    """Replace each call in `replaced` by its new calls, and drop calls that become unused."""
    calls = [new for call in graph.calls for new in replaced.get(call, [call])]
    return drop_unused_calls(dataclasses.replace(graph, calls=calls)) if replaced else graph


def rewrite_calls(graph: Graph, rewrite: Callable[[Call], list[Call]]) -> Graph:
    """Replace calls by the results of `rewrite`. If `rewrite` returns [], the call stays."""
    calls = [new for call in graph.calls for new in rewrite(call) or [call]]
    return dataclasses.replace(graph, calls=calls)


def find_calls_before(value: Value) -> list[Call]:
    """Return the calls on which a value depends, in topological order."""
    calls: dict[Call, None] = {}

    def visit(value: Value) -> Generator[Value, Any, None]:
        if value.producer is not None:
            yield from value.producer.inputs
            calls[value.producer] = None

    solve(value, visit)
    return list(calls)
