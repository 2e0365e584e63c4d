"""Runs a resolved graph in integers, with the rounding of a kernel family.

Each node is prepared and computed, as in TFLite: `prepare` makes the numbers that follow from
ranges and weights alone, `run` computes tensors with them.

Quantized tensors hold their quantized values minus the zero point: whole numbers in float32, or in
float64 with 16 bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic.kernel_families import KernelFamily
from keras_qat.arithmetic.quant_params import QuantParams, round_half_away, single
from keras_qat.graph.calls import Value
from keras_qat.graph.keras_masks import KerasMasks
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.ops.node import Constant, Node, Operand, Tensor
from keras_qat.ops.op import Arguments, FixedRange, SharedRange, get_held_dtype
from keras_qat.ops.requantize import Multiplier, prepare_requantization, requantize

ComputeInFloat = Callable[[Node, list[Any]], Any]

Ends = tuple[Any, Any]
"""The lowest and the highest quantized value less the zero point."""


def _scale(params: QuantParams) -> Any:
    """Returns the scale, in the type of the quantized values."""
    return tf.cast(params.as_tensors().scale, get_held_dtype(params))


def _ends(params: QuantParams, maximum: float | None = None) -> Ends:
    """Returns the ends of a range, or of the ReLU merged into it, which has the given `maximum`."""
    params = params.as_tensors()
    low, high = (end - params.zero_point for end in (params.lowest, params.highest))
    if maximum is not None:
        low = tf.maximum(low, 0.0)
        if maximum == 6:
            high = tf.minimum(high, round_half_away(maximum / params.scale))
    dtype = get_held_dtype(params)
    return tf.cast(low, dtype), tf.cast(high, dtype)


def _clipped(q: Any, ends: Ends, is_bound: bool = False) -> Any:
    """Clips values to a range; `is_bound` says that no value is below its lower end."""
    low, high = (tf.cast(end, q.dtype) for end in ends)
    if not is_bound:  # Two operations, as they compute in place, which ClipByValue does not.
        q = tf.maximum(q, low)
    return tf.minimum(q, high)


@dataclasses.dataclass(frozen=True)
class PreparedNode:
    """Prepared parameters of a node with an operator.

    Args:
        constants: the values of each input that is a constant; None for a tensor.
        row: the arguments of the row's `compute` that depend on weights or ranges: the result of
            its `prepare`, or the ranges and weights themselves.
        ends: the ends of the range that the row computes in; None if its output is in float.
        conversion: from that range to the output's; None if they are the same.
        output_ends: the ends of the output's range if there is a conversion.
    """

    constants: tuple[Any, ...]
    row: dict[str, Any]
    ends: Ends | None = None
    conversion: Multiplier | None = None
    output_ends: Ends | None = None


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Prepared parameters of a graph.

    Args:
        nodes: the parameters of each node; None for a node in float.
        scales: name of each quantized tensor -> its scale.
        ends: name of each quantized input -> the ends of its range.
        to_even: whether halves among the inputs are rounded to even, not up, as a family does that
            takes real inputs.
    """

    nodes: tuple[PreparedNode | None, ...]
    scales: dict[str, Any]
    ends: dict[str, Ends]
    to_even: bool = False

    def quantized(self, x: Any, tensor: Tensor) -> Any:
        """Quantizes an input of the graph as a caller of its file does: round half up."""
        if tensor.params is None:
            return x
        scale = self.scales[tensor.name]
        steps = tf.cast(x, scale.dtype) / scale
        rounded = tf.round(steps) if self.to_even else tf.floor(steps + 0.5)
        return _clipped(rounded, self.ends[tensor.name])

    def real(self, q: Any, tensor: Tensor) -> Any:
        """Returns the real values of a tensor, in float32 if it is quantized."""
        if tensor.params is None:
            return q
        return tf.cast(q * tf.cast(self.scales[tensor.name], q.dtype), tf.float32)


def prepare(graph: ResolvedGraph, family: KernelFamily) -> Prepared:
    """Computes what follows from ranges and weights alone."""
    tensors = [*graph.tensors.values(), *(x for node in graph.nodes for x in node.outputs)]
    scales = {tensor.name: _scale(tensor.params) for tensor in tensors if tensor.params}
    ends = {x.name: _ends(x.params) for x in graph.inputs.values() if x.params}
    nodes = (None if node.op is None else _prepare_node(node, family) for node in graph.nodes)
    to_even = family.quantize == "divided_by_float32" and family.halves is tf.round
    return Prepared(tuple(nodes), scales, ends, to_even)


def _prepare_node(node: Node, family: KernelFamily) -> PreparedNode:
    op, output = node.op, node.output.params
    assert op is not None
    if computes_in_float(node, family):
        assert output is not None
        ends = _ends(output, node.maximum)
        return PreparedNode((), {"prepared": output.as_tensors().scale}, ends)
    # One for each operand, also where it is read twice: rows compare inputs by identity.
    specs = {id(x): _spec(x) for x in node.inputs}
    params: Any = [x.params.as_tensors() if x.params else None for x in node.inputs]
    native = _native(node, family)
    arguments = dataclasses.replace(
        _arguments(node, family, [specs[id(x)] for x in node.inputs]),
        params=params,
        output=native.as_tensors() if native else native,  # type: ignore[arg-type]
        weights=node.weights,
    )
    row = {"params": params, "output": arguments.output, "weights": node.weights}
    if op.prepare is not None:
        row = {"prepared": op.prepare(arguments)}
    constants = tuple(map(_constant, node.inputs))
    if output is None or native is None:
        return PreparedNode(constants, row)
    if native is output or not (tf.is_tensor(output.scale) or native != output):
        return PreparedNode(constants, row, _ends(native, node.maximum))
    conversion = prepare_requantization(family, native, output)
    return PreparedNode(constants, row, _ends(native, node.maximum), conversion, _ends(output))


