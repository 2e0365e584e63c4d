"""Computes the float nodes of a resolved graph: the layers without an integer operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value, flatten_values, map_values
from keras_qat.graph.facts import reach
from keras_qat.graph.keras_masks import get_first_argument
from keras_qat.graph.precision import cast_constants, compute_in_float32
from keras_qat.integer_graph.float_layers import find_variant, rnn
from keras_qat.keras2.backend import AUTOGRAPH_AS_USUAL, keras, replace_rnn, swap_attributes
from keras_qat.keras2.layers_and_models import accepts_training
from keras_qat.ops.node import Node
from keras_qat.training.batch_norm import fold_modes
from keras_qat.training.batch_norm.factor_and_bias import compute_factor_and_bias, scale_channels
from keras_qat.training.fake_quantization.phase import QUANTIZED
from keras_qat.training.fake_quantization.weight_quantizer import get_weight, replace_weights
from keras_qat.training.layers import Quantize, QuantizeWeights, QuantizeWrapper
from keras_qat.training.scheduled_layer import ScheduledLayer

Wrapper = QuantizeWrapper | QuantizeWeights


def compute_in_float(
    node: Node, inputs: Iterable[tf.Tensor], for_file: bool = False
) -> list[tf.Tensor]:
    """Computes a float node at inference, with the current weights.

    Args:
        node: the node. If its layer is a `QuantizeWrapper`, the weights are folded.
        inputs: one tensor for each input of the call. Keras masks are attached to the tensors.
        for_file: True if TFLite's converter traces the node. Operations that the converter does not
            support are then replaced, and weights become constants.
    """
    call, remaining = node.call, iter(inputs)
    if node.op is not None and node.op.reads_only_weights:
        return [call.layer.value()]
    args, kwargs = cast_constants((call.args, call.kwargs))
    if for_file:  # Otherwise TensorFlow would number the names of constants.
        args, kwargs = tf.nest.map_structure(_to_array, (args, kwargs))
    args, kwargs = map_values(lambda value: next(remaining), (args, kwargs))
    with compute_in_float32(call.layer), AUTOGRAPH_AS_USUAL:
        outputs = tf.nest.flatten(_compute(call.layer, args, kwargs, for_file))
    return [output for output in outputs if output is not None]


def _to_array(leaf: object) -> object:
    return leaf.numpy() if isinstance(leaf, tf.__internal__.EagerTensor) else leaf


def _compute(
    layer: keras.layers.Layer, args: Sequence[Any], kwargs: dict[str, Any], for_file: bool
) -> Any:
    if not isinstance(layer, (QuantizeWrapper, QuantizeWeights)):
        return _call_layer(layer, args, kwargs, for_file)
    if isinstance(layer, QuantizeWrapper):
        if not any("." in path for path in layer.weight_axes):
            return _call_folded(layer, args[0], for_file)
        kwargs = {}  # A cell of a recurrent layer.
    with replace_weights(layer.layer, _freeze(lambda: _fake_quantize(layer), for_file)):
        return _call_layer(layer.layer, args, kwargs, for_file)


def _call_layer(
    layer: keras.layers.Layer, args: Sequence[Any], kwargs: dict[str, Any], for_file: bool
) -> Any:
    kwargs = {name: value for name, value in kwargs.items() if name != "training"}
    if accepts_training(layer):
        kwargs["training"] = False
    if not for_file:
        return layer(*args, **kwargs)
    with replace_rnn(rnn, layer):
        variant = find_variant(layer)
        return layer(*args, **kwargs) if variant is None else variant(layer, *args, **kwargs)


def _freeze(compute: Callable[[], dict[str, tf.Tensor]], for_file: bool) -> dict[str, Any]:
    """Return the results of `compute`. If `for_file`, convert them to constants."""
    if not for_file:
        return compute()
    with tf.init_scope():
        arrays = {name: np.asarray(weight) for name, weight in compute().items()}
    return {name: tf.constant(weight) for name, weight in arrays.items()}


def _fake_quantize(wrapper: Wrapper) -> dict[str, tf.Tensor]:
    return {
        path: quantizer(get_weight(wrapper.layer, path), QUANTIZED)
        for path, quantizer in wrapper.weight_quantizers.items()
    }


def _call_folded(wrapper: QuantizeWrapper, x: tf.Tensor, for_file: bool) -> Any:
    """Compute the layer, BatchNormalization and activation of a wrapper."""
    layer, name = wrapper.layer, next(iter(wrapper.weight_axes), "")
    weights = _freeze(lambda: _fold(wrapper), for_file)
    if not name:
        y = x * weights["factor"] + weights["bias"]
    else:
        if "bias" in weights and hasattr(layer, "use_bias"):
            weights["use_bias"] = True
        with swap_attributes(layer, **weights):
            y = layer.call(x)
    if wrapper.activation is None:
        return y
    return _call_layer(wrapper.activation, (y,), {}, for_file)


def _fold(wrapper: QuantizeWrapper) -> dict[str, tf.Tensor]:
    """Fold BatchNormalization into a wrapper's weights, and fake-quantize the weights.

    Returns a dict `{attribute of the layer: weight}`. A kernel with one scale per channel is
    quantized, then folded. Other kernels are folded, then quantized.
    """
    factor, bias = compute_factor_and_bias(wrapper, tf.float64)
    quantized = None
    if wrapper.fold == "per_tensor" and set(wrapper.weight_quantizers) == set(wrapper.weight_axes):
        quantized = fold_modes.quantize_folded(wrapper)
        bias = None if bias is None else fold_modes.apply_gains(wrapper, bias, quantized.gains)
    biases = {} if bias is None else {"bias": tf.cast(bias, tf.float32)}
    if quantized is not None:
        return {**biases, next(iter(wrapper.weight_axes), "factor"): quantized.q * quantized.scale}
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


def get_weight_scales(node: Node) -> list[float]:
    """Returns the scales of a float node's weights. Omits weights with one scale per channel."""
    layer = node.call.layer
    if not isinstance(layer, ScheduledLayer) or getattr(layer, "batch_norm", None) is not None:
        return []
    quantizers = [(p, q) for p, q in layer.weight_quantizers.items() if q.observer is None]
    limits = [(q.limits(get_weight(layer.layer, p)).numpy(), q.spec.bits) for p, q in quantizers]
    return [
        float(limit.item() / np.float32(2 ** (bits - 1) - 1))
        for limit, bits in limits
        if limit.size == 1
    ]


def find_mask_sources(call: Call) -> list[Value]:
    """Returns the values from which the Keras masks of a call's inputs are computed.

    For example, an Embedding computes its mask from token ids. Files contain no Keras masks. A
    float node in a file computes its masks from these values.
    """

    def find_producers(values: Iterable[Value]) -> list[Call]:
        return [value.producer for value in values if value.masked and value.producer][::-1]

    sources: dict[Value, None] = {}
    for producer in reach(
        find_producers(call.inputs),
        lambda producer: find_producers(flatten_values(get_first_argument(producer))),
    ):
        if _masks_depend_on_values(producer.layer):
            sources.update(dict.fromkeys(flatten_values(get_first_argument(producer))))
        sources.update(dict.fromkeys(flatten_values(producer.kwargs.get("mask"))))
    return list(sources)


def _masks_depend_on_values(layer: keras.layers.Layer) -> bool:
    """Return True if a layer's class defines `compute_mask`, like Embedding and Masking."""
    while isinstance(layer, (QuantizeWrapper, QuantizeWeights)):
        layer = layer.layer
    method = type(layer).compute_mask
    return not isinstance(layer, Quantize) and method is not keras.layers.Layer.compute_mask
