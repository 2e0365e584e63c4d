"""Creates the tensors of a resolved graph, with one set of quantization parameters per range."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.quant_params import QuantParams, round_half_away
from keras_qat.config import specs
from keras_qat.graph.calls import Call, Graph, Value, flatten_values
from keras_qat.graph.operations import inputs_and_constants
from keras_qat.ops.node import Constant, Operand, Tensor
from keras_qat.ops.op import Op, SharedRange
from keras_qat.ops.registry import find_row
from keras_qat.tflite.schema import as_scope
from keras_qat.training.layers import Quantize, QuantizeWrapper
from keras_qat.training.quantizers import PREFIX

NEXT_TO_NOTHING = 1e-6
"""Upper end of a range that holds zeros only: too small to widen a range it is joined with."""


class Ranges:
    """Finds quantization parameters; what shares a range gets the same object.

    Args:
        in_graph: whether parameters are tensors, read whenever the graph runs.
    """

    def __init__(self, in_graph: bool) -> None:
        self.in_graph = in_graph
        self.params: dict[Any, QuantParams] = {}
        """Quantizer, or another key of `fixed` -> its parameters."""

    def of(self, quantizer: Any) -> QuantParams:
        """Returns the parameters of a quantizer's present range."""
        if quantizer not in self.params:
            spec = quantizer.spec
            if self.in_graph and isinstance(spec, specs.QuantSpec):
                low, high = quantizer.observe(None, training=False)
            else:
                low, high = quantizer.current_range()
            if not self.in_graph and low == high:  # A ReLU of contrib that never was above 0.
                high = NEXT_TO_NOTHING
            self.params[quantizer] = QuantParams.from_range(low, high, spec.bits)
        return self.params[quantizer]

    def quantizer_of(self, params: QuantParams) -> Any:
        """Returns the quantizer that has these parameters, or None."""
        keys = (key for key, known in self.params.items() if known is params)
        return next((key for key in keys if hasattr(key, "observe")), None)

    def fixed(self, key: Any, make: Callable[[], QuantParams]) -> QuantParams:
        """Returns parameters that no quantizer holds, made once per `key`."""
        if key not in self.params:
            self.params[key] = make()
        return self.params[key]

    def joined(self, parts: list[QuantParams]) -> QuantParams:
        """Returns parameters for joined tensors: the ones they share, or of their common range."""
        if all(self.same(params, parts[0]) for params in parts):
            return parts[0]
        low = tf.reduce_min([part.scale * (part.lowest - part.zero_point) for part in parts])
        high = tf.reduce_max([part.scale * (part.highest - part.zero_point) for part in parts])
        if not self.in_graph:
            low, high = float(low), float(high)
        bits = max(8, *(part.bits for part in parts))
        return self.fixed(
            ("joined", *map(id, parts)), lambda: QuantParams.from_range(low, high, bits)
        )

    def same(self, one: QuantParams, other: QuantParams) -> bool:
        """Whether two parameters are known to be equal; tensors are if they are the same object."""
        return one is other or (not self.in_graph and one == other)


