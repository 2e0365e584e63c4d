"""Tools for lowerings: the layers they made so far, and a builder of calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value
from keras_qat.graph.facts import describe_argument, solve
from keras_qat.graph.precision import get_policy
from keras_qat.keras2.layers_and_models import clone

_PLAIN = bool, int, float, str, np.generic
"""Types of settings that are compared with `==`."""


def trace_as_usual(call: Call) -> None:
    """Let tracing decide by itself about a layer."""


class LoweringContext:
    """What the recipe allows, and the layers that lowering made.

    All calls of a shared layer get the same parts. The arguments are those of `lower`.
    """

    def __init__(
        self,
        activations: bool = True,
        may_open: Callable[[Call], bool | None] = trace_as_usual,
        has_int16: bool = True,
        has_float: bool = True,
    ) -> None:
        self.activations, self.may_open = activations, may_open
        self.has_int16, self.has_float = has_int16, has_float
        self.weights: dict[Any, list[Any]] = {}
        self.compared: dict[Any, bool] = {}
        """Call -> whether its expansion computed the same on random inputs."""
        self._layers: dict[tuple[Any, str], Any] = {}
        self._settings: dict[tuple[Any, str], list[Any]] = {}
        self._patterns: dict[tuple[Any, str], dict[str, tuple[Any, str]]] = {}

    def clear(self) -> None:
        """Forgets all layers, before lowering begins again."""
        for known in (self.weights, self._layers, self._settings):
            known.clear()

    def layer(self, source: Any, part: str, make: Callable[[], Any], weights: Any = ()) -> Any:
        """Returns the named part of `source`, made on first use with the initial `weights`."""
        if (source, part) not in self._layers:
            layer = self._layers[source, part] = make()
            self.weights[layer] = list(weights)
        return self._layers[source, part]

    def part_for(self, source: Any, part: str, settings: Any) -> str:
        """Returns the name of a part; another one in calls that need it with other settings.

        A shared layer may be called with tensors of several sizes, which its parts depend on.
        """
        leaves = [leaf if isinstance(leaf, _PLAIN) else None for leaf in tf.nest.flatten(settings)]
        known = self._settings.setdefault((source, part), [])
        if leaves not in known:
            known.append(leaves)
        index = known.index(leaves)
        return f"{part}_variant_{index}" if index else part

    def keep(self, source: Any, part: str, layer: Any, weights: Any = ()) -> Any:
        """Returns the named part of `source`: an existing layer, the first that was given."""
        return self.layer(source, part, lambda: layer, weights)

    def pattern(self, call: Call, make: Any, inputs: Any, suffix: str = "", **options: Any) -> Call:
        """Returns the call that stands for a pattern of calls, of which `call` is the last.

        Patterns that end in one shared layer get one layer, unless its options differ.

        Args:
            call: the last call.
            make: called with `options`, the precision of the call's output and the name.
            inputs: what the new call reads.
            suffix: what follows the names of the call and its layer.
        """
        made = self._patterns.setdefault((call.layer, suffix), {})
        options["dtype"] = get_policy(call.output.dtype)
        config = make(**options, name=suffix or "pattern").get_config()
        key = repr((make, tf.nest.map_structure(describe_argument, config)))
        if key not in made:
            end = f"{suffix}_{len(made)}" if made else suffix
            made[key] = make(**options, name=call.layer.name + end), end
        layer, end = made[key]
        return Call(layer, (inputs,), {}, call.outputs, call.name + end).as_part_of(call)

    def split_weights(self) -> set[Any]:
        """Returns the layers of which a weight was split: several layers start from it."""
        starts: dict[tuple[Any, int], set[Any]] = {}
        for (source, _), layer in self._layers.items():
            for weight in self.weights[layer]:
                starts.setdefault((source, id(weight)), set()).add(layer)
        return {source for (source, _), layers in starts.items() if len(layers) > 1}

    def clone(self, source: Any, part: str, weights: Any, **config: Any) -> Any:
        """Returns the named part of `source` that is a copy of it with other settings."""
        return self.layer(source, part, lambda: clone(source, **config), weights)

    def weights_of(self, layer: Any) -> list[Any]:
        """Returns a layer's initial weights, also for a layer that is not built yet."""
        return self.weights.get(layer, layer.weights)


