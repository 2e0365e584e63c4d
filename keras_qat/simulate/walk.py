"""The integer simulation: a quantization-aware model call by call, in codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.export import folded, spelling
from keras_qat.export.levels import Levels, implied_levels
from keras_qat.keras2.backend import keras
from keras_qat.keras2.graph import Call, Graph, Value, takes_training, values_in
from keras_qat.kinds import CLIPS, kind_of
from keras_qat.layers import Quantize, QuantizeWrapper
from keras_qat.rewrite import PREFIX
from keras_qat.simulate.codes import Codes, Grid, from_values
from keras_qat.simulate.convolution import Weights, convolve
from keras_qat.simulate.elementwise import convert, relu
from keras_qat.simulate.rules import INT16_RULES, RULES, Pending, Rule, limit_of
from keras_qat.specs import QuantSpec

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
        self.quantized_next = {
            call.inputs[0]: call for call in graph.calls if isinstance(call.layer, Quantize)
        }
        self.rounded = set(self.quantized_next)
        """Values that a quantizer rounds, itself or behind a ReLU."""
        for call in reversed(graph.calls):
            if kind_of(call) in CLIPS and call.output in self.rounded:
                self.rounded.add(call.inputs[0])
        self.consumers, self.outputs = graph.consumers(), set(values_in(graph.outputs))
        self.levels: dict[Value, Levels] = {}
        self.free: dict[Value, Pending] = {}
        """Tensors whose kernel the converter may let round to other levels than their own."""
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
            if isinstance(args[0], Pending) and isinstance(layer.spec, QuantSpec):
                self.free[call.output] = args[0]
        elif isinstance(layer, QuantizeWrapper):
            result = self.wrapper(call, args[0])
            if layer.output_quantizer is not None:
                levels = Levels.of(layer.output_quantizer)
                if isinstance(result, Pending):
                    self.free[call.output] = result
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
            is_code = x.dtype == grid.limits.dtype
            return Codes(x, grid) if is_code else from_values(x, grid)
        return from_values(x, grid, self.kernels)

    def wrapper(self, call: Call, x: Any) -> Any:
        """A layer with a kernel, and the activation that is merged into it."""
        wrapper, weights = call.layer, self.weights.get(call.layer)
        layer = wrapper.layer
        if isinstance(layer, _layers.Embedding):
            table = self.folded[wrapper].kernel
            indices = np.asarray(x).astype(np.int64)
            return table[indices] if weights is None else weights.entries(indices)
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
        values = [value for value in call.inputs if value.is_float]
        inputs = [self.tensors[value] for value in values]
        rule = self.rule(call, inputs)
        if rule is None or not inputs or not all(isinstance(x, (Codes, Pending)) for x in inputs):
            return self.in_float(call, args, kwargs)
        if kind_of(call) == "concatenate":
            args, kwargs = self.in_one_range(call, (args, kwargs))
        result = rule(self.kernels, call, args, kwargs)
        if isinstance(result, Pending) and call.output in self.rounded:
            return result
        known = [self.levels[value] for value in values if value in self.levels]
        implied = implied_levels(call, known) if len(known) == len(inputs) else None
        if implied is not None:
            self.levels.update(dict.fromkeys(values_in(call.outputs), implied))
        if not isinstance(result, Pending):
            return result
        return self.in_float(call, args, kwargs) if implied is None else result.on(Grid.of(implied))

    def rule(self, call: Call, inputs: list[Any]) -> Rule | None:
        """What computes a call in integers; None if that is in float."""
        kind = kind_of(call) or ""
        in_int16 = any(isinstance(x, Codes) and x.grid.is_int16 for x in inputs)
        rule = RULES.get(kind)
        return INT16_RULES.get(kind, rule) if in_int16 else rule

    def in_one_range(self, call: Call, arguments: Any) -> Any:
        """The tensors of a concatenation on one grid, as `inference_module` spells it."""
        values = iter(call.inputs)
        grids = {self.tensors[value].grid for value in call.inputs}
        known = [self.levels[value] for value in call.inputs if value in self.levels]
        if len(grids) == 1 or len(known) < len(call.inputs):
            return arguments
        behind = self.quantized_next.get(call.output)
        joined = Levels.of(behind.layer.quantizer) if behind else Levels.around(known)
        return tf.nest.map_structure(
            lambda leaf: (
                self.converted(next(values), leaf, joined) if isinstance(leaf, Codes) else leaf
            ),
            arguments,
        )

    def converted(self, value: Value, x: Codes, joined: Levels) -> Codes:
        """A tensor of a concatenation in the range of all, clipped where its own range ends.

        Of two clips the first one is in the tensor's own range, and so changes nothing. The
        converter makes one operation of a clip at zero and the conversion. Where there is at
        most one clip it converts nothing, but lets the kernel itself give the new range, if
        nobody else reads its result.
        """
        levels, grid = self.levels[value], Grid.of(joined)
        if x.grid == grid:
            return x
        below, above = levels.minimum > joined.minimum, levels.maximum < joined.maximum
        if below and levels.minimum == 0:
            return Pending(lambda output: relu(self.kernels, x, output)).on(grid)
        low = levels.minimum if below else -np.inf
        high = levels.maximum if above and not below else np.inf
        read_once = len(self.consumers[value]) == 1 and value not in self.outputs
        if value in self.free and read_once and not (below and above):
            return self.free[value].clipped(low, high).on(grid)
        return Pending(lambda output: convert(self.kernels, x, output), low, high).on(grid)

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
