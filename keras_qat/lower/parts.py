"""What lowerings are made with: the layers they make, and calls of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.keras2.graph import Call, Value

__all__ = ["Lowering", "Made", "between", "chain", "path"]


class Made:
    """The layers that lowering made: for a shared layer, the same parts in each of its calls."""

    def __init__(self) -> None:
        self.weights: dict[Any, list[Any]] = {}
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


Lowering = Callable[[Call, Made], list[Call]]
"""Makes the calls that a call becomes, or none if it stays as it is."""


def chain(call: Call, *layers: Any) -> list[Call]:
    """Calls of layers one after the other, that together compute what `call` did."""
    calls: list[Call] = []
    args, kwargs = call.args, call.kwargs
    for layer in layers:
        if layer is layers[-1]:
            output = call.output
        else:
            shapes = tf.nest.map_structure(lambda value: value.shape, args[0])
            output = between(call, layer, layer.compute_output_shape(shapes))
        calls.append(Call(layer, args, kwargs, output, path(call, layer)))
        args, kwargs = (output,), {}
    return calls


def path(call: Call, layer: Any) -> str:
    return call.name.removesuffix(call.layer.name) + layer.name


def between(call: Call, layer: Any, shape: Any) -> Value:
    """A tensor inside of what `call` did, made by `layer`."""
    name = path(call, layer)
    label = f"{name}_before_activation" if name == call.name else name
    return Value(label + call.output.name.removeprefix(call.name), tuple(shape), call.output.dtype)