def _spec(operand: Operand) -> Any:
    shape = operand.q.shape if isinstance(operand, Constant) else operand.shape
    if operand.params is not None:
        return tf.TensorSpec(shape, get_held_dtype(operand.params))
    assert isinstance(operand, Tensor)
    return tf.TensorSpec(shape, operand.dtype)


def _native(node: Node, family: KernelFamily) -> QuantParams | None:
    """Returns the range that a node's row computes in: the output's, or what its kernels fix."""
    assert node.op is not None
    output = node.output.params
    fixed = node.op.output
    is_fixed = isinstance(fixed, FixedRange) and output is not None and not family.in_float
    return fixed.params(output.bits) if is_fixed else output  # type: ignore[union-attr]


def _constant(operand: Operand) -> Any:
    """Returns the values of a constant minus the zero point; None for a tensor."""
    if not isinstance(operand, Constant):
        return None
    dtype = get_held_dtype(operand.params)
    if tf.is_tensor(operand.q):
        return tf.cast(operand.q - operand.params.zero_point, dtype)
    precise = dtype.as_numpy_dtype
    return tf.constant(operand.q.astype(precise) - precise(operand.params.zero_point))


def _arguments(node: Node, family: KernelFamily, q: list[Any]) -> Arguments:
    """Returns the arguments of a row without ranges and weights: parameters have bits alone."""

    def bits(params: QuantParams | None) -> Any:
        return params and QuantParams(None, None, params.bits)

    return Arguments(
        family=family,
        attributes=node.attributes,
        q=q,
        params=[bits(operand.params) for operand in node.inputs],
        output=bits(_native(node, family)),
        call=node.call,
        merges_relu=node.maximum is not None,
        sized=node.sized,
    )


def computes_in_float(node: Node, family: KernelFamily) -> bool:
    """Whether a family computes an operator in float, from real numbers."""
    op = node.op
    if op is None or not family.in_float or node.output.params is None or op.only_rounds:
        return False
    if op.is_affine or any(isinstance(operand, Constant) for operand in node.inputs):
        return True
    return not (op.weights or op.onnx_kernel or op.output == SharedRange())


def _quantized_results(
    results: list[Any], family: KernelFamily, prepared: PreparedNode
) -> list[Any]:
    """Quantizes what a node computed in float, as the family divides and rounds."""
    assert prepared.ends is not None
    scale = prepared.row["prepared"]
    rounded = [family.halves(single(tf.cast(y, tf.float64) / scale)) for y in results]
    return [tf.cast(_clipped(y, prepared.ends), tf.float32) for y in rounded]


def compute_node(
    node: Node, numbers: list[Any], family: KernelFamily, prepared: PreparedNode | None = None
) -> list[Any]:
    """Computes the outputs of a node that has an operator.

    Args:
        node: the node.
        numbers: its inputs; anything for constants.
        family: whose rounding.
        prepared: what was prepared for it; by default it is now.
    """
    op, output = node.op, node.output.params
    assert op is not None
    known = prepared or _prepare_node(node, family)
    pairs = zip(known.constants, numbers, strict=True)
    q = [number if constant is None else constant for constant, number in pairs]
    arguments = dataclasses.replace(_arguments(node, family, q), **known.row)
    results = tf.nest.flatten(op.compute(arguments))
    if known.ends is None or output is None:
        return results
    is_bound = isinstance(op.output, FixedRange) and op.output.is_bound
    # Sums of products are clipped below before they are multiplied.
    is_bound |= arguments.merges_relu and op.is_weighted and output.bits != 16
    ends, conversion, output_ends = known.ends, known.conversion, known.output_ends

    def finished(y: Any, tensor: Tensor) -> Any:
        if tensor.params is None:  # An index beside values.
            return y
        y = _clipped(y, ends, is_bound)
        if conversion is None or output_ends is None:
            return y
        return _clipped(requantize(y, conversion), output_ends)

    return [finished(y, tensor) for y, tensor in zip(results, node.outputs, strict=True)]


def run(
    graph: ResolvedGraph,
    inputs: list[Any],
    family: KernelFamily,
    in_float: ComputeInFloat,
    numbers: Prepared,
) -> dict[Tensor, Any]:
    """Computes all tensors of a graph.

    Args:
        graph: the graph.
        inputs: the model's inputs: real numbers, or quantized values minus the zero point.
        family: whose rounding.
        in_float: computes nodes without an operator, from real numbers with Keras masks.
        numbers: what `prepare` made of the graph for this family.

    Returns:
        Each tensor's values: real numbers where it is not quantized.
    """
    tensors = dict(zip(graph.inputs.values(), inputs, strict=True))

    def real(tensor: Tensor) -> Any:
        number = tensors.get(tensor)
        return None if number is None else numbers.real(number, tensor)

    def number_of(value: Value) -> Any:
        return real(graph.tensors[value]) if value in graph.tensors else None

    masks = KerasMasks(number_of)
    for node, prepared in zip(graph.nodes, numbers.nodes, strict=True):
        if prepared is None:
            reals = [
                masks.attach(value, real(tensor))  # type: ignore[arg-type]
                for value, tensor in zip(node.call.inputs, node.inputs, strict=True)
            ]
            results = in_float(node, reals)
        elif computes_in_float(node, family):
            reals = [real(tensor) for tensor in node.inputs if isinstance(tensor, Tensor)]
            results = in_float(node, reals)
            results = _quantized_results(results, family, prepared)
        else:
            read = [None if isinstance(x, Constant) else tensors[x] for x in node.inputs]
            results = compute_node(node, read, family, prepared)
        tensors.update(zip(node.outputs, results, strict=True))
    return tensors
