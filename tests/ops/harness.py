"""Tests a single operator: its integer implementation against the interpreter's kernels."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.arithmetic.kernel_families import kernel_family
from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.export.target_rewrites import rewrite_for
from keras_qat.export.tflite_writer import get_tensor_index, write_node
from keras_qat.graph.calls import Call, Value, flatten_values, map_values
from keras_qat.graph.operations import list_operands
from keras_qat.graph.read_model import read_model
from keras_qat.integer_graph.execute import compute_node
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.passes import set_batch_size
from keras_qat.integer_graph.resolve_tensors import quantize_constant
from keras_qat.keras2.backend import keras
from keras_qat.ops.node import Node, Tensor
from keras_qat.ops.op import FixedRange, Op, SharedRange
from keras_qat.ops.recurrent.lstm import LSTM
from keras_qat.ops.registry import match
from keras_qat.ops.weights import Weights
from keras_qat.targets import TFLM, XNNPACK, problems
from keras_qat.tflite.builder import Builder
from keras_qat.tflite.interpreter import Kernels
from keras_qat.tflite.micro_interpreter import open_file
from keras_qat.training.recurrent import get_biases
from tests.ops.examples import EXAMPLES
from tests.ops.examples.example import BATCH

SMALL = 3
"""Upper bound of integers that are not quantized values."""

LACKING = {("elu", "reference")}
"""Operators without a reference kernel, although the interpreter's kernel is the only one."""


def random_params(numbers: np.random.Generator, bits: int, symmetric: bool = False) -> QuantParams:
    """Returns a range that includes zero: one-sided or not, and small to large."""
    size = 10.0 ** numbers.uniform(-2, 1.5)
    if symmetric:
        half = 2 ** (bits - 1)
        return QuantParams.from_range(-size * half / (half - 1), size, bits)
    if bits == 16:
        return QuantParams.from_range(-size * 32768 / 32767, size, 16)
    low = -size * numbers.choice([0.0, 1.0, numbers.uniform(0, 1)])
    high = size * numbers.choice([1.0, numbers.uniform(0.05, 1)])
    return QuantParams.from_range(low, high, bits)


def random_weights(
    call: Call, op: Op, numbers: Any, per_channel: bool = True, bits: int = 8
) -> Weights:
    """Returns weights of the layer's shape, with a scale for each channel if it supports that."""
    if op is LSTM:
        return random_recurrent_weights(call.layer.cell, numbers)
    if inner := op.inner(match(call).attributes):
        return random_unrolled_weights(call.layer, inner, numbers, per_channel)
    ((name, axes),) = op.weights.items()
    axes = axes if per_channel else ()
    shape = tuple(getattr(call.layer, name).shape) if name else (call.output.shape[-1],)
    channels = [shape[axis] if axis in axes else 1 for axis in range(-len(shape), 0)]
    scale = np.float32(10.0 ** numbers.uniform(-3, -1, channels)).astype(np.float64)
    q = numbers.integers(-127, 128, shape).astype(np.float64)
    bias = None
    if not name or getattr(call.layer, "bias", None) is not None:
        size = tuple(call.layer.bias.shape) if name else shape
        units = 2000 * 2.0 ** max(bits - 8, 0)  # As large as some products.
        bias = np.round(numbers.normal(size=size) * units).astype(np.float64)
    return Weights(name, q, scale, bias)


