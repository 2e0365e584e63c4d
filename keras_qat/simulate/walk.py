"""The integer simulation: a quantization-aware model call by call, in codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.backend import keras
from keras_qat.export import folded, spelling
from keras_qat.export.inference import Levels, implied_levels
from keras_qat.graph import Call, Graph, Value, takes_training, values_in
from keras_qat.layers import Quantize, QuantizeWrapper
from keras_qat.patterns import CLIPS, kind_of
from keras_qat.rewrite import PREFIX
from keras_qat.simulate.codes import Codes, Grid, from_values
from keras_qat.simulate.convolution import Weights, convolve
from keras_qat.simulate.elementwise import convert
from keras_qat.simulate.rules import RULES, Pending, limit_of

__all__ = ["Walk", "name_of"]

_layers = keras.layers


class Walk:
    """Computes the calls of a model in integers, as the exported file does.

    A kernel's result waits, as `Pending`, for the quantizer behind it that says in which steps it
    is given. What has no rule is computed in float, between DEQUANTIZE and QUANTIZE.

    Args:
        graph: the quantization-aware model.
        kernels: the family of kernels.
    """

    def __init__(self, graph: Graph, kernels: str) -> None:
        self.kernels = kernels
        self.folded = {
            layer: folded.fold(layer)
            for layer in graph.call_counts()
            if isinstance(layer, QuantizeWrapper)
        }
        self.weights = {
            layer: Weights.of(each)
            for layer, each in self.folded.items()
            if each.limits is not None
        }
        self.rounded = {call.inputs[0] for call in graph.calls if isinstance(call.layer, Quantize)}
        """Values that a quantizer rounds, itself or behind a ReLU."""
        for call in reversed(graph.calls):
            if kind_of(call) in CLIPS and call.output in self.rounded:
                self.rounded.add(call.inputs[0])
        self.levels: dict[Value, Levels] = {}
        self.tensors: dict[Value, Any] = {}
        self.float_layers: dict[str, None] = {}

    def start(self, value: Value, x: np.ndarray, limits: tuple[float, float] | None) -> Any:
        """An input of the model, quantized to `limits` if nothing in the model does it."""
        self.tensors[value] = x
        if limits is not None and value not in self.rounded and value.is_float:
            self.tensors[value] = self.quantize(value, value, x, Levels(*limits))
        return self.tensors[value]

    def apply(self, call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
        """The outputs of a call."""
        layer = call.layer
        if isinstance(layer, Quantize):
            levels = Levels.of(layer.quantizer)
            result = self.quantize(call.inputs[0], call.output, args[0], levels)
        elif isinstance(layer, QuantizeWrapper):
            result = self.wrapper(call, args[0])
            if layer.output_quantizer is not None:
                levels = Levels.of(layer.output_quantizer)
                result = self.quantize(call.output, call.output, result, levels)
        else:
            result = self.bare(call, args, kwargs)
        tf.nest.map_structure(
            lambda value, x: self.tensors.update({value: x}), call.outputs, result
        )
        return result

    def named_tensors(self) -> dict[str, Codes]:
        """The quantized tensors, by their names in the float model."""
        found = {}
        for value, x in self.tensors.items():
            if isinstance(x, Codes):
                found[name_of(value)] = x
        return found

    def quantize(self, source: Value, value: Value, x: Any, levels: Levels) -> Codes:
        """What was computed for `source`, on the grid of its quantizer, as `value`."""
        self.levels[value] = levels
        grid = Grid.of(levels)
        if isinstance(x, Pending):
            return x.on(grid)
        if isinstance(x, Codes):
            if x.grid == grid:
                return x
            return Pending(lambda output: convert(self.kernels, x, output)).on(grid)
        x = np.asarray(x)
        if source.producer is None:  # An input of the model: the caller quantizes it.
            return Codes(x, grid) if x.dtype == np.int8 else from_values(x, grid)
        return from_values(x, grid, self.kernels)

    def wrapper(self, call: Call, x: Any) -> Any:
        """A layer with a kernel, and the activation that is merged into it."""
        wrapper, weights = call.layer, self.weights.get(call.layer)
        layer = wrapper.layer
        if weights is not None and isinstance(layer, _layers.Embedding):
            return weights.entries(np.asarray(x))
        is_rounded = wrapper.output_quantizer is not None or call.output in self.rounded
        if weights is None or not isinstance(x, Codes) or not is_rounded:
            return self.in_float(call, (x,), {})
        any_batch = call.inputs[0].shape[0] is None
        result = Pending(
            lambda output: convolve(self.kernels, layer, x, weights, output, any_batch)
        )
        if wrapper.activation is not None:
            result = result.clipped(0.0, limit_of(wrapper.activation))
        return result

    def bare(self, call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
        """A layer without a wrapper, in the range that follows from its inputs if it has none."""
        rule = RULES.get(kind_of(call) or "")
        inputs = [self.tensors[value] for value in call.inputs]
        if rule is None or not inputs or not all(isinstance(x, (Codes, Pending)) for x in inputs):
            return self.in_float(call, args, kwargs)
        result = rule(self.kernels, call, args, kwargs)
        if isinstance(result, Pending) and call.output in self.rounded:
            return result
        known = [self.levels[value] for value in call.inputs if value in self.levels]
        implied = implied_levels(call, known) if len(known) == len(inputs) else None
        if implied is not None:
            self.levels.update(dict.fromkeys(values_in(call.outputs), implied))
        if not isinstance(result, Pending):
            return result
        return self.in_float(call, args, kwargs) if implied is None else result.on(Grid.of(implied))

    def in_float(self, call: Call, args: Any, kwargs: dict[str, Any]) -> Any:
        """A call that the file computes in float."""
        self.float_layers[call.name.removeprefix(PREFIX)] = None
        args, kwargs = tf.nest.map_structure(
            lambda leaf: tf.constant(leaf.values) if isinstance(leaf, Codes) else leaf,
            (args, kwargs),
        )
        layer = call.layer
        if isinstance(layer, QuantizeWrapper):
            activation = layer.activation or tf.identity
            return spelling.as_keras(layer.layer, args[0], self.folded[layer], activation)
        if takes_training(layer):
            kwargs = {**kwargs, "training": False}
        return spelling.in_float(layer, args, kwargs)


def name_of(value: Value) -> str:
    """The name that a tensor of a quantization-aware model has in the float model."""
    call = value.producer
    layer = call.layer if call else None
    if isinstance(layer, QuantizeWrapper):
        return layer.tensor
    if isinstance(layer, Quantize) and call is not None and call.kwargs.get("slot") is not None:
        return layer.tensors[call.kwargs["slot"]]
    return value.name.removeprefix(PREFIX)
