"""From a quantization-aware model to its resolved graph."""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.config.arguments import range_of
from keras_qat.frontend import graph as graph_lib
from keras_qat.frontend.graph import Call, Graph, Value, values_in
from keras_qat.frontend.helper_layers import WeightTensor
from keras_qat.frontend.tf_operations import inputs_and_constants
from keras_qat.integer_graph import fold_weights
from keras_qat.integer_graph.constants import constant_of
from keras_qat.integer_graph.fold_recurrent import weights_of_calls
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.names import label_of, scope_of
from keras_qat.integer_graph.ranges import Ranges
from keras_qat.ops.embedding import EMBEDDING
from keras_qat.ops.node import Constant, Node, Operand, Tensor
from keras_qat.ops.op import FixedRange, Op, SharedRange
from keras_qat.ops.registry import Match, match, on_request, relu_maximum
from keras_qat.ops.requantize import QUANTIZE, REQUANTIZE
from keras_qat.ops.weights import Weights
from keras_qat.tflite.tensor_names import as_scope
from keras_qat.training.layers import Quantize, QuantizeWeights, QuantizeWrapper
from keras_qat.training.layers.float_marks import asked_for_integers, why_left_in_float
from keras_qat.training.schedule import check_process

__all__ = ["resolve"]


def resolve(
    model: Any,
    *,
    input_range: tuple[float, float] | None = None,
    in_graph: bool = False,
    graph: Graph | None = None,
) -> ResolvedGraph:
    """Says what a quantization-aware model computes in integers: operators, scales, weights.

    Args:
        model: a model of quantize-aware layers: what `quantize_model` returned, or a model made of
            parts of such models.
        input_range: minimum and maximum of inputs that have no quantizer, as those of
            `recipes.contrib`; without it they are in float, as is what reads them.
        in_graph: whether ranges and weights are tensors, read whenever the graph runs, instead of
            numbers.
        graph: the model, if it was read already.

    Returns:
        The graph; print it to see every operator with its quantization parameters.

    Raises:
        ValueError: if the model cannot be read, or `input_range` is no range.

    Example:
        >>> print(keras_qat.resolve(qat))
    """
    check_process(model)
    found = _Resolver(graph or graph_lib.read(model), range_of(input_range), in_graph).resolved()
    target = getattr(model, "target", None)
    return found if target is None or target.batch_size is None else found.sized()


