"""Builds the calls that replace a call, and stores their new layers.

For example, lowering replaces a Dense layer with a swish by calls of new layers. They are
components of the original layer. Their names begin with its name, as in `dense_activation`.
"""

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
"""Environment variable. If it is 1, each pass is verified, and errors in expansions are raised."""

_PLAIN = bool, int, float, str, np.generic
"""`part_for` compares settings of these types, and ignores all other settings."""


@dataclasses.dataclass
class LoweringContext:
    """The options of lowering, and the layers that lowering creates.

    All calls of a shared layer use the same new layers.

    Args:
        activations: whether to trace layers and to replace activations. `recipes.contrib` does
            neither, like tf.contrib.quantize.
        may_trace: function that decides whether a call is traced. None means that lowering decides.
        has_int16: whether the target supports 16-bit activations. If not, a softmax has 16 bits
            only if 8 bits would round most values to 0.
        has_float: whether the target supports float. Operations that replace NaN then stay in
            float, because integers cannot be NaN.
        has_spectra: whether the target has float kernels of Fourier transforms. If not, products
            with matrices replace them.
    """

    activations: bool = True
    may_trace: Callable[[Call], bool | None] = lambda call: None
    has_int16: bool = True
    has_float: bool = True
    has_spectra: bool = True

    def __post_init__(self) -> None:
        self.verifies = bool(os.environ.get(VERIFY))
        self.weights: dict[Layer, list[tf.Variable]] = {}
        """Maps a new layer to the initial values of its weights."""
        self.compared: dict[Hashable, bool] = {}
        """Maps a kind of call to whether its replacement returned the same results in a test."""
        self._layers: dict[tuple[Hashable, str], Layer] = {}
        self._settings: dict[tuple[Layer, str], list[Any]] = {}

    def clear(self) -> None:
        for known in (self.weights, self._layers, self._settings):
            known.clear()

    def layer(
        self,
        source: Hashable,
        part: str,
        make: Callable[[], Layer],
        weights: Iterable[tf.Variable] = (),
    ) -> Layer:
        """Return the component `part` of `source`. Create it with `make` if it does not exist."""
        if (source, part) not in self._layers:
            layer = self._layers[source, part] = make()
            self.weights[layer] = list(weights)
        return self._layers[source, part]

    def part_for(self, source: Layer, part: str, settings: object) -> str:
        """Return the name of a component: `part`, or `part_variant_1` for a second set of settings.

        Calls of a shared layer may need different settings, for example if their inputs have other
        sizes.
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
        """Store `layer` as the component `part`, unless `part` exists. Return the component."""
        return self.layer(source, part, lambda: layer, weights)

    def find_split_layers(self) -> set[Layer]:
        """Return the original layers with a weight that initializes several new layers."""
        starts: dict[tuple[Hashable, int], set[Layer]] = {}
        for (source, _), layer in self._layers.items():
            for weight in self.weights[layer]:
                starts.setdefault((source, id(weight)), set()).add(layer)
        return {source for (source, _), layers in starts.items() if len(layers) > 1}

    def clone(
        self, source: Layer, part: str, weights: Iterable[tf.Variable], **config: Any
    ) -> Layer:
        """Return the component `part`: a copy of `source` with the changed settings `config`."""
        return self.layer(source, part, lambda: clone(source, **config), weights)

    def get_weights(self, layer: Layer) -> list[tf.Variable]:
        """Return the initial weights of a layer, even if the layer is not built yet."""
        return self.weights.get(layer, layer.weights)


Lowering = Callable[[Call, LoweringContext], list[Call]]
"""Type of a function that returns the replacements of a call. An empty list keeps the call."""


class PartsBuilder:
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
        """Return a new layer for a component.

        The component "pad" of the layer `conv` is named `conv_pad`. By default, it has the dtype
        policy of the call's output. If `make` is `clone`, it has the policy of the cloned layer.

        Args:
            part: name of the component. If it is "", the new layer has the name of the call's
                layer.
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
        """Add a call of a layer. Return `output`, or a new tensor by default.

        By default, the layer infers the shape of the new tensor.
        """
        if output is None:
            if shape is None:
                shapes = tf.nest.map_structure(lambda value: value.shape, args[0])
                shape = layer.compute_output_shape(shapes)
            output = self.between(layer, shape)
        self.calls.append(Call(layer, args, dict(kwargs or {}), output, self.path(layer)))
        return output

    def end(self, layer: Layer, *args: Any, kwargs: Mapping[str, Any] | None = None) -> list[Call]:
        """Add the last call, and return all calls. The last call computes the original outputs."""
        self.add(layer, *args, kwargs=kwargs, output=self.call.outputs)
        return self.calls

    def chain(self, *layers: Layer) -> list[Call]:
        """Add a call of each layer on the previous layer's output. Return all calls."""
        args, kwargs = self.call.args, self.call.kwargs
        for layer in layers[:-1]:
            args, kwargs = (self.add(layer, *args, kwargs=kwargs),), {}
        return self.end(layers[-1], *args, kwargs=kwargs)

    def path(self, layer: Layer) -> str:
        """Return the name of a component's call, such as `block/dense_activation`."""
        name = self.call.layer.name
        if layer.name.startswith(name):
            return self.call.name + layer.name.removeprefix(name)
        return self.call.name.removesuffix(name) + layer.name

    def between(self, layer: Layer, shape: Sequence[int | None]) -> Value:
        """Return a new symbolic tensor for the output of a component."""
        name, output = self.path(layer), self.call.output
        label = f"{name}_before_activation" if name == self.call.name else name
        return Value(label + get_suffix(output.name, self.call.name), tuple(shape), output.dtype)


def get_suffix(tensor: str, call: str) -> str:
    """Return the end of a tensor's name after the call's name, such as `:1` for `split:1`."""
    if tensor.startswith(call):
        return tensor.removeprefix(call)
    counts = re.search(r"[#:]\d.*", tensor)
    return counts[0] if counts else ""


def replace_calls(graph: Graph, replaced: Mapping[Call, list[Call]]) -> Graph:
    """Replace each key of `replaced` by its list of calls. Drop calls that become unused."""
    calls = [new for call in graph.calls for new in replaced.get(call, [call])]
    return drop_unused_calls(dataclasses.replace(graph, calls=calls)) if replaced else graph


def rewrite_calls(graph: Graph, rewrite: Callable[[Call], list[Call]]) -> Graph:
    """Replace each call by the result of `rewrite`. An empty list keeps the call."""
    calls = [new for call in graph.calls for new in rewrite(call) or [call]]
    return dataclasses.replace(graph, calls=calls)


def find_calls_before(value: Value) -> list[Call]:
    """Return all calls that a value depends on, in topological order."""
    calls: dict[Call, None] = {}

    def visit(value: Value) -> Generator[Value, Any, None]:
        if value.producer is not None:
            yield from value.producer.inputs
            calls[value.producer] = None

    solve(value, visit)
    return list(calls)
