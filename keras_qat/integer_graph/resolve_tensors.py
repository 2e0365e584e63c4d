"""Creates the tensors of a resolved graph and their quantization parameters.

A `Value` is a symbolic tensor of the Keras model. A `Tensor` is a tensor of the resolved graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from keras_qat.arithmetic.quant_params import QuantParams, round_half_away
from keras_qat.config import specs
from keras_qat.graph.calls import Call, Graph, Value, flatten_values
from keras_qat.graph.operations import list_operands
from keras_qat.ops.node import Constant, Operand, Tensor
from keras_qat.ops.op import Op, SharedRange
from keras_qat.ops.registry import find_row
from keras_qat.tflite.schema import as_scope
from keras_qat.training.fake_quantization.activation_quantizer import ActivationQuantizer
from keras_qat.training.layers import Quantize, QuantizeWrapper
from keras_qat.training.quantizers import PREFIX

NEXT_TO_NOTHING = 1e-6
"""Upper end of the range of a tensor that is always 0. It is small, because the range of a
concatenation includes the ranges of all inputs."""


class Ranges:
    """Creates quantization parameters. Tensors that share a range share one `QuantParams`.

    With `in_graph`, parameters are tensors that each run computes from the current variables.
    """

    def __init__(self, in_graph: bool) -> None:
        self.in_graph = in_graph
        self.params: dict[Any, QuantParams] = {}
        """Maps a quantizer, or a key of `get_or_create`, to its parameters."""

    def get_params(self, quantizer: ActivationQuantizer) -> QuantParams:
        if quantizer not in self.params:
            spec = quantizer.spec
            if self.in_graph and isinstance(spec, specs.QuantSpec):
                low, high = quantizer.observe(None, training=False)
            else:
                low, high = quantizer.current_range()
            if not self.in_graph and low == high:  # A ReLU that is always 0, in `recipes.contrib`.
                high = NEXT_TO_NOTHING
            self.params[quantizer] = QuantParams.from_range(low, high, spec.bits)
        return self.params[quantizer]

    def find_quantizer(self, params: QuantParams) -> ActivationQuantizer | None:
        keys = (key for key, known in self.params.items() if known is params)
        return next((key for key in keys if hasattr(key, "observe")), None)

    def get_or_create(self, key: Hashable, create: Callable[[], QuantParams]) -> QuantParams:
        """Returns quantization parameters for a tensor that has no quantizer.

        For example, the output of a Softmax has fixed parameters. Calls `create` once per `key`.
        """
        if key not in self.params:
            self.params[key] = create()
        return self.params[key]

    def concatenate(self, inputs: list[QuantParams]) -> QuantParams:
        """Returns parameters for a concatenation. The range includes the ranges of all inputs."""
        if all(self.are_same(params, inputs[0]) for params in inputs):
            return inputs[0]
        low = tf.reduce_min([x.scale * (x.lowest - x.zero_point) for x in inputs])
        high = tf.reduce_max([x.scale * (x.highest - x.zero_point) for x in inputs])
        if not self.in_graph:
            low, high = float(low), float(high)
        bits = max(8, *(params.bits for params in inputs))
        key = ("concatenated", *map(id, inputs))
        return self.get_or_create(key, lambda: QuantParams.from_range(low, high, bits))

    def are_same(self, one: QuantParams, other: QuantParams) -> bool:
        """Returns whether parameters are equal. If ranges are tensors, compares only identity."""
        return one is other or (not self.in_graph and one == other)


class Tensors:
    """Stores the tensor of each value of a model, and the calls that read the value."""

    def __init__(self, graph: Graph, ranges: Ranges) -> None:
        self.ranges = ranges
        self.of_value: dict[Value, Tensor] = {}
        self.values: dict[Tensor, Value] = {}
        """Maps each tensor to a value. A tensor with a fused ReLU maps to the ReLU's output."""
        self.absorbed: set[Call] = set()
        """Calls that need no node, such as a ReLU that is fused into an earlier node."""
        self._outputs = set(flatten_values(graph.outputs))
        self._consumers: dict[Value, list[Call]] = {value: [] for value in graph.values()}
        for call in [*graph.calls, *graph.loss_only]:
            for value in dict.fromkeys(_list_inputs(call)):
                self._consumers.setdefault(value, []).append(call)

    def find_only_consumer(self, value: Value) -> Call | None:
        """Returns the only call that reads a value. Returns None for outputs of the model."""
        consumers = self._consumers[value]
        return consumers[0] if len(consumers) == 1 and value not in self._outputs else None

    def find_quantize(self, value: Value) -> Call | None:
        """Returns the only consumer of a value if it is a `Quantize` layer."""
        consumer = self.find_only_consumer(value)
        is_quantize = consumer is not None and isinstance(consumer.layer, Quantize)
        return consumer if is_quantize else None

    def create(
        self,
        value: Value,
        params: QuantParams | None,
        suffix: str = "",
        absorbed: Sequence[Call] = (),
    ) -> Tensor:
        """Creates the tensor of a value. `absorbed` are calls that are fused into the same node."""
        call = value.producer
        name = as_scope(value.name) if call is None else get_scope(call, value)
        label = _get_label(absorbed[-1].output if absorbed else value)
        tensor = Tensor(name + suffix, value.shape, value.inference_dtype, params, label)
        self.values[tensor] = value
        return tensor

    def create_input(self, value: Value, input_range: tuple[float, float] | None) -> Tensor:
        """Creates the tensor of a model input, with a quantizer's range or with `input_range`."""
        quantize, params = self.find_quantize(value), None
        if quantize is not None:
            params = self.ranges.get_params(quantize.layer.quantizer)
        elif input_range is not None and value.is_float:
            low, high = input_range
            params = self.ranges.get_or_create(
                ("input", low, high), lambda: QuantParams.from_range(low, high, 8)
            )
        self.of_value[value] = tensor = self.create(value, params)
        if quantize is not None:
            self.absorb(quantize, tensor)
        return tensor

    def absorb(self, call: Call, tensor: Tensor) -> None:
        """Marks a call as computed: its output is the existing `tensor`, so it needs no node."""
        self.absorbed.add(call)
        self.of_value[call.output] = tensor
        self.values[tensor] = call.output

    def get_inputs(self, call: Call) -> tuple[Tensor, ...]:
        return tuple(self.of_value[value] for value in _list_inputs(call))

    def get_operands(self, call: Call, op: Op) -> tuple[Operand, ...]:
        """Returns the tensors and the constant arguments that an operator reads."""
        tensors = self.get_inputs(call)
        if not op.quantizes_constants:
            return tensors
        shared = tensors[0].params if isinstance(op.output, SharedRange) and tensors else None
        bits = next((x.params.bits for x in tensors if x.params is not None), 8)
        return tuple(
            self.of_value[argument]
            if isinstance(argument, Value)
            else quantize_constant(argument, bits, shared)
            for argument in list_operands(call)
        )


