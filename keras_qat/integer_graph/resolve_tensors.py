"""The tensors of a resolved graph as it is made: which value each holds, and how quantized."""

from __future__ import annotations

from collections.abc import Sequence

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.frontend.graph import Call, Graph, Value, values_in
from keras_qat.frontend.tf_operations import inputs_and_constants
from keras_qat.integer_graph.constants import constant_of
from keras_qat.integer_graph.names import label_of, scope_of
from keras_qat.integer_graph.ranges import Ranges
from keras_qat.ops.node import Operand, Tensor
from keras_qat.ops.op import Op, SharedRange
from keras_qat.ops.registry import row_listing
from keras_qat.tflite.tensor_names import as_scope
from keras_qat.training.layers import Quantize


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
        self._outputs = set(values_in(graph.outputs))
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
                ("input", low, high), lambda: QuantParams.of_range(low, high, 8)
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
        if not op.takes_constants:
            return tensors
        shared = tensors[0].params if isinstance(op.output, SharedRange) and tensors else None
        bits = next((each.params.bits for each in tensors if each.params is not None), 8)
        return tuple(
            self.of_value[argument]
            if isinstance(argument, Value)
            else constant_of(argument, bits, shared)
            for argument in inputs_and_constants(call)
        )


def values_read(call: Call) -> list[Value]:
    """Returns what a call computes with. Quantizers of old files name more tensors."""
    op = row_listing(call.layer)
    if op is not None and op.reads_only_weights:
        return []
    return values_in(call.args[:1]) if isinstance(call.layer, Quantize) else call.inputs