def random_recurrent_weights(cell: Any, numbers: np.random.Generator) -> Weights:
    """Returns weights of a cell, with a scale for each of its four gates."""

    def drawn(name: str, variable: Any, **more: Any) -> Weights:
        scales = np.float32(10.0 ** numbers.uniform(-3.5, -1.5, 4)).astype(np.float64)
        q = numbers.integers(-127, 128, tuple(variable.shape)).astype(np.float64)
        return Weights(name, q, np.repeat(scales, q.shape[1] // 4)[None], **more)

    recurrent = drawn("cell.recurrent_kernel", cell.recurrent_kernel)
    bias = np.round(numbers.normal(size=recurrent.q.shape[1]) * 2000)
    return drawn("cell.kernel", cell.kernel, bias=bias, recurrent=recurrent)


def random_unrolled_weights(
    layer: Any, inner: dict[str, Any], numbers: Any, per_channel: bool
) -> Weights:
    """Returns weights of a layer, with a scale for each channel, and the ranges inside a step."""
    given, own = get_biases(layer, tf.float64)

    def drawn(name: str, variable: Any, bias: Any, **more: Any) -> Weights:
        shape = tuple(variable.shape)
        count = shape[-1] if per_channel else 1
        scale = np.float32(10.0 ** numbers.uniform(-3.5, -1.5, (1, count))).astype(np.float64)
        q = numbers.integers(-127, 128, shape).astype(np.float64)
        whole = None if bias is None else np.round(numbers.normal(size=shape[-1]) * 2000)
        return Weights(name, q, scale, whole, **more)

    params = {}
    for name, value in inner.items():
        size = 10.0 ** numbers.uniform(0, 1)
        low = 0.0 if value.non_negative else -size * numbers.uniform(0.3, 1)
        low = -size * 128 / 127 if value.symmetric else low
        params[name] = QuantParams.from_range(low, size, 8)
    recurrent = drawn("cell.recurrent_kernel", layer.cell.recurrent_kernel, own)
    return drawn("cell.kernel", layer.cell.kernel, given, recurrent=recurrent, inner=params)


def node_of(
    op: Op, bits: int, seed: int, maximum: float | None = None, per_channel: bool = True
) -> tuple[Node, Any]:
    """Returns a node of a random example of an operator, and the random generator."""
    numbers = np.random.default_rng(seed)
    if op.weights:  # Not always, because it clears all of TensorFlow's kernels.
        keras.utils.set_random_seed(seed)
    example = EXAMPLES[op.name](numbers)
    dtypes = example.dtypes or ("float32",) * len(example.shapes)
    inputs = [
        keras.Input(shape, dtype=dtype) for shape, dtype in zip(example.shapes, dtypes, strict=True)
    ]
    model = keras.Model(inputs, example.build(*inputs))
    graph = read_model(model)
    (call,) = [call for call in graph.calls if getattr(match(call).op, "name", "") == op.name]
    return make_node(call, bits, numbers, maximum, per_channel), numbers


def make_node(
    call: Call, bits: int, numbers: Any, maximum: float | None = None, per_channel: bool = True
) -> Node:
    op, attributes, reason = match(call)
    assert op is not None, reason
    shared = random_params(numbers, bits)
    is_shared = isinstance(op.output, SharedRange)
    made: dict[Value, Tensor] = {}
    symmetric = [call.inputs[place] for place in op.symmetric]

    def tensor(value: Value) -> Tensor:
        if value not in made:
            params = None
            if value.is_float:
                is_symmetric = value in symmetric and numbers.random() < 0.7
                params = shared if is_shared else random_params(numbers, bits, is_symmetric)
            made[value] = Tensor(value.name, value.shape, value.dtype, params)
        return made[value]

    operands: list[Any] = []
    for item in list_operands(call) if op.quantizes_constants else call.inputs:
        if isinstance(item, Value):
            operands.append(tensor(item))
        else:
            operands.append(quantize_constant(item, bits, shared if is_shared else None))
    weights = None
    if op.weights:
        weights = random_weights(call, op, numbers, per_channel, bits)
    outputs = []
    for value in flatten_values(call.outputs):
        params = None
        if not value.is_float:
            pass
        elif is_shared:
            params = shared
        elif isinstance(op.output, FixedRange):
            low, high = op.output.wide if bits == 16 else (op.output.minimum, op.output.maximum)
            params = QuantParams.from_range(low, high, bits)
        else:
            params = output_params(call, op, operands, weights, bits, numbers)
        outputs.append(Tensor(f"{value.name}_output", value.shape, value.dtype, params))
    return Node(call.name, op, attributes, call, tuple(operands), tuple(outputs), weights, maximum)


def output_params(
    call: Call, op: Op, operands: list[Any], weights: Any, bits: int, numbers: Any
) -> QuantParams:
    """Returns a range like the float results', but somewhat too small or too large."""
    real = []
    for operand in operands:
        if isinstance(operand, Tensor):
            sizes = [BATCH if size is None else size for size in operand.shape]
            if operand.params is None:
                real.append(tf.constant(numbers.integers(0, SMALL, sizes).astype(operand.dtype)))
                continue
            q = numbers.integers(operand.params.lowest, operand.params.highest + 1, sizes)
            real.append(tf.constant(operand.params.dequantize(q)))
    given = iter(real)
    args, kwargs = map_values(lambda value: next(given), (call.args, call.kwargs))
    layer = call.layer
    if weights is not None and not weights.name:
        factors, unit = weights.q * weights.scale, operands[0].params.scale
        layer = lambda x: x * factors + weights.bias * unit * weights.scale  # noqa: E731
    elif weights is not None and weights.inner:
        end = 255 * float(weights.inner["hidden"].scale)
        return QuantParams.from_range(0.0, end * numbers.choice([0.7, 1.0, 1.3]), bits)
    elif weights is not None:
        before = layer.get_weights()
        kernel = (weights.q * weights.scale).astype(np.float32)
        layer.set_weights([kernel, *before[1:]])
    result = np.asarray(layer(*args, **kwargs)) * numbers.choice([0.7, 1.0, 1.3])
    result = result[np.isfinite(result)]
    low, high = (float(extreme(result, initial=0.0)) for extreme in (np.min, np.max))
    if op.output.non_negative:  # type: ignore[union-attr]
        low = 0.0
    if bits == 16:
        high = max(-low, high) or 1.0
        return QuantParams.from_range(-high * 32768 / 32767, high, 16)
    return QuantParams.from_range(low, high if high > low else low + 1.0, bits)


def random_inputs(node: Node, numbers: Any) -> dict[str, np.ndarray]:
    """Returns quantized values for each input, all of them if there is room."""
    result = {}
    for item in node.inputs:
        if isinstance(item, Tensor) and item.name not in result:
            sizes = [BATCH if size is None else size for size in item.shape]
            if item.params is None:
                result[item.name] = numbers.integers(0, SMALL, sizes).astype(item.dtype)
                continue
            low, high = item.params.lowest, item.params.highest
            q = numbers.integers(low, high + 1, sizes).astype(item.params.dtype)
            if high - low < 256:
                every = np.arange(low, high + 1)[: q.size]
                q.reshape(-1)[: every.size] = numbers.permutation(every)
            result[item.name] = q
    return result


def with_ends(node: Node, *params: Any, shapes: Any = None, **changes: Any) -> Node:
    """Returns a node with other parameters, or shapes, of its inputs and its output, in order."""
    ends = [*node.inputs, node.output]
    if params:
        ends = [dataclasses.replace(x, params=y) for x, y in zip(ends, params, strict=True)]
    if shapes:
        ends = [dataclasses.replace(x, shape=y) for x, y in zip(ends, shapes, strict=True)]
    return dataclasses.replace(node, inputs=tuple(ends[:-1]), outputs=(ends[-1],), **changes)


def sized(node: Node, batch: int) -> Node:
    inputs = {item.name: item for item in node.inputs if isinstance(item, Tensor)}
    (node,) = set_batch_size(ResolvedGraph("", inputs, {}, (node,), {}, {}), batch).nodes
    return node


def file_of(node: Node, batch: int | None = None, rewrite: Any = None) -> bytes:
    """Returns a file of this node. `rewrite` may change its operators, by default for LiteRT."""
    if batch is not None:
        node = sized(node, batch)
    builder, indices = Builder(), {}
    tensors = {item.name: item for item in node.inputs if isinstance(item, Tensor)}
    ends = {name: get_tensor_index(builder, indices, item) for name, item in tensors.items()}
    write_node(builder, node, indices)
    outputs = {f"output_{place}": indices[output] for place, output in enumerate(node.outputs)}
    return builder.finish(ends, outputs, rewrite or rewrite_for(XNNPACK))


def in_the_interpreter(
    contents: bytes, inputs: dict[str, np.ndarray], kernels: Kernels
) -> list[np.ndarray]:
    """Returns the outputs of a file of one node, in order."""
    outputs = open_file(contents, kernels).run_once(inputs)
    return [outputs[name] for name in sorted(outputs, key=lambda name: int(name.split("_")[1]))]


def in_integers(node: Node, inputs: dict[str, np.ndarray], family: str) -> list[np.ndarray]:
    """Returns the quantized values that the operator's implementation computes."""
    return [np.asarray(item) for item in in_integers_as_tensors(node, inputs, family)]


def in_integers_as_tensors(node: Node, inputs: dict[str, Any], family: str) -> list[Any]:
    """Like `in_integers`, also in graphs."""

    @functools.cache  # A tensor that is read twice is one tensor.
    def centred(tensor: Tensor) -> Any:
        if tensor.params is None:
            return tf.convert_to_tensor(inputs[tensor.name])
        q = tf.cast(inputs[tensor.name], tf.float64) - tensor.params.zero_point
        return tf.cast(q, tf.float64 if tensor.params.bits == 16 else tf.float32)

    given = [centred(item) if isinstance(item, Tensor) else None for item in node.inputs]
    results = compute_node(node, given, kernel_family(family))
    return [
        item
        if tensor.params is None
        else tf.cast(item + tensor.params.zero_point, tensor.params.dtype)
        for item, tensor in zip(results, node.outputs, strict=True)
    ]


def assert_exact(
    op: Op, bits: int, family: str, seed: int, maximum: Any = None, per_channel: bool = True
) -> None:
    """Asserts that file and implementation compute the same values."""
    node, numbers = node_of(op, bits, seed, maximum, per_channel)
    assert_same(node, random_inputs(node, numbers), family, f"seed {seed}")


def assert_same(node: Node, inputs: dict[str, np.ndarray], family: str, label: str = "") -> None:
    """Asserts that the file of a node and its implementation compute the same values."""
    op = node.op
    assert op is not None
    kernels = "optimized" if (op.name, family) in LACKING else family
    contents = file_of(node, BATCH if family == "tflm" else None)
    if family == "tflm":
        pytest.importorskip("tflite_micro")
        if problems(contents, TFLM):
            return
    expected = in_the_interpreter(contents, inputs, kernels)
    codes = in_integers(node, inputs, family)
    for there, here in zip(expected, codes, strict=True):
        assert there.shape == here.shape, (there.shape, here.shape, node.attributes)
        differing = np.count_nonzero(there != here)
        largest = np.abs(there.astype(np.int64) - here.astype(np.int64)).max(initial=0)
        assert not differing, (
            f"{op.name}, {family}, {label}: {differing} of {here.size} values differ, by up to "
            f"{largest}; {dict(node.attributes)}, in {[str(item.params) for item in node.inputs]}, "
            f"out {node.output.params}"
        )