def _list_inputs(call: Call) -> list[Value]:
    """Return the values that a call needs. Omit unused inputs of a `Quantize` from old files."""
    op = find_row(call.layer)
    if op is not None and op.reads_only_weights:
        return []
    return flatten_values(call.args[:1]) if isinstance(call.layer, Quantize) else call.inputs


def get_scope(call: Call, value: Value | None = None) -> str:
    """Returns the name of a call, or of its output `value`, as a path of layers.

    The second call of `block/conv` has the name `block/conv>2`. The second output of `block/conv`
    has the name `block/conv:1`.
    """
    values = flatten_values(call.outputs)
    name = as_scope(values[0].name.split(":")[0])
    index = 0 if value is None else values.index(value)
    return name if index == 0 else f"{name}:{index}"


def _get_label(value: Value) -> str:
    """Return the name of a value in the float model."""
    call = value.producer
    layer = call.layer if call else None
    if isinstance(layer, QuantizeWrapper):
        return str(layer.tensor)
    if isinstance(layer, Quantize) and call is not None and call.kwargs.get("slot") is not None:
        return str(layer.tensors[call.kwargs["slot"]])
    return value.name.removeprefix(PREFIX)


def quantize_constant(values: ArrayLike, bits: int, params: QuantParams | None = None) -> Constant:
    """Quantizes constants with `params`. By default, the range includes all values and 0.

    `bits` is the bit width of the other operands. With 16 bits, the constant is int16.
    """
    ends = np.finfo(np.float32)
    values = np.clip(np.asarray(values, np.float32), ends.min, ends.max)  # Also clips infinities.
    if params is None:
        low, high = (float(bound(values, initial=0.0)) for bound in (np.min, np.max))
        if bits == 16:
            largest = max(-low, high) or 1.0
            params = QuantParams(np.float32(largest / 32767), 0, 16)
        else:
            scale = (high - low) / 255 or 1.0
            params = QuantParams(np.float32(scale), -128 + int(np.rint(-low / scale)))
    # The range is a tensor if each run of the graph reads it.
    is_known = not tf.is_tensor(params.scale)
    with tf.init_scope() if is_known else contextlib.nullcontext():
        known = params.as_tensors()
        scaled = tf.constant(values, tf.float64) / known.scale + known.zero_point
        q = tf.clip_by_value(round_half_away(scaled), params.lowest, params.highest)
    return Constant(q.numpy().astype(params.dtype) if is_known else q, params)
