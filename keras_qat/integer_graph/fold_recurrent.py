"""Quantizes the weights of recurrent layers for exported files.

The weights of an LSTM operator have one scale per gate. Other recurrent layers are unrolled, and
the weights have one scale per channel or per tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.integer_graph.fold_weights import Ends, copy_for_calls, fit_bias, make_quantize
from keras_qat.ops.recurrent.lstm import HIDDEN
from keras_qat.ops.recurrent.step_math import find_weight_parts
from keras_qat.ops.weights import Weights
from keras_qat.training.fake_quantization.activation_quantizer import ActivationQuantizer
from keras_qat.training.fake_quantization.weight_quantizer import get_weight
from keras_qat.training.layers import QuantizeWrapper
from keras_qat.training.recurrent import get_biases

GATES = 4
"""Number of gates of an LSTM. Keras and TFLite order them as input, forget, cell, output."""


def fold_recurrent_calls(
    wrapper: QuantizeWrapper,
    ends: list[Ends],
    in_graph: bool,
    get_params: Callable[[ActivationQuantizer], QuantParams],
) -> list[Weights]:
    """Quantizes the weights of a recurrent layer. Returns one `Weights` for each call.

    The arguments are as in `fold_calls`. `get_params` is a function that returns the quantization
    parameters of an `ActivationQuantizer`.
    """
    inner = {name: get_params(quantizer) for name, quantizer in wrapper.inner.items()}
    if inner:
        return _fold_unrolled(wrapper, ends, in_graph, inner)
    return _fold_lstm(wrapper, ends, in_graph)


def _fold_lstm(wrapper: QuantizeWrapper, ends: list[Ends], in_graph: bool) -> list[Weights]:
    """Quantize the weights of an LSTM. TFLite requires a bias, so a missing bias becomes zeros."""
    inputs = [params.as_tensors().scale for params, _ in ends]
    wide = ends[0][0].bits == 16
    bias = wrapper.layer.cell.bias
    units = wrapper.layer.units
    bias = tf.zeros([GATES * units], tf.float64) if bias is None else tf.cast(bias, tf.float64)
    largest = tf.reduce_max(tf.abs(tf.reshape(bias, [GATES, units])), 1)
    kernel, recurrent = wrapper.weight_axes
    bits = wrapper.weight_spec.bits
    q, scale = _quantize_gates(wrapper, recurrent, None, inputs[0], wide)
    weights = Weights(recurrent, q, scale, bits=bits)
    (fed_back,) = copy_for_calls(weights, None, inputs[:1], None, in_graph)
    q, scale = _quantize_gates(wrapper, kernel, largest, tf.reduce_min(tf.stack(inputs)), wide)
    weights = Weights(kernel, q, scale, bits=bits, gates=GATES, recurrent=fed_back)
    return copy_for_calls(weights, bias, inputs, None, in_graph)


def _fold_unrolled(
    wrapper: QuantizeWrapper, ends: list[Ends], in_graph: bool, inner: dict[str, QuantParams]
) -> list[Weights]:
    """Quantize the weights of a recurrent layer that has no LSTM operator."""
    layer, bits = wrapper.layer, wrapper.weight_spec.bits
    scales = {name: params.as_tensors().scale for name, params in inner.items()}
    scales.setdefault("hidden", HIDDEN.params(8).as_tensors().scale)
    input_bias, recurrent_bias = get_biases(layer, tf.float64)

    def get_output_scales(prefix: str) -> tf.Tensor:
        """Return the output scale for each column of a weight. `prefix` is "input" or "state"."""
        blocks = {
            block.start: tf.fill([1, block.stop - block.start], scales[f"{prefix}_{name}"])
            for name, part in find_weight_parts(layer).items()
            for block in part.blocks
        }
        return tf.concat([blocks[start] for start in sorted(blocks)], 1)

    def fold(
        path: str,
        bias: tf.Tensor | None,
        inputs: list[tf.Tensor],
        output: tf.Tensor,
        **options: Any,
    ) -> list[Weights]:
        kernel = get_weight(layer, path)
        shape = [-1, kernel.shape[-1] if wrapper.weight_spec.per_channel else 1]
        limits = tf.reshape(wrapper.weight_quantizers[path].limits(kernel), [1, -1])
        columns = tf.reshape(kernel, shape)
        q, scale = make_quantize(bits, True)(columns, tf.ones([1], tf.float64), limits)
        q, scale = tf.reshape(q, kernel.shape), tf.reshape(scale, [1, -1])
        q, scale = fit_bias(q, scale, bias, tf.reduce_min(tf.stack(inputs)), wide=False)
        finest = output if scale.shape[1] > 1 else tf.reduce_min(output)
        weights = Weights(path, q, scale, bits=bits, **options)
        return copy_for_calls(weights, bias, inputs, [finest] * len(inputs), in_graph)

    kernel, recurrent = wrapper.weight_axes
    (fed_back,) = fold(recurrent, recurrent_bias, [scales["hidden"]], get_output_scales("state"))
    inputs = [params.as_tensors().scale for params, _ in ends]
    return fold(
        kernel, input_bias, inputs, get_output_scales("input"), recurrent=fed_back, inner=inner
    )


def _quantize_gates(
    wrapper: QuantizeWrapper,
    path: str,
    largest_bias: tf.Tensor | None,
    input_scale: tf.Tensor,
    wide: bool,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Quantize an LSTM's weight with one scale per gate. Return values and a scale per column."""
    kernel = get_weight(wrapper.layer, path)
    rows, columns = kernel.shape
    units = columns // GATES
    gates = tf.reshape(tf.transpose(tf.reshape(kernel, [rows, GATES, units]), [0, 2, 1]), [-1, 4])
    q, scale = make_quantize(wrapper.weight_spec.bits)(gates, tf.ones([1], tf.float64))
    q, scale = fit_bias(q, scale, largest_bias, input_scale, wide)
    q = tf.reshape(tf.transpose(tf.reshape(q, [rows, units, GATES]), [0, 2, 1]), [rows, columns])
    return q, tf.reshape(tf.repeat(scale, units), [1, columns])
