"""Exports the resolved graph to a SavedModel, with the integer arithmetic of `predict`.

For models of the recipe `contrib`, the SavedModel contains fake quantization. BatchNormalization is
folded, and weights and ranges are constants.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.graph.precision import compute_in_float32
from keras_qat.integer_graph.execute import prepare, run
from keras_qat.integer_graph.float_nodes import compute_in_float
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.passes import pack_if_requested
from keras_qat.integer_graph.resolve import resolve_to_export
from keras_qat.io.atomic_files import replacing
from keras_qat.keras2.backend import keras, one_at_a_time, swap_attributes
from keras_qat.ops.node import Constant, Node, Tensor
from keras_qat.ops.op import SharedRange
from keras_qat.ops.recurrent.step_ops import get_inner_params
from keras_qat.ops.weights import Weights
from keras_qat.training.fake_quantization.phase import Phase
from keras_qat.training.layers import QuantizeWrapper
from keras_qat.training.readiness import check_before_export
from keras_qat.training.recurrent import simulate_lstm, simulate_steps


@one_at_a_time
def export_saved_model(model: keras.Model, path: str | os.PathLike[str]) -> None:
    """Exports a trained model to a SavedModel with the same results as `predict`.

    TensorFlow loads the SavedModel without keras_qat. The signature `serving_default` has the
    model's inputs and outputs by name, in float.

    Args:
        model: a trained quantization-aware model.
        path: the directory to write. An existing SavedModel is replaced only on success.

    Raises:
        ValueError: if the model is not quantized or a quantizer has no usable range.
        OSError: if `path` cannot be written.

    Example:
        >>> keras_qat.export_saved_model(qat, "model")
        >>> tf.saved_model.load("model").signatures["serving_default"](image=x)
    """
    check_before_export(model, path, directory=True)
    graph = resolve_to_export(model)
    graph.origin.warn()
    module = make_inference_module(graph) if graph.origin.simulates else make_exact_module(graph)
    with replacing(Path(path)) as scratch:
        tf.saved_model.save(module, str(scratch), signatures={"serving_default": module.serve})


def make_exact_module(graph: ResolvedGraph) -> tf.Module:
    """Returns a module with a function `serve` that has the same results as `predict`."""
    family = graph.origin.family
    graph = pack_if_requested(graph, None, family)
    prepared = prepare(graph, family)

    def compute(inputs: list[tf.Tensor]) -> dict[str, tf.Tensor]:
        quantized = list(map(prepared.quantize, inputs, graph.inputs.values()))
        tensors = run(graph, quantized, family, compute_in_float, prepared)
        return {name: prepared.dequantize(tensors[x], x) for name, x in graph.outputs.items()}

    return _make_module(graph, compute)


def make_inference_module(graph: ResolvedGraph) -> tf.Module:
    """Returns a module with a function `serve` that computes with fake quantization."""
    return _make_module(graph, lambda inputs: _simulate(graph, inputs))


def _make_module(
    graph: ResolvedGraph, compute: Callable[[list[tf.Tensor]], dict[str, tf.Tensor]]
) -> tf.Module:
    """Return a module with the weights, and a function `serve` that calls `compute`."""
    if graph.origin.states:
        raise ValueError(
            f"'{graph.name}' keeps states (stateful=True), which a SavedModel does not "
            f"support. Export it with export_tflite."
        )
    signature = [
        tf.TensorSpec(tensor.shape, tensor.dtype, name=name)
        for name, tensor in graph.inputs.items()
    ]

    def serve(*inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        return compute(list(inputs))

    module = tf.Module()
    # Keras would trace layers, so only their weights are saved. Folded weights are constants.
    in_float = {node.call.layer for node in graph.nodes if node.op is None}
    module.weights = [
        weight
        for layer in graph.origin.calls.count_calls()
        if layer in in_float or not isinstance(layer, QuantizeWrapper)
        for weight in layer.weights
    ]
    module.serve = tf.function(serve, input_signature=signature, autograph=False)
    return module


def _simulate(graph: ResolvedGraph, inputs: list[tf.Tensor]) -> dict[str, tf.Tensor]:
    values: dict[Tensor, tf.Tensor] = {
        tensor: x if tensor.params is None else _fake_quantize(x, tensor.params)
        for tensor, x in zip(graph.inputs.values(), inputs, strict=True)
    }
    for node in graph.nodes:
        read = [values[x] for x in node.inputs if not isinstance(x, Constant)]
        with tf.name_scope(node.name.replace(":", "_")):
            results = tf.nest.flatten(_compute_node(node, read))
        values.update(zip(node.outputs, results, strict=True))
    return {name: values[tensor] for name, tensor in graph.outputs.items()}


def _compute_node(node: Node, inputs: list[tf.Tensor]) -> Any:
    if node.op is None:
        return compute_in_float(node, inputs)
    results = inputs if node.op.only_rounds else _call_layer(node, inputs)
    params = node.output.params
    if node.maximum is not None and not (params and _clips_like_relu(params, node.maximum)):
        clip = tf.nn.relu6 if node.maximum == 6 else tf.nn.relu
        results = tf.nest.map_structure(clip, results)
    if params is None or node.op.output == SharedRange():
        return results
    return tf.nest.map_structure(lambda x: _fake_quantize(x, params), results)


def _clips_like_relu(params: QuantParams, maximum: float) -> bool:
    """Return True if quantization already clips like a ReLU with this maximum."""
    levels = params.highest - params.lowest
    reaches = maximum != 6 or round(maximum / float(params.scale)) >= levels
    return params.zero_point == params.lowest and reaches


def _call_layer(node: Node, inputs: list[tf.Tensor]) -> Any:
    """Call a node's layer in float, with dequantized weights."""
    weights, layer = node.weights, node.call.layer
    if weights is not None and weights.recurrent is not None:
        return _call_recurrent(node, weights, inputs)
    if weights is not None and weights.name:
        (x,) = inputs
        kernel = tf.constant((weights.q * weights.scale).astype(np.float32))
        replaced = {weights.name: kernel}
        if weights.bias is not None:
            unit = np.float64(node.inputs[0].params.scale) * weights.scale  # type: ignore[union-attr]
            unit = unit.reshape(weights.bias.shape) if unit.size > 1 else unit.item()
            replaced["bias"] = tf.constant((weights.bias * unit).astype(np.float32))
            if hasattr(layer, "use_bias"):
                replaced["use_bias"] = True
        with swap_attributes(layer, **replaced), compute_in_float32(layer):
            return layer.call(x)
    return compute_in_float(node, inputs)


