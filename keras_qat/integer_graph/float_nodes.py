"""Computes nodes that stay float: layers without an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value, flatten_values, map_values
from keras_qat.graph.keras_masks import get_first_argument
from keras_qat.graph.precision import cast_constants, compute_in_float32
from keras_qat.integer_graph.float_layers import form_of, rnn
from keras_qat.keras2.backend import AUTOGRAPH_AS_USUAL, keras, replace_rnn, swap_attributes
from keras_qat.keras2.layers_and_models import accepts_training
from keras_qat.ops.node import Node
from keras_qat.training.batch_norm import fold_modes
from keras_qat.training.batch_norm.factor_and_bias import compute_factor_and_bias, scale_channels
from keras_qat.training.fake_quantization.phase import QUANTIZED
from keras_qat.training.fake_quantization.weight_quantizer import (
    get_weight,
    replace_weights,
)
from keras_qat.training.layers import (
    Quantize,
    QuantizeWeights,
    QuantizeWrapper,
)
from keras_qat.training.scheduled_layer import ScheduledLayer


def compute_in_float(node: Node, numbers: list[Any], for_file: bool = False) -> list[Any]:
    """Computes a node that has no operator, as at inference.

    Args:
        node: the node. It calls a plain layer, a `QuantizeWeights` or a `QuantizeWrapper`, which
            is folded here. Weights are read whenever this runs.
        numbers: real numbers or integers, one tensor for each value that the call reads, with
            their Keras masks.
        for_file: whether to compute with operations that TFLite's converter takes, and with
            constants in place of variables.

    Returns:
        The tensors, without the None that some layers return beside them.
    """
    call, remaining = node.call, iter(numbers)
    if node.op is not None and node.op.reads_only_weights:
        return [call.layer.value()]
    args, kwargs = cast_constants((call.args, call.kwargs))
    if for_file:
        args, kwargs = tf.nest.map_structure(_as_array, (args, kwargs))
    args, kwargs = map_values(lambda value: next(remaining), (args, kwargs))
    with compute_in_float32(call.layer), AUTOGRAPH_AS_USUAL:
        outputs = tf.nest.flatten(_computed(call.layer, args, kwargs, for_file))
    return [output for output in outputs if output is not None]


def _computed(layer: Any, args: Any, kwargs: dict[str, Any], for_file: bool) -> Any:
    if not isinstance(layer, (QuantizeWrapper, QuantizeWeights)):
        return _applied(layer, args, kwargs, for_file)
    if isinstance(layer, QuantizeWrapper):
        if not any("." in path for path in layer.weight_axes):
            return _folded(layer, args[0], for_file)
        kwargs = {}  # Of a recurrent layer.
    with replace_weights(layer.layer, _evaluated(lambda: _inner_weights(layer), for_file)):
        return _applied(layer.layer, args, kwargs, for_file)


def _as_array(leaf: Any) -> Any:
    """Makes an array of a constant tensor, whose numbered name would get into the file."""
    return leaf.numpy() if isinstance(leaf, tf.__internal__.EagerTensor) else leaf


def _applied(layer: Any, args: Any, kwargs: dict[str, Any], for_file: bool) -> Any:
    """Calls a layer as at inference."""
    kwargs = {name: value for name, value in kwargs.items() if name != "training"}
    if accepts_training(layer):
        kwargs["training"] = False
    if not for_file:
        return layer(*args, **kwargs)
    with replace_rnn(rnn, layer):
        form = form_of(layer)
        return layer(*args, **kwargs) if form is None else form(layer, *args, **kwargs)


def _evaluated(make: Callable[[], dict[str, Any]], for_file: bool) -> dict[str, Any]:
    """Returns weights by name, as constants for a file: the converter freezes variables slowly."""
    if not for_file:
        return make()
    with tf.init_scope():
        arrays = {name: np.asarray(weight) for name, weight in make().items()}
    return {name: tf.constant(weight) for name, weight in arrays.items()}


def _inner_weights(wrapper: QuantizeWrapper | QuantizeWeights) -> dict[str, Any]:
    """Returns the fake-quantized weights of a wrapper, by path."""
    return {
        path: quantizer(get_weight(wrapper.layer, path), QUANTIZED)
        for path, quantizer in wrapper.weight_quantizers.items()
    }


def _folded(wrapper: QuantizeWrapper, x: Any, for_file: bool) -> Any:
    """Computes a `QuantizeWrapper`: layer, BatchNormalization and activation."""
    layer, name = wrapper.layer, next(iter(wrapper.weight_axes), "")
    weights = _evaluated(lambda: _folded_weights(wrapper), for_file)
    if not name:
        y = x * weights["factor"] + weights["bias"]
    else:
        if "bias" in weights and hasattr(layer, "use_bias"):
            weights["use_bias"] = True
        with swap_attributes(layer, **weights):
            y = layer.call(x)
    if wrapper.activation is None:
        return y
    return _applied(wrapper.activation, (y,), {}, for_file)


def _folded_weights(wrapper: QuantizeWrapper) -> dict[str, Any]:
    """Returns the folded weights of a wrapper's layer, by the names of its attributes.

    Symmetric per-channel weights are quantized, then folded, which equals folding first. Other
    weights were trained folded.
    """
    factor, bias = compute_factor_and_bias(wrapper, tf.float64)
    codes = None
    if wrapper.fold == "per_tensor" and set(wrapper.weight_quantizers) == set(wrapper.weight_axes):
        codes = fold_modes.quantize_folded(wrapper)
        bias = None if bias is None else fold_modes.apply_gains(wrapper, bias, codes.gains)
    biases = {} if bias is None else {"bias": tf.cast(bias, tf.float32)}
    if codes is not None:
        return {**biases, next(iter(wrapper.weight_axes), "factor"): codes.q * codes.scale}
    if not wrapper.weight_axes:
        return {**biases, "factor": tf.cast(factor, tf.float32)}
    ((name, axes),) = wrapper.weight_axes.items()
    quantizer = wrapper.weight_quantizers.get(name)
    kernel = tf.convert_to_tensor(getattr(wrapper.layer, name))
    if quantizer is not None and wrapper.fold == "per_channel":
        kernel = quantizer(kernel, QUANTIZED)
    if factor is not None:
        kernel = tf.cast(scale_channels(tf.cast(kernel, tf.float64), axes, factor), tf.float32)
    if quantizer is not None and wrapper.fold != "per_channel":
        kernel = quantizer(kernel, QUANTIZED)
    return {**biases, name: kernel}


def weight_scales(node: Node) -> list[float]:
    """Returns the scales of a node's per-tensor quantized weights."""
    layer, scales = node.call.layer, []
    if not isinstance(layer, ScheduledLayer) or getattr(layer, "batch_norm", None) is not None:
        return []
    for path, quantizer in layer.weight_quantizers.items():
        if quantizer.observer is None:
            limits = quantizer.limits(get_weight(layer.layer, path)).numpy()
            if limits.size == 1:
                scales.append(float(limits.item() / np.float32(2 ** (quantizer.spec.bits - 1) - 1)))
    return scales


def read_for_masks(call: Call) -> list[Value]:
    """Returns the values from which the masks of a call's inputs are computed."""
    read: dict[Value, None] = {}
    seen: set[Call] = set()
    pending = [value.producer for value in call.inputs if value.masked]
    while pending:
        producer = pending.pop()
        if producer is None or producer in seen:
            continue
        seen.add(producer)
        first = flatten_values(get_first_argument(producer))
        if _reads_inputs(producer.layer):
            read.update(dict.fromkeys(first))
        mask = producer.kwargs.get("mask")
        read.update(dict.fromkeys(flatten_values(mask)))
        pending += [value.producer for value in first if value.masked]
    return list(read)


def _reads_inputs(layer: Any) -> bool:
    """Whether a layer's mask depends on more than its inputs' masks."""
    while isinstance(layer, (QuantizeWrapper, QuantizeWeights)):
        layer = layer.layer
    method = type(layer).compute_mask
    return not isinstance(layer, Quantize) and method is not keras.layers.Layer.compute_mask