class Tensors:
    """Keeps the tensor of each value of a model's graph, and who reads the value.

    Args:
        graph: the model's calls.
        ranges: quantization parameters, one object for each range.
    """

    def __init__(self, graph: Graph, ranges: Ranges) -> None:
        self.ranges = ranges
        self.of_value: dict[Value, Tensor] = {}
        """Value -> the tensor that holds it."""
        self.values: dict[Tensor, Value] = {}
        """Tensor -> the value it holds, behind its quantizer and the ReLU merged into it."""
        self.absorbed: set[Call] = set()
        """Calls that are part of a node in front of them."""
        self._outputs = set(flatten_values(graph.outputs))
        self._readers: dict[Value, list[Call]] = {value: [] for value in graph.values()}
        for call in [*graph.calls, *graph.loss_only]:
            for value in dict.fromkeys(values_read(call)):
                self._readers.setdefault(value, []).append(call)

    def only_reader(self, value: Value) -> Call | None:
        """Returns the one call that reads a value; None for several, and for model outputs."""
        readers = self._readers[value]
        return readers[0] if len(readers) == 1 and value not in self._outputs else None

    def quantizer_behind(self, value: Value) -> Call | None:
        """Returns the only reader of a value if it is a `Quantize` layer."""
        reader = self.only_reader(value)
        return reader if reader is not None and isinstance(reader.layer, Quantize) else None

    def new(
        self,
        value: Value,
        params: QuantParams | None,
        suffix: str = "",
        absorbed: Sequence[Call] = (),
    ) -> Tensor:
        """Makes a tensor for a value.

        Args:
            value: the value.
            params: its quantization parameters; None in float.
            suffix: goes behind the name of its scope.
            absorbed: calls behind it that become part of its node; the last one names it.
        """
        call = value.producer
        name = as_scope(value.name) if call is None else scope_of(call, value)
        label = label_of(absorbed[-1].output if absorbed else value)
        tensor = Tensor(name + suffix, value.shape, value.inference_dtype, params, label)
        self.values[tensor] = value
        return tensor

    def new_input(self, value: Value, input_range: tuple[float, float] | None) -> Tensor:
        """Makes the tensor of a model input, quantized by its quantizer or to `input_range`."""
        quantize, params = self.quantizer_behind(value), None
        if quantize is not None:
            params = self.ranges.of(quantize.layer.quantizer)
        elif input_range is not None and value.is_float:
            low, high = input_range
            params = self.ranges.fixed(
                ("input", low, high), lambda: QuantParams.from_range(low, high, 8)
            )
        self.of_value[value] = tensor = self.new(value, params)
        if quantize is not None:
            self.absorb(quantize, tensor)
        return tensor

    def absorb(self, call: Call, tensor: Tensor) -> None:
        """Makes a call part of the node in front of it: `tensor` holds the call's output."""
        self.absorbed.add(call)
        self.of_value[call.output] = tensor
        self.values[tensor] = call.output

    def read_by(self, call: Call) -> tuple[Tensor, ...]:
        """Returns the tensors that a call reads."""
        return tuple(self.of_value[value] for value in values_read(call))

    def operands(self, call: Call, op: Op) -> tuple[Operand, ...]:
        """Returns what an operator reads: tensors, and number arguments if it takes constants."""
        tensors = self.read_by(call)
        if not op.quantizes_constants:
            return tensors
        shared = tensors[0].params if isinstance(op.output, SharedRange) and tensors else None
        bits = next((x.params.bits for x in tensors if x.params is not None), 8)
        return tuple(
            self.of_value[argument]
            if isinstance(argument, Value)
            else constant_of(argument, bits, shared)
            for argument in inputs_and_constants(call)
        )


def values_read(call: Call) -> list[Value]:
    """Returns what a call computes with. Quantizers of old files name more tensors."""
    op = find_row(call.layer)
    if op is not None and op.reads_only_weights:
        return []
    return flatten_values(call.args[:1]) if isinstance(call.layer, Quantize) else call.inputs


def scope_of(call: Call, value: Value | None = None) -> str:
    """Returns the name of a call or of one of its outputs: the layer's path.

    The second call of `block/conv` is `block/conv>2`, its second output `block/conv:1`.
    """
    values = flatten_values(call.outputs)
    name = as_scope(values[0].name.split(":")[0])
    index = 0 if value is None else values.index(value)
    return name if index == 0 else f"{name}:{index}"


def label_of(value: Value) -> str:
    """Returns the float model's name for a tensor of the quantization-aware model."""
    call = value.producer
    layer = call.layer if call else None
    if isinstance(layer, QuantizeWrapper):
        return str(layer.tensor)
    if isinstance(layer, Quantize) and call is not None and call.kwargs.get("slot") is not None:
        return str(layer.tensors[call.kwargs["slot"]])
    return value.name.removeprefix(PREFIX)


def constant_of(values: np.ndarray, bits: int, params: QuantParams | None = None) -> Constant:
    """Quantizes constant numbers, over their own range and zero unless parameters are given.

    Args:
        values: the numbers.
        bits: bits of the tensors they are computed with; 16 makes an int16 constant.
        params: parameters to use, as for an operator whose inputs and output share them.
    """
    ends = np.finfo(np.float32)
    values = np.clip(np.asarray(values, np.float32), ends.min, ends.max)  # Of infinities, too.
    if params is None:
        low, high = (float(bound(values, initial=0.0)) for bound in (np.min, np.max))
        if bits == 16:
            largest = max(-low, high) or 1.0
            params = QuantParams(np.float32(largest / 32767), 0, 16)
        else:
            scale = (high - low) / 255 or 1.0
            params = QuantParams(np.float32(scale), -128 + int(np.rint(-low / scale)))
    # Where the graph reads ranges whenever it runs, it is a tensor.
    is_known = not tf.is_tensor(params.scale)
    with tf.init_scope() if is_known else contextlib.nullcontext():
        known = params.as_tensors()
        scaled = tf.constant(values, tf.float64) / known.scale + known.zero_point
        q = tf.clip_by_value(round_half_away(scaled), params.lowest, params.highest)
    return Constant(q.numpy().astype(params.dtype) if is_known else q, params)