def _call_recurrent(node: Node, weights: Weights, inputs: list[tf.Tensor]) -> Any:
    layer, recurrent = node.call.layer, weights.recurrent
    assert recurrent is not None
    values = {x.name: tf.constant((x.q * x.scale).astype(np.float32)) for x in (weights, recurrent)}
    if weights.bias is not None or recurrent.bias is not None:
        params = node.inputs[0].params, get_inner_params(weights, "hidden")
        biases = [
            x.bias * (np.float64(read.scale) * x.scale).reshape(-1)  # type: ignore[union-attr]
            for x, read in zip((weights, recurrent), params, strict=True)
            if x.bias is not None
        ]
        bias = np.stack(biases) if len(biases) > 1 else biases[0]
        values["cell.bias"] = tf.constant(bias.astype(np.float32))
    phase = Phase(training=False, quantizing=True, frozen=True)
    with compute_in_float32(layer):
        if not weights.inner:
            (x,) = inputs
            return simulate_lstm(layer, x, values, phase, node.inputs[0].params.bits)  # type: ignore[union-attr]

        def quantize(name: str, x: tf.Tensor) -> tf.Tensor:
            return _fake_quantize(x, get_inner_params(weights, name))

        return simulate_steps(layer, inputs, values, phase, quantize, quantize)[0]


def _fake_quantize(x: tf.Tensor, params: QuantParams) -> tf.Tensor:
    if not x.dtype.is_floating:  # Indices have no scale.
        return x
    scale, bits = float(params.scale), max(params.bits, 8)
    low = (params.lowest - params.zero_point) * scale
    y = tf.quantization.fake_quant_with_min_max_args(x, low, low + (2**bits - 1) * scale, bits)
    if params.bits >= 8:
        return y
    return tf.minimum(y, np.float32(low + (2**params.bits - 1) * scale))
