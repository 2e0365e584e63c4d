"""Creates the nodes of a resolved graph from the calls of a quantization-aware model.

A `QuantizeWrapper` around a layer becomes one node. The node includes the BatchNormalization,
activation and output quantizer of the wrapper.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.graph.calls import Call, Graph, Value, flatten_values
from keras_qat.integer_graph import fold_weights
from keras_qat.integer_graph.fold_recurrent import fold_recurrent_calls
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.resolve_tensors import Ranges, Tensors, get_scope
from keras_qat.keras2.backend import keras
from keras_qat.ops.node import Constant, Node, Operand, Tensor
from keras_qat.ops.op import FixedRange, Op, SharedRange
from keras_qat.ops.registry import Match, is_on_request, match, relu_maximum
from keras_qat.ops.requantize import QUANTIZE, REQUANTIZE
from keras_qat.ops.weights import Weights
from keras_qat.training.layers import Quantize, QuantizeWeights, QuantizeWrapper
from keras_qat.training.schedule import get_float_reason, is_integer_requested


def resolve_calls(
    graph: Graph, *, input_range: tuple[float, float] | None = None, in_graph: bool = False
) -> ResolvedGraph:
    """Creates the nodes of a resolved graph from a model's calls.

    `input_range` is the range of inputs without a quantizer. With `in_graph`, ranges and weights
    are tensors that each run computes from the current variables.
    """
    return _Resolver(graph, input_range, in_graph).resolve()


class _Resolver:
    def __init__(
        self, graph: Graph, input_range: tuple[float, float] | None, in_graph: bool
    ) -> None:
        self.graph, self.in_graph = graph, in_graph
        self.ranges = Ranges(in_graph)
        self.tensors = Tensors(graph, self.ranges)
        self.nodes: list[Node] = []
        self.unrounded: dict[Tensor, QuantParams] = {}
        self.inputs = {
            value.name: self.tensors.create_input(value, input_range)
            for value in flatten_values(graph.inputs)
        }

    def resolve(self) -> ResolvedGraph:
        for call in self.graph.calls:
            if call not in self.tensors.absorbed:
                self._add_call(call)
        self._fold_weights()
        outputs = [self.tensors.of_value[value] for value in flatten_values(self.graph.outputs)]
        return ResolvedGraph(
            self.graph.name,
            self.inputs,
            dict(zip(self.graph.output_names, outputs, strict=True)),
            tuple(self.nodes),
            self.tensors.of_value,
            self.tensors.values,
            self.unrounded,
        )

    def _fold_weights(self) -> None:
        """Fold the weights of all nodes. The calls of a shared layer are folded together."""
        indices: dict[keras.layers.Layer, list[int]] = {}
        for index, node in enumerate(self.nodes):
            if node.op is not None and node.op.weights:
                indices.setdefault(node.layer, []).append(index)
        for layer, layer_indices in indices.items():
            weights = self._fold_layer(layer, [self.nodes[index] for index in layer_indices])
            for index, folded in zip(layer_indices, weights, strict=True):
                self.nodes[index] = dataclasses.replace(self.nodes[index], weights=folded)

    def _fold_layer(self, layer: keras.layers.Layer, nodes: list[Node]) -> list[Weights]:
        op: Any = nodes[0].op
        if not op.is_weighted:
            return [fold_weights.quantize_parameters(layer, op, self.in_graph)] * len(nodes)
        if op.is_table:
            outputs: Any = [node.output.params for node in nodes]
            find = self.ranges.find_quantizer
            return [
                fold_weights.quantize_table(layer, params, find(params), self.in_graph)
                for params in outputs
            ]
        ends: Any = [(node.inputs[0].params, node.output.params) for node in nodes]
        if len(layer.weight_axes) < 2:
            return fold_weights.fold_calls(layer, ends, self.in_graph)
        return fold_recurrent_calls(layer, ends, self.in_graph, self.ranges.get_params)

    def _add_call(self, call: Call) -> None:
        layer = call.layer
        if isinstance(layer, Quantize):
            self._add_quantizer(call)
        elif isinstance(layer, QuantizeWrapper):
            self._add_wrapper(call)
        elif isinstance(layer, QuantizeWeights):
            self._add_in_float(call, "computes in float; its weights are int8")
        else:
            self._add_plain(call)

    def _add_quantizer(self, call: Call) -> None:
        """Add a QUANTIZE for a `Quantize` layer, unless the input already has the same range."""
        source = self.tensors.of_value[call.args[0]]
        params = self.ranges.get_params(call.layer.quantizer)
        if not call.layer.rounds:
            self.unrounded[source] = params
            self.tensors.absorb(call, source)
            return
        if source.params is params:
            self.tensors.absorb(call, source)
            return
        op = QUANTIZE if source.params is None else REQUANTIZE
        self._add_conversion(source, params, op, call)

    def _add_conversion(self, source: Tensor, params: QuantParams, op: Op, call: Call) -> Tensor:
        tensor = self.tensors.create(call.output, params)
        if isinstance(call.layer, Quantize):
            self.tensors.absorb(call, tensor)
        self.nodes.append(Node(tensor.name, op, {}, call, (source,), (tensor,), layer=call.layer))
        return tensor

    def _add_plain(self, call: Call) -> None:
        matched = _match(call)
        if matched.op is None:
            self._add_in_float(call, matched.reason or "no integer kernel")
        elif matched.op.alias:
            self._add_alias(call)
        elif matched.op.is_weighted:
            self._add_in_float(call, "its weights are not quantized")
        else:
            self._add_operator(call, call, matched, None, None)

    def _add_alias(self, call: Call) -> None:
        """Reuse the input tensor as the output of a call that does nothing, like Dropout."""
        source, value = self.tensors.of_value[call.inputs[0]], call.output
        quantize = self.tensors.find_quantize(value)
        self.tensors.of_value[value] = source
        if quantize is not None and source.params is not None:
            self._add_quantizer(quantize)

    def _add_wrapper(self, call: Call) -> None:
        wrapper = call.layer
        inner = _get_inner_call(call)
        matched = match(inner)
        maximum = None if wrapper.activation is None else relu_maximum(wrapper.activation)
        quantizer = wrapper.output_quantizer
        source = self.tensors.of_value[call.inputs[0]]
        is_table = matched.op is not None and matched.op.is_table
        is_quantized = fold_weights.has_quantized_weights(wrapper) or (
            is_table and (quantizer or self.tensors.find_quantize(call.output)) is not None
        )
        known = wrapper.activation is None or maximum is not None
        if matched.op is None or not known or not is_quantized:
            self._add_in_float(call, matched.reason or "its weights are not quantized")
            return
        if source.params is None and source.dtype == "float32" and not is_table:
            self._add_in_float(call, "its input has no quantizer")
            return
        params = None if quantizer is None else self.ranges.get_params(quantizer)
        if is_table and params is None and fold_weights.has_quantized_weights(wrapper):
            params = self.ranges.get_or_create(
                ("table", wrapper), lambda: fold_weights.find_table_params(wrapper)
            )
        self._add_operator(call, inner, matched, params, maximum)

    def _add_operator(
        self,
        call: Call,
        inner: Call,
        matched: Match,
        params: QuantParams | None,
        maximum: float | None,
    ) -> None:
        """Add a node with an integer operator. Add a float node if a tensor has no range.

        `inner` is the call of the layer inside a wrapper. `params` are the parameters of the
        wrapper's output quantizer. `maximum` is the maximum of the wrapper's ReLU.
        """
        op, attributes, _ = matched
        assert op is not None
        operands = self.tensors.get_operands(call, op)
        quantized = [operand.params for operand in operands if operand.params is not None]
        floats = [x for x in operands if isinstance(x, Tensor) and x.is_float]
        in_float = any(tensor.params is None for tensor in floats) and not op.is_table
        if in_float or len({known.bits == 16 for known in quantized}) > 1:
            self._add_in_float(call, "its input has no quantizer")
            return
        if quantized and not op.has_kernel_for(quantized[0].bits):
            self._add_in_float(call, f"no int16 kernel for {op.name}")
            return
        values = flatten_values(call.outputs)

        def add(operands: tuple[Operand, ...], outputs: tuple[Tensor, ...]) -> None:
            name = get_scope(call)
            self.nodes.append(
                Node(name, op, attributes, inner, operands, outputs, None, maximum, "", call.layer)
            )

        def create(value: Value, params: QuantParams | None) -> Tensor:
            own = params if value.is_float else None  # Indices are not quantized.
            return self.tensors.create(value, own, absorbed=absorbed)

        outputs: tuple[Tensor, ...] = ()
        absorbed: list[Call] = []
        if not values[0].is_float:
            params = maximum = None
        elif params is None:
            params, maximum, absorbed = self._find_output_params(
                call.output, op, quantized, maximum
            )
            if params is None:
                self._add_in_float(call, "its output is not quantized")
                return
        if params is not None and isinstance(op.output, SharedRange):
            shared = params if len(quantized) > 1 else quantized[0]
            operands = self._convert(operands, shared, call)
            if not self.ranges.are_same(shared, params):
                output = self.tensors.create(values[0], shared, "/kept")
                further_outputs = tuple(create(value, shared) for value in values[1:])
                add(operands, (output, *further_outputs))
                outputs = self._add_conversion(output, params, REQUANTIZE, call), *further_outputs
        if not outputs:
            outputs = tuple(create(value, params) for value in values)
            add(operands, outputs)
        self.tensors.of_value.update(zip(values, outputs, strict=False))
        for absorbed_call in absorbed:
            self.tensors.absorb(absorbed_call, outputs[0])

    def _find_output_params(
        self, value: Value, op: Op, inputs: list[QuantParams], maximum: float | None
    ) -> tuple[QuantParams | None, float | None, list[Call]]:
        """Find the quantization parameters of an output, and the maximum of a fused ReLU.

        Also return the calls of the ReLU and the `Quantize` that become part of the node. Without
        a `Quantize`, the operator or the inputs determine the parameters.
        """
        quantize = self.tensors.find_quantize(value)
        if quantize is not None:
            return self.ranges.get_params(quantize.layer.quantizer), maximum, [quantize]
        relu = self._find_relu(value) if op.can_merge_relu and maximum is None else None
        if relu is not None:
            call, end, quantize = relu
            return self.ranges.get_params(quantize.layer.quantizer), end, [call, quantize]
        if isinstance(op.output, FixedRange):
            output = op.output
            bits = 16 if inputs[0].bits == 16 else 8
            return (
                self.ranges.get_or_create((op.name, bits), lambda: output.params(bits)),
                maximum,
                [],
            )
        if isinstance(op.output, SharedRange) or op.falls_back_to_input_range:
            return self.ranges.concatenate(inputs), maximum, []
        return None, maximum, []

    def _find_relu(self, value: Value) -> tuple[Call, float, Call] | None:
        """If only a ReLU reads `value`, return the ReLU, its maximum and its quantizer."""
        call = self.tensors.find_only_consumer(value)
        if call is None or isinstance(call.layer, (Quantize, QuantizeWrapper, QuantizeWeights)):
            return None
        op, attributes, _ = _match(call)
        if op is None or not op.clips:
            return None
        quantize = self.tensors.find_quantize(call.output)
        return None if quantize is None else (call, attributes["maximum"], quantize)

    def _convert(
        self, operands: tuple[Operand, ...], params: QuantParams, call: Call
    ) -> tuple[Operand, ...]:
        """Add a REQUANTIZE for each input that has other parameters than `params`."""
        converted: list[Operand] = []
        for index, operand in enumerate(operands):
            if (
                not isinstance(operand, Constant)
                and operand.params is not None
                and not self.ranges.are_same(operand.params, params)
            ):
                name = f"{get_scope(call)}/input_{index}"
                source, operand = operand, dataclasses.replace(operand, name=name, params=params)
                self.nodes.append(
                    Node(name, REQUANTIZE, {}, call, (source,), (operand,), layer=call.layer)
                )
            converted.append(operand)
        return tuple(converted)

    def _add_in_float(self, call: Call, reason: str) -> None:
        """Add a float node for a call. Add a QUANTIZE if its wrapper has an output quantizer."""
        values, layer = flatten_values(call.outputs), call.layer
        quantizer = layer.output_quantizer if isinstance(layer, QuantizeWrapper) else None
        suffix = "" if quantizer is None else "/real"
        outputs = tuple(self.tensors.create(value, None, suffix) for value in values)
        # A float weight does not need inputs, but they connect the node to the graph.
        operands = self.tensors.get_inputs(call) or tuple(
            self.tensors.of_value[value] for value in call.inputs
        )
        name = get_scope(call)
        self.nodes.append(Node(name, None, {}, call, operands, outputs, reason=reason, layer=layer))
        if quantizer is not None:
            params = self.ranges.get_params(quantizer)
            outputs = (self._add_conversion(outputs[0], params, QUANTIZE, call),)
        self.tensors.of_value.update(zip(values, outputs, strict=True))


def _match(call: Call) -> Match:
    """Return the operator of a layer without a wrapper, or the reason why it stays in float."""
    reason = get_float_reason(call.layer)
    if reason is None and is_on_request(call.layer) and not is_integer_requested(call.layer):
        reason = "in float unless asked for"
    return match(call) if reason is None else Match(None, {}, reason)


def _get_inner_call(call: Call) -> Call:
    wrapper, value = call.layer, call.output
    output = Value(value.name, value.shape, value.dtype)
    return Call(wrapper.layer, call.args, {}, output, call.name, call.origin)
