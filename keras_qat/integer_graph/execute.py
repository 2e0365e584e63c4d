"""Runs a resolved graph in integers, with the rounding of a kernel family.

Quantized tensors hold their quantized values minus the zero point: whole numbers in float32, or in
float64 with 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic.kernel_families import KernelFamily
from keras_qat.arithmetic.partial_evaluation import of_numbers
from keras_qat.arithmetic.quant_params import QuantParams, round_half_away
from keras_qat.frontend.graph import Value
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.masks import Masks
from keras_qat.ops.node import Constant, Node, Operand, Tensor
from keras_qat.ops.op import Arguments, FixedRange
from keras_qat.ops.requantize import requantized

__all__ = ["compute_node", "dequantized", "quantized_input", "run"]

ComputeInFloat = Callable[[Node, list[Any]], Any]


def held_in(params: QuantParams) -> tf.DType:
    """Returns the type that holds quantized values minus the zero point."""
    return tf.float64 if params.bits == 16 else tf.float32


def quantized_input(x: Any, params: QuantParams) -> Any:
    """Quantizes real inputs of a model as a caller of its file does: round half up."""
    dtype = held_in(params)
    scaled = tf.cast(x, dtype) / _cast(params.as_tensors().scale, dtype)
    return clipped(tf.floor(scaled + 0.5), params)


def dequantized(q: Any, params: QuantParams) -> Any:
    """Returns real values, in float32."""
    return tf.cast(q * _cast(params.as_tensors().scale, q.dtype), tf.float32)


_cast = of_numbers(tf.cast)


def clipped(
    q: Any, params: QuantParams, maximum: float | None = None, is_bound: bool = False
) -> Any:
    """Clips values to the range, and with a `maximum` as a ReLU that ends there.

    Args:
        q: quantized values minus the zero point.
        params: their quantization parameters.
        maximum: where the ReLU ends, infinity for a plain ReLU; None for no ReLU.
        is_bound: whether no value is below the lower end: the range's, or 0 with a `maximum`.
    """
    low, high = _ends(params.as_tensors(), maximum, q.dtype)
    if not is_bound:  # Two operations, as they compute in place, which ClipByValue does not.
        q = tf.maximum(q, low)
    return tf.minimum(q, high)


@of_numbers
def _ends(params: QuantParams, maximum: float | None, dtype: tf.DType) -> tuple[Any, Any]:
    """Returns the lowest and the highest value of `clipped`."""
    low, high = params.lowest - params.zero_point, params.highest - params.zero_point
    if maximum is not None:
        low = tf.maximum(low, 0.0)
        if maximum == 6:
            high = tf.minimum(high, round_half_away(maximum / params.scale))
    return tf.cast(low, dtype), tf.cast(high, dtype)


def compute_node(node: Node, numbers: list[Any], family: KernelFamily) -> list[Any]:
    """Computes the outputs of a node that has an operator."""
    op, output = node.op, node.output.params
    assert op is not None
    given = [_operand(each, number) for each, number in zip(node.inputs, numbers, strict=True)]
    params = [each.params.as_tensors() if each.params else each.params for each in node.inputs]
    native, is_bound = output, False
    if isinstance(op.output, FixedRange) and output is not None:
        native, is_bound = op.output.params(output.bits), op.output.is_bound
    arguments = Arguments(
        family=family,
        attributes=node.attributes,
        q=given,
        params=params,  # type: ignore[arg-type]
        output=native.as_tensors() if native else native,  # type: ignore[arg-type]
        call=node.call,
        weights=node.weights,
        merges_relu=node.maximum is not None,
        sized=node.sized,
    )
    results = tf.nest.flatten(op.compute(arguments))
    if output is None or native is None:
        return results
    # Sums of products are clipped below before they are multiplied.
    is_bound |= arguments.merges_relu and op.is_weighted and output.bits != 16
    results = [clipped(each, native, node.maximum, is_bound) for each in results]
    if native is not output and (tf.is_tensor(output.scale) or native != output):
        results = [clipped(requantized(family, each, native, output), output) for each in results]
    return results


def _operand(operand: Operand, number: Any) -> Any:
    if not isinstance(operand, Constant):
        return number
    if tf.is_tensor(operand.q):
        return _centred(operand.q, operand.params.zero_point, held_in(operand.params))
    dtype = held_in(operand.params).as_numpy_dtype
    return tf.constant(operand.q.astype(dtype) - dtype(operand.params.zero_point))


@of_numbers
def _centred(q: Any, zero_point: Any, dtype: tf.DType) -> Any:
    return tf.cast(q - zero_point, dtype)


def run(
    graph: ResolvedGraph, inputs: list[Any], family: KernelFamily, in_float: ComputeInFloat
) -> dict[Tensor, Any]:
    """Computes all tensors of a graph.

    Args:
        graph: the graph.
        inputs: the model's inputs: real numbers, or quantized values minus the zero point.
        family: whose rounding.
        in_float: computes nodes without an operator, from real numbers with Keras masks.

    Returns:
        Each tensor's values: real numbers where it is not quantized.
    """
    tensors = dict(zip(graph.inputs.values(), inputs, strict=True))

    def real(tensor: Tensor) -> Any:
        number = tensors.get(tensor)
        if number is None or tensor.params is None:
            return number
        return dequantized(number, tensor.params)

    def number_of(value: Value) -> Any:
        return real(graph.tensors[value]) if value in graph.tensors else None

    masks = Masks(number_of)
    for node in graph.nodes:
        numbers = [None if isinstance(each, Constant) else tensors[each] for each in node.inputs]
        if node.op is None:
            given = [
                masks.attached(value, real(each))  # type: ignore[arg-type]
                for value, each in zip(node.call.inputs, node.inputs, strict=True)
            ]
            results = tf.nest.flatten(in_float(node, given))
        else:
            results = compute_node(node, numbers, family)
        tensors.update(zip(node.outputs, results, strict=True))
    return tensors
