"""What lowerings are made with: the layers they make, and calls of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from keras_qat.frontend.graph import Call, Value, clone
from keras_qat.frontend.keras2.precision import policy_of

__all__ = ["Lowering", "LoweringContext", "PartsBuilder", "replace_by"]


class LoweringContext:
    """The layers that lowering made: for a shared layer, the same parts in each of its calls."""

    def __init__(self) -> None:
        self.weights: dict[Any, list[Any]] = {}
        self.opened: dict[Any, int] = {}
        """How often a layer was opened."""
        self._layers: dict[tuple[Any, str], Any] = {}

    def layer(self, source: Any, part: str, make: Callable[[], Any], weights: Any = ()) -> Any:
        """The part of `source` with that name, made once; it starts from `weights`."""
        if (source, part) not in self._layers:
            layer = self._layers[source, part] = make()
            self.weights[layer] = list(weights)
        return self._layers[source, part]

    def weights_of(self, layer: Any) -> list[Any]:
        """What a layer starts from: for one that lowering made, not yet its own weights."""
        return self.weights.get(layer, layer.weights)


Lowering = Callable[[Call, LoweringContext], list[Call]]
"""Makes the calls that a call becomes, or none if it stays as it is."""


class PartsBuilder:
    """The calls that a call becomes, in the making."""

    def __init__(self, call: Call, context: LoweringContext) -> None:
        self.call, self.context, self.calls = call, context, list[Call]()

    def new(self, part: str, make: Any, *args: Any, weights: Any = (), **options: Any) -> Any:
        """A layer named after the call's and the part; the part "" has the name of the layer.

        It computes in the precision of the call's output, unless it is told or is a clone.

        Args:
            part: the part.
            make: makes it of `args`, `options` and its name.
            weights: what it starts from.
        """
        layer = self.call.layer
        name = f"{layer.name}_{part}" if part else layer.name
        if make is not clone:
            options = {"dtype": policy_of(self.call.output.dtype), **options}
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
            shape: that of its output, by default as the layer says.
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
        """All calls, with a last one, which computes what the call did."""
        self.add(layer, *args, kwargs=kwargs, output=self.call.outputs)
        return self.calls

    def chain(self, *layers: Any) -> list[Call]:
        """All calls, of layers one after the other."""
        args, kwargs = self.call.args, self.call.kwargs
        for layer in layers[:-1]:
            args, kwargs = (self.add(layer, *args, kwargs=kwargs),), {}
        return self.end(layers[-1], *args, kwargs=kwargs)

    def path(self, layer: Any) -> str:
        """The name of a call of a layer: its path is that of the call, whatever that is called."""
        name = self.call.layer.name
        if layer.name.startswith(name):
            return self.call.name + layer.name.removeprefix(name)
        return self.call.name.removesuffix(name) + layer.name

    def between(self, layer: Any, shape: Any) -> Value:
        """A tensor inside of what the call did, made by a layer."""
        name, output = self.path(layer), self.call.output
        label = f"{name}_before_activation" if name == self.call.name else name
        return Value(label + output.name.removeprefix(self.call.name), tuple(shape), output.dtype)


def replace_by(
    call: Call, context: LoweringContext, make: Any, *args: Any, inputs: Any = None, **options: Any
) -> list[Call]:
    """The layer that computes what a call did, under its name, from its input or others."""
    parts = PartsBuilder(call, context)
    layer = parts.new("", make, *args, **options)
    return parts.end(layer, call.inputs[0] if inputs is None else inputs)
