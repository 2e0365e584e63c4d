"""Models of float nodes alone, their files, and functions that compute both."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.kernel_families import XNNPACK
from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.export.tflite_writer import write_graph
from keras_qat.graph.calls import flatten_values
from keras_qat.graph.read_model import read_model
from keras_qat.integer_graph.execute import prepare, run
from keras_qat.integer_graph.float_nodes import compute_in_float
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.resolve_tensors import get_scope
from keras_qat.ops.elementwise import ADD
from keras_qat.ops.node import Node, Tensor
from keras_qat.ops.requantize import QUANTIZE
from keras_qat.tflite.builder import Builder
from keras_qat.tflite.interpreter import FileInterpreter
from keras_qat.tflite.schema import as_scope
from tests.helpers import keras, layers

PARAMS = QuantParams(np.float32(4 / 255), 0, 8)

SEQUENCE = (6, 4)
"""Steps and channels of most examples."""


def in_float(model: Any, params: QuantParams | None = None) -> ResolvedGraph:
    """Returns a model of float nodes, except Add layers, and inputs if they have `params`."""
    graph = read_model(model)
    tensors = {
        value: Tensor(as_scope(value.name), value.shape, value.dtype, params)
        for value in flatten_values(graph.inputs)
    }
    inputs = {value.name: tensor for value, tensor in tensors.items()}
    nodes: list[Node] = []

    def quantized(tensor: Tensor, call: Any) -> Tensor:
        if tensor.params is not None:
            return tensor
        made = dataclasses.replace(tensor, name=f"{tensor.name}/quantized", params=PARAMS)
        nodes.append(Node(made.name, QUANTIZE, {}, call, (tensor,), (made,)))
        return made

    for call in graph.calls:
        op = ADD if isinstance(call.layer, layers.Add) else None
        read = tuple(tensors[value] for value in call.inputs)
        if op is not None:
            read = tuple(quantized(tensor, call) for tensor in read)
        for value in flatten_values(call.outputs):
            shared = None if op is None else PARAMS
            tensors[value] = Tensor(get_scope(call, value), value.shape, value.dtype, shared)
        made = tuple(tensors[value] for value in flatten_values(call.outputs))
        attributes = {} if op is None else op.attributes(call)
        nodes.append(Node(get_scope(call), op, attributes, call, read, made, layer=call.layer))
    outputs = [tensors[value] for value in flatten_values(graph.outputs)]
    names = dict(zip(graph.output_names, outputs, strict=True))
    values = {tensor: value for value, tensor in tensors.items()}
    return ResolvedGraph(graph.name, inputs, names, tuple(nodes), tensors, values)


def file_of(graph: ResolvedGraph) -> bytes:
    builder = Builder()
    return builder.finish(*write_graph(graph, builder, "float32", "float32"))


def results(graph: ResolvedGraph, inputs: list[np.ndarray], contents: bytes) -> list[np.ndarray]:
    """Returns the outputs of a graph's file."""
    outputs = FileInterpreter(contents).run_once(dict(zip(graph.inputs, inputs, strict=True)))
    return [outputs[name] for name in graph.outputs]


def computed(graph: ResolvedGraph, inputs: list[np.ndarray], **how: Any) -> list[np.ndarray]:
    """Returns the outputs of a graph without quantized outputs."""
    numbers = prepare(graph, XNNPACK)

    @tf.function(autograph=False)
    def traced(*given: Any) -> list[Any]:
        compute = lambda node, numbers: compute_in_float(node, numbers, **how)  # noqa: E731
        tensors = run(graph, list(given), XNNPACK, compute, numbers)
        return [tensors[output] for output in graph.outputs.values()]

    return [np.asarray(item) for item in traced(*map(tf.constant, inputs))]


def made(build: Callable[..., Any], *shapes: Any, dtype: str = "float32") -> Any:
    keras.utils.set_random_seed(1)
    inputs = [keras.Input(shape, dtype=dtype) for shape in shapes]
    return keras.Model(inputs, build(*inputs))


def random_inputs(model: Any, batch: int = 3) -> list[np.ndarray]:
    numbers = np.random.default_rng(0)
    result = []
    for tensor in model.inputs:
        sizes = [batch, *(7 if size is None else size for size in tensor.shape[1:])]
        is_real = tensor.dtype.is_floating
        x = numbers.normal(size=sizes) if is_real else numbers.integers(0, 4, sizes)
        result.append(x.astype(tensor.dtype.as_numpy_dtype))
    return result


def close(found: list[Any], expected: list[Any], tolerance: float = 1e-5) -> None:
    for here, there in zip(found, expected, strict=True):
        assert here.shape == there.shape
        np.testing.assert_allclose(here, there, rtol=tolerance, atol=tolerance)


def check(model: Any, *inputs: np.ndarray) -> bytes:
    """Asserts that all ways to compute a model equal Keras, and returns the file."""
    given = list(inputs) or random_inputs(model)
    expected = [np.asarray(tensor) for tensor in tf.nest.flatten(model(given, training=False))]
    graph = in_float(model)
    contents = file_of(graph)
    close(results(graph, given, contents), expected)
    close(computed(graph, given), expected)
    close(computed(graph, given, for_file=True), expected)
    assert file_of(in_float(model)) == contents
    return contents