Lowering = Callable[[Call, LoweringContext], list[Call]]
"""Returns the calls that replace a call, or none if it stays as it is."""


class PartsBuilder:
    """Builds the calls that replace a call."""

    def __init__(self, call: Call, context: LoweringContext) -> None:
        self.call, self.context, self.calls = call, context, list[Call]()

    def new(self, part: str, make: Any, *args: Any, weights: Any = (), **options: Any) -> Any:
        """Makes the layer of a part, named after the call's layer and the part.

        It computes in the precision of the call's output, unless `dtype` is given or it is a clone.

        Args:
            part: name of the part; "" for the name of the call's layer.
            make: called with `args`, `options` and the name.
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
        layer: Any,
        *args: Any,
        kwargs: Mapping[str, Any] | None = None,
        shape: Any = None,
        output: Any = None,
    ) -> Value:
        """Adds a call of a layer.

        Args:
            layer: the layer.
            args, kwargs: its arguments.
            shape: the output's shape, by default as the layer infers it.
            output: the output, by default a new tensor.

        Returns:
            The output.
        """
        if output is None:
            if shape is None:
                shapes = tf.nest.map_structure(lambda value: value.shape, args[0])
                shape = layer.compute_output_shape(shapes)
            output = self.between(layer, shape)
        self.calls.append(Call(layer, args, dict(kwargs or {}), output, self.path(layer)))
        return output

    def end(self, layer: Any, *args: Any, kwargs: Mapping[str, Any] | None = None) -> list[Call]:
        """Adds the last call, which writes the original outputs, and returns all calls."""
        self.add(layer, *args, kwargs=kwargs, output=self.call.outputs)
        return self.calls

    def chain(self, *layers: Any) -> list[Call]:
        """Adds calls of layers one after the other, and returns all calls."""
        args, kwargs = self.call.args, self.call.kwargs
        for layer in layers[:-1]:
            args, kwargs = (self.add(layer, *args, kwargs=kwargs),), {}
        return self.end(layers[-1], *args, kwargs=kwargs)

    def path(self, layer: Any) -> str:
        """Returns the name of a part's call: the call's path with the part's layer name."""
        name = self.call.layer.name
        if layer.name.startswith(name):
            return self.call.name + layer.name.removeprefix(name)
        return self.call.name.removesuffix(name) + layer.name

    def between(self, layer: Any, shape: Any) -> Value:
        """Makes a tensor between two parts, written by `layer`."""
        name, output = self.path(layer), self.call.output
        label = f"{name}_before_activation" if name == self.call.name else name
        return Value(label + suffix_of(output.name, self.call.name), tuple(shape), output.dtype)


def suffix_of(tensor: str, call: str) -> str:
    """Returns what tells a tensor from others of a call: `:1` in the name `split:1`.

    The call inside a layer that writes the layer's output has another name than that output.
    """
    if tensor.startswith(call):
        return tensor.removeprefix(call)
    counts = re.search(r"[#:]\d.*", tensor)
    return counts[0] if counts else ""


def replace_by(
    call: Call, context: LoweringContext, make: Any, *args: Any, inputs: Any = None, **options: Any
) -> list[Call]:
    """Replaces a call by one layer under its name, with its input or other inputs."""
    parts = PartsBuilder(call, context)
    layer = parts.new("", make, *args, **options)
    return parts.end(layer, call.inputs[0] if inputs is None else inputs)


def calls_behind(value: Value) -> list[Call]:
    """Returns the calls that a value depends on, in order."""
    calls: dict[Call, None] = {}

    def visit(value: Value) -> Generator[Value, Any, None]:
        if value.producer is not None:
            yield from value.producer.inputs
            calls[value.producer] = None

    solve(value, visit)
    return list(calls)