class _Resolver:
    """Goes through the calls in order and makes nodes of them."""

    def __init__(self, graph: Graph, input_range: Any, in_graph: bool) -> None:
        self.graph, self.input_range, self.in_graph = graph, input_range, in_graph
        self.readers: dict[Value, list[Call]] = {value: [] for value in graph.values()}
        for call in [*graph.calls, *graph.aside]:
            for value in dict.fromkeys(_read(call)):
                self.readers.setdefault(value, []).append(call)
        self.outputs = set(values_in(graph.outputs))
        self.ranges = Ranges(in_graph)
        self.tensors: dict[Value, Tensor] = {}
        self.values: dict[Tensor, Value] = {}
        self.nodes: list[Node] = []
        self.done: set[Call] = set()
        """Calls that a node in front of them has taken in."""

    def resolved(self) -> ResolvedGraph:
        inputs = {value.name: self._input(value) for value in values_in(self.graph.inputs)}
        for call in self.graph.calls:
            if call not in self.done:
                self._visit(call)
        self._fold()
        outputs = [self.tensors[value] for value in values_in(self.graph.outputs)]
        return ResolvedGraph(
            self.graph.name,
            inputs,
            dict(zip(self.graph.output_names, outputs, strict=True)),
            tuple(self.nodes),
            self.tensors,
            self.values,
        )

    # What follows on a value.

    def _quantize_behind(self, value: Value) -> Call | None:
        """The only reader of a value, if that is a `Quantize` layer."""
        readers = self.readers[value]
        if len(readers) == 1 and isinstance(readers[0].layer, Quantize):
            return readers[0] if value not in self.outputs else None
        return None

    def _clip_behind(self, value: Value) -> tuple[Call, float] | None:
        """The only reader of a value and where it ends, if that is a ReLU a kernel takes in."""
        readers = self.readers[value]
        if len(readers) != 1 or value in self.outputs:
            return None
        if isinstance(readers[0].layer, (Quantize, QuantizeWrapper, QuantizeWeights)):
            return None
        op, attributes, _ = self._match(readers[0])
        if op is None or not op.clips or self._quantize_behind(readers[0].output) is None:
            return None
        return readers[0], attributes["maximum"]

    def _match(self, call: Call) -> Match:
        reason = why_left_in_float(call.layer)
        if reason is None and on_request(call.layer) and not asked_for_integers(call.layer):
            reason = "in float unless asked for"
        return match(call) if reason is None else Match(None, {}, reason)

    # Tensors.

    def _tensor(
        self,
        value: Value,
        params: QuantParams | None,
        suffix: str = "",
        behind: list[Call] | None = None,
    ) -> Tensor:
        """A tensor for a value: what the calls `behind` it, which are taken in, make of it."""
        call = value.producer
        name = as_scope(value.name) if call is None else scope_of(call, value)
        label = label_of(behind[-1].output if behind else value)
        tensor = Tensor(name + suffix, value.shape, value.inference_dtype, params, label)
        self.values[tensor] = value
        return tensor

    def _input(self, value: Value) -> Tensor:
        quantize, params = self._quantize_behind(value), None
        if quantize is not None:
            params = self.ranges.of(quantize.layer.quantizer)
        elif self.input_range is not None and value.is_float:
            low, high = self.input_range
            params = self.ranges.fixed(
                ("input", low, high), lambda: QuantParams.of_range(low, high, 8)
            )
        self.tensors[value] = tensor = self._tensor(value, params)
        if quantize is not None:
            self._take(quantize, tensor)
        return tensor

    def _take(self, call: Call, tensor: Tensor) -> None:
        """Notes that a tensor holds what a call gives."""
        self.done.add(call)
        self.tensors[call.output] = tensor
        self.values[tensor] = call.output

    # Weights.

    def _fold(self) -> None:
        """Gives weighted nodes their weights: those of all calls of a layer at once."""
        places: dict[Any, list[int]] = {}
        for place, node in enumerate(self.nodes):
            if node.op is not None and node.op.weights:
                places.setdefault(node.layer, []).append(place)
        for layer, found in places.items():
            weights = self._weights(layer, [self.nodes[place] for place in found])
            for place, each in zip(found, weights, strict=True):
                self.nodes[place] = dataclasses.replace(self.nodes[place], weights=each)

    def _weights(self, layer: Any, nodes: list[Node]) -> list[Weights]:
        op: Any = nodes[0].op
        if not op.is_weighted:
            return [fold_weights.parameters_of(layer, op, self.in_graph)] * len(nodes)
        outputs: Any = [node.output.params for node in nodes]
        if op is EMBEDDING:
            of = self.ranges.quantizer_of
            return [fold_weights.table_of(layer, each, of(each), self.in_graph) for each in outputs]
        ends: Any = [(node.inputs[0].params, node.output.params) for node in nodes]
        return weights_of_calls(layer, ends, self.in_graph, self.ranges.of)

    # Calls.

    def _visit(self, call: Call) -> None:
        layer = call.layer
        if isinstance(layer, Quantize):
            self._quantize(call)
        elif isinstance(layer, QuantizeWrapper):
            self._wrapper(call)
        elif isinstance(layer, QuantizeWeights):
            self._in_float(call, call, "computes in float; its weights are int8")
        else:
            self._plain(call)

    def _quantize(self, call: Call) -> None:
        """A quantizer that no node in front of it has taken in."""
        source = self.tensors[call.args[0]]
        params = self.ranges.of(call.layer.quantizer)
        if source.params is params:
            self._take(call, source)
            return
        op = QUANTIZE if source.params is None else REQUANTIZE
        self._convert(source, params, op, call)

    def _convert(self, source: Tensor, params: QuantParams, op: Op, call: Call) -> Tensor:
        value = call.output
        tensor = self._tensor(value, params)
        if isinstance(call.layer, Quantize):
            self._take(call, tensor)
        self.nodes.append(Node(tensor.name, op, {}, call, (source,), (tensor,), layer=call.layer))
        return tensor

    def _plain(self, call: Call) -> None:
        op, attributes, reason = self._match(call)
        if op is None:
            self._in_float(call, call, reason or "no integer kernel")
        elif op.alias:
            self._alias(call)
        elif not op.is_weighted:
            self._emit(call, call, Match(op, attributes), None, None, call.layer)
        else:  # A weighted layer that the plan has not wrapped.
            self._in_float(call, call, "its weights are not quantized")

    def _alias(self, call: Call) -> None:
        """A call that computes nothing."""
        source, value = self.tensors[call.inputs[0]], call.output
        quantize = self._quantize_behind(value)
        self.tensors[value] = source
        if quantize is not None and source.params is not None:
            self._quantize(quantize)

    def _wrapper(self, call: Call) -> None:
        wrapper = call.layer
        inner = _inner_call(call)
        found = match(inner)
        clip = None if wrapper.activation is None else relu_maximum(wrapper.activation)
        quantizer = wrapper.output_quantizer
        source = self.tensors[call.inputs[0]]
        is_table = found.op is EMBEDDING
        has_codes = fold_weights.has_codes(wrapper) or (
            is_table and (quantizer or self._quantize_behind(call.output)) is not None
        )
        known = wrapper.activation is None or clip is not None
        if found.op is None or not known or not has_codes:
            self._in_float(call, call, found.reason or "its weights are not quantized")
            return
        if source.params is None and source.dtype == "float32" and not is_table:
            self._in_float(call, call, "its input has no quantizer")
            return
        params = None if quantizer is None else self.ranges.of(quantizer)
        if is_table and params is None and fold_weights.has_codes(wrapper):
            params = self.ranges.fixed(
                ("table", wrapper), lambda: fold_weights.table_params(wrapper)
            )
        self._emit(call, inner, found, params, clip, wrapper)

    def _emit(
        self,
        call: Call,
        inner: Call,
        found: Match,
        params: QuantParams | None,
        maximum: float | None,
        layer: Any,
    ) -> None:
        """A node of an operator, or of a computation in float where something has no range."""
        op, attributes, _ = found
        assert op is not None
        operands = self._operands(call, op)
        quantized = [each.params for each in operands if each.params is not None]
        tensors = [each for each in operands if isinstance(each, Tensor) and each.is_float]
        bits = {each.bits == 16 for each in quantized}
        in_float = any(each.params is None for each in tensors) and op is not EMBEDDING
        if in_float or len(bits) > 1:
            self._in_float(call, inner, "its input has no quantizer")
            return
        if quantized and not op.has_kernel_for(quantized[0].bits):
            self._in_float(call, inner, f"no int16 kernel for {op.name}")
            return
        values = values_in(call.outputs)
        if not values[0].is_float:
            outputs = tuple(self._tensor(value, None) for value in values)
            self.tensors.update(zip(values, outputs, strict=True))
            self._add(call, op, attributes, inner, operands, outputs, None, layer)
            return
        taken: list[Call] = []
        if params is None:
            params, maximum, taken = self._output(call, op, quantized, maximum)
        if params is None:
            self._in_float(call, inner, "no quantizer behind it")
            return
        if isinstance(op.output, SharedRange):
            native = params if len(quantized) > 1 else quantized[0]
            operands = tuple(
                self._brought_to(each, native, call, at) for at, each in enumerate(operands)
            )
            if not self.ranges.same(native, params):
                middle = self._tensor(values[0], native, "/kept")
                self._add(call, op, attributes, inner, operands, (middle,), maximum, layer)
                converted = self._convert(middle, params, REQUANTIZE, call)
                self.tensors[values[0]] = converted
                for each in taken:
                    self._take(each, converted)
                return
        outputs = tuple(self._tensor(value, params, behind=taken) for value in values)
        self.tensors.update(zip(values, outputs, strict=True))
        for each in taken:
            self._take(each, outputs[0])
        self._add(call, op, attributes, inner, operands, outputs, maximum, layer)

    def _add(
        self,
        call: Call,
        op: Op | None,
        attributes: Any,
        inner: Call,
        operands: tuple[Operand, ...],
        outputs: tuple[Tensor, ...],
        maximum: float | None,
        layer: Any,
        reason: str = "",
    ) -> None:
        name = scope_of(call)
        self.nodes.append(
            Node(name, op, attributes, inner, operands, outputs, None, maximum, reason, layer)
        )

    def _output(
        self, call: Call, op: Op, given: list[QuantParams], maximum: float | None
    ) -> tuple[QuantParams | None, float | None, list[Call]]:
        """Parameters of an output, the ReLU merged into it, and the calls that are taken in."""
        value = call.output
        quantize = self._quantize_behind(value)
        if quantize is not None:
            return self.ranges.of(quantize.layer.quantizer), maximum, [quantize]
        clip = self._clip_behind(value) if op.takes_clip and maximum is None else None
        if clip is not None:
            relu, end = clip
            quantize = self._quantize_behind(relu.output)
            assert quantize is not None
            return self.ranges.of(quantize.layer.quantizer), end, [relu, quantize]
        if isinstance(op.output, FixedRange):
            output = op.output
            bits = 16 if given[0].bits == 16 else 8
            return self.ranges.fixed((op.name, bits), lambda: output.params(bits)), maximum, []
        if isinstance(op.output, SharedRange) or op.name == "mean":  # contrib leaves means bare.
            return self.ranges.joined(given), maximum, []
        return None, maximum, []

    def _operands(self, call: Call, op: Op) -> tuple[Operand, ...]:
        """What an operator reads: tensors, and the numbers among its arguments if it takes them."""
        known = [self.tensors[value] for value in _read(call)]
        shared = None
        if isinstance(op.output, SharedRange) and known:
            shared = known[0].params
        bits = next((each.params.bits for each in known if each.params is not None), 8)
        if not op.takes_constants:
            return tuple(known)
        return tuple(
            self.tensors[each] if isinstance(each, Value) else constant_of(each, bits, shared)
            for each in inputs_and_constants(call)
        )

    def _brought_to(self, operand: Operand, params: QuantParams, call: Call, place: int) -> Operand:
        """An operand with the parameters that an operator's inputs share."""
        if isinstance(operand, Constant) or operand.params is None:
            return operand
        if self.ranges.same(operand.params, params):
            return operand
        name = f"{scope_of(call)}/input_{place}"
        tensor = dataclasses.replace(operand, name=name, params=params)
        self.nodes.append(Node(name, REQUANTIZE, {}, call, (operand,), (tensor,), layer=call.layer))
        return tensor

    def _in_float(self, call: Call, inner: Call, reason: str) -> None:
        operands = tuple(self.tensors[value] for value in _read(call))
        values, layer = values_in(call.outputs), call.layer
        quantizer = layer.output_quantizer if isinstance(layer, QuantizeWrapper) else None
        suffix = "" if quantizer is None else "/real"
        outputs = tuple(self._tensor(value, None, suffix) for value in values)
        self._add(call, None, {}, call, operands, outputs, None, layer, reason)
        if quantizer is not None:
            params = self.ranges.of(quantizer)
            outputs = (self._convert(outputs[0], params, QUANTIZE, call),)
        self.tensors.update(zip(values, outputs, strict=True))


def _read(call: Call) -> list[Value]:
    """What a call computes with. Quantizers of the first version also name other tensors."""
    if isinstance(call.layer, WeightTensor):
        return []
    return values_in(call.args[:1]) if isinstance(call.layer, Quantize) else call.inputs


def _inner_call(call: Call) -> Call:
    """The call of the layer inside a wrapper, on the wrapper's own input."""
    wrapper, value = call.layer, call.output
    output = Value(value.name, value.shape, value.dtype)
    return Call(wrapper.layer, call.args[:1], {}, output, call.name, call.origin)
