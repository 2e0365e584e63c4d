"""The weights of recurrent layers as integer kernels hold them: one scale for each gate."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from keras_qat.layers.weights import weight_at
from keras_qat.resolved import fold
from keras_qat.resolved.fold import Ends, fitting, quantized
from keras_qat.resolved.weights import Weights

__all__ = ["weights_of_calls"]

GATES = 4
"""Of an LSTM: input, forget, cell, output, as Keras and TFLite order them."""


def weights_of_calls(wrapper: Any, ends: list[Ends], in_graph: bool) -> list[Weights]:
    """As `fold.weights_of_calls`, also of an LSTM, which always has a bias."""
    if len(wrapper.weight_axes) < 2:
        return fold.weights_of_calls(wrapper, ends, in_graph)
    inputs = [each.as_tensors().scale for each, _ in ends]
    bias = wrapper.layer.cell.bias
    units = wrapper.layer.units
    bias = tf.zeros([GATES * units], tf.float64) if bias is None else tf.cast(bias, tf.float64)
    largest = tf.reduce_max(tf.abs(tf.reshape(bias, [GATES, units])), 1)
    kernel, recurrent = wrapper.weight_axes
    bits = wrapper.weight_spec.bits
    make = functools.partial(_quantized, wrapper, in_graph=in_graph)
    fed_back = Weights(recurrent, *make(recurrent, None, inputs[0]), None, bits)
    q, scale = make(kernel, largest, tf.reduce_min(tf.stack(inputs)))
    found = []
    for each in inputs:
        whole = tf.round(bias / tf.reshape(each * scale, [-1]))
        whole = whole if in_graph else whole.numpy()
        found.append(Weights(kernel, q, scale, whole, bits, recurrent=fed_back))
    return found


def _quantized(
    wrapper: Any, path: str, largest_bias: Any, input_scale: Any, in_graph: bool
) -> tuple[Any, Any]:
    """Quantized values and scales of a weight, the latter for each of its columns."""
    kernel = weight_at(wrapper.layer, path)
    rows, columns = kernel.shape
    units = columns // GATES
    gates = tf.reshape(tf.transpose(tf.reshape(kernel, [rows, GATES, units]), [0, 2, 1]), [-1, 4])
    q, scale = quantized(wrapper.weight_spec.bits)(gates, tf.ones([1], tf.float64))
    q, scale = fitting(q, scale, largest_bias, input_scale, wide=False)
    q = tf.reshape(tf.transpose(tf.reshape(q, [rows, units, GATES]), [0, 2, 1]), [rows, columns])
    scale = tf.reshape(tf.repeat(scale, units), [1, columns])
    return (q, scale) if in_graph else (tf.cast(q, tf.int8).numpy(), scale.numpy())
