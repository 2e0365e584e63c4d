"""Runs a resolved graph in integers, with the rounding of a kernel family.

As in TFLite, each node is first prepared, then computed. `prepare` returns the parameters that
depend only on ranges and weights. `run` computes tensors with the prepared parameters. Nodes
without an operator (`op` is None) are layers that stay in float.

A quantized tensor contains integers relative to the zero point. They are stored as float32, or as
float64 for 16 bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic.kernel_families import KernelFamily
from keras_qat.arithmetic.quant_params import QuantParams, round_half_away
from keras_qat.graph.keras_masks import KerasMasks
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.ops.node import Constant, Node, Operand, Tensor
from keras_qat.ops.op import Arguments, FixedRange, get_held_dtype
from keras_qat.ops.requantize import Multiplier, prepare_requantization, requantize

ComputeInFloat = Callable[[Node, list[Any]], Any]

Ends = tuple[tf.Tensor, tf.Tensor]
"""The lowest and the highest quantized value relative to the zero point."""


def _get_ends(params: QuantParams, maximum: float | None = None) -> Ends:
    """Return the ends of a range. A fused ReLU or ReLU6 (`maximum` is 6) limits them."""
    params = params.as_tensors()
    low, high = (end - params.zero_point for end in (params.lowest, params.highest))
    if maximum is not None:
        low = tf.maximum(low, 0.0)
        if maximum == 6:
            high = tf.minimum(high, round_half_away(maximum / params.scale))
    dtype = get_held_dtype(params)
    return tf.cast(low, dtype), tf.cast(high, dtype)


def _clip(q: tf.Tensor, ends: Ends, is_bound: bool = False) -> tf.Tensor:
    low, high = (tf.cast(end, q.dtype) for end in ends)
    if not is_bound:  # Unlike ClipByValue, Maximum and Minimum can work in place.
        q = tf.maximum(q, low)
    return tf.minimum(q, high)


@dataclasses.dataclass(frozen=True)
class PreparedNode:
    """Prepared parameters of a node with an operator.

    Args:
        constants: one entry for each input: the values of a constant, or None for a tensor.
        row: fields of `Arguments` for `op.compute`. For an operator with `op.prepare`, this is only
            `prepared`. For other operators, it is quantization parameters and weights.
        ends: the ends of the range of the kernel's result. None for a float result.
        conversion: the multiplier from a kernel's fixed scale, such as 1 / 256 of softmax, to the
            scale of the output. None for kernels that use the scale of the output.
        output_ends: the ends of the output's range. None without a conversion.
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
        nodes: the parameters of each node, or None for a float node.
        scales: maps the name of each quantized tensor to its scale.
        ends: maps the name of each quantized input to the ends of its range.
    """

    nodes: tuple[PreparedNode | None, ...]
    scales: dict[str, tf.Tensor]
    ends: dict[str, Ends]

    def quantize(self, x: tf.Tensor, tensor: Tensor) -> tf.Tensor:
        """Quantizes an input of the model. Halves are rounded up."""
        if tensor.params is None:
            return x
        scale = self.scales[tensor.name]
        rounded = tf.floor(tf.cast(x, scale.dtype) / scale + 0.5)
        return _clip(rounded, self.ends[tensor.name])

    def dequantize(self, q: tf.Tensor, tensor: Tensor) -> tf.Tensor:
        """Returns the float32 values of a quantized tensor. Returns other tensors unchanged."""
        if tensor.params is None:
            return q
        return tf.cast(q * tf.cast(self.scales[tensor.name], q.dtype), tf.float32)


def prepare(graph: ResolvedGraph, family: KernelFamily) -> Prepared:
    tensors = [*graph.tensors.values(), *(x for node in graph.nodes for x in node.outputs)]
    params = {tensor.name: tensor.params for tensor in tensors if tensor.params}
    scales = {x: tf.cast(p.as_tensors().scale, get_held_dtype(p)) for x, p in params.items()}
    ends = {x.name: _get_ends(x.params) for x in graph.inputs.values() if x.params}
    nodes = (None if node.op is None else prepare_node(node, family) for node in graph.nodes)
    return Prepared(tuple(nodes), scales, ends)


def prepare_node(node: Node, family: KernelFamily) -> PreparedNode:
    op, output = node.op, node.output.params
    assert op is not None
    # An operand that is read twice has one spec, because operators compare inputs by identity.
    specs = {id(x): _get_spec(x) for x in node.inputs}
    params: Any = [x.params.as_tensors() if x.params else None for x in node.inputs]
    native = _find_native_params(node, family)
    arguments = dataclasses.replace(
        _make_arguments(node, family, [specs[id(x)] for x in node.inputs]),
        params=params,
        output=native.as_tensors() if native else native,  # type: ignore[arg-type]
        weights=node.weights,
    )
    row = {"params": params, "output": arguments.output, "weights": node.weights}
    if op.prepare is not None:
        row = {"prepared": op.prepare(arguments)}
    constants = tuple(map(_get_constant, node.inputs))
    if output is None or native is None:
        return PreparedNode(constants, row)
    if native is output or not (tf.is_tensor(output.scale) or native != output):
        return PreparedNode(constants, row, _get_ends(native, node.maximum))
    conversion = prepare_requantization(family, native, output)
    return PreparedNode(
        constants, row, _get_ends(native, node.maximum), conversion, _get_ends(output)
    )


def _get_spec(operand: Operand) -> tf.TensorSpec:
    shape = operand.q.shape if isinstance(operand, Constant) else operand.shape
    if operand.params is not None:
        return tf.TensorSpec(shape, get_held_dtype(operand.params))
    assert isinstance(operand, Tensor)
    return tf.TensorSpec(shape, operand.dtype)


def _find_native_params(node: Node, family: KernelFamily) -> QuantParams | None:
    """Return the quantization parameters of a kernel's result.

    Some kernels, such as softmax, have fixed parameters. Other kernels use those of the output.
    """
    assert node.op is not None
    output, fixed = node.output.params, node.op.output
    if isinstance(fixed, FixedRange) and output is not None:
        return fixed.params(output.bits)
    return output


def _get_constant(operand: Operand) -> tf.Tensor | None:
    """Return the values of a constant relative to the zero point, or None for a tensor."""
    if not isinstance(operand, Constant):
        return None
    dtype = get_held_dtype(operand.params)
    if tf.is_tensor(operand.q):
        return tf.cast(operand.q - operand.params.zero_point, dtype)
    precise = dtype.as_numpy_dtype
    return tf.constant(operand.q.astype(precise) - precise(operand.params.zero_point))


def _make_arguments(node: Node, family: KernelFamily, q: list[Any]) -> Arguments:
    """Return the arguments of `op.compute`, without weights, scales and zero points."""

    def keep_bits(params: QuantParams | None) -> Any:
        return params and QuantParams(None, None, params.bits)

    return Arguments(
        family=family,
        attributes=node.attributes,
        q=q,
        params=[keep_bits(operand.params) for operand in node.inputs],
        output=keep_bits(_find_native_params(node, family)),
        call=node.call,
        merges_relu=node.maximum is not None,
        sized=node.sized,
    )


def compute_node(
    node: Node, inputs: list[Any], family: KernelFamily, prepared: PreparedNode | None = None
) -> list[tf.Tensor]:
    """Computes the outputs of a node with an operator. `inputs` of constants are ignored."""
    op, output = node.op, node.output.params
    assert op is not None
    known = prepared or prepare_node(node, family)
    pairs = zip(known.constants, inputs, strict=True)
    q = [values if constant is None else constant for constant, values in pairs]
    arguments = dataclasses.replace(_make_arguments(node, family, q), **known.row)
    results = tf.nest.flatten(op.compute(arguments))
    if known.ends is None or output is None:
        return results
    is_bound = isinstance(op.output, FixedRange) and op.output.is_bound
    # Sums of products with a fused ReLU are clipped at 0 before they are rescaled.
    is_bound |= arguments.merges_relu and op.is_weighted and output.bits != 16
    ends, conversion, output_ends = known.ends, known.conversion, known.output_ends

    def finish(y: tf.Tensor, tensor: Tensor) -> tf.Tensor:
        if tensor.params is None:  # An index has no quantization parameters.
            return y
        y = _clip(y, ends, is_bound)
        if conversion is None or output_ends is None:
            return y
        return _clip(requantize(y, conversion), output_ends)

    return [finish(y, tensor) for y, tensor in zip(results, node.outputs, strict=True)]


def run(
    graph: ResolvedGraph,
    inputs: Sequence[tf.Tensor],
    family: KernelFamily,
    compute_in_float: ComputeInFloat,
    prepared: Prepared,
) -> dict[Tensor, tf.Tensor]:
    """Computes all tensors of a graph, and returns the values in a dict.

    Args:
        graph: the graph.
        inputs: the model's inputs: float values, or quantized values relative to the zero point.
        family: the kernel family.
        compute_in_float: function that computes the outputs of a float node. Its arguments are the
            node and its float inputs, with Keras masks attached.
        prepared: the result of `prepare` for the graph and this family.
    """
    tensors = dict(zip(graph.inputs.values(), inputs, strict=True))

    def dequantize(tensor: Tensor | None) -> tf.Tensor | None:
        q = tensors.get(tensor)  # type: ignore[arg-type]
        return None if q is None else prepared.dequantize(q, tensor)  # type: ignore[arg-type]

    masks = KerasMasks(lambda value: dequantize(graph.tensors.get(value)))
    for node, prepared_node in zip(graph.nodes, prepared.nodes, strict=True):
        if prepared_node is None:
            values = [
                masks.attach(value, dequantize(tensor))  # type: ignore[arg-type]
                for value, tensor in zip(node.call.inputs, node.inputs, strict=True)
            ]
            results = compute_in_float(node, values)
        else:
            read = [None if isinstance(x, Constant) else tensors[x] for x in node.inputs]
            results = compute_node(node, read, family, prepared_node)
        tensors.update(zip(node.outputs, results, strict=True))
    return tensors
