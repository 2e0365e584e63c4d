"""Unrolls a ConvLSTM with other activations than the row of those with tanh and sigmoid takes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call
from keras_qat.helper_layers.operations import FlattenTime, RestoreTime
from keras_qat.keras2.backend import keras, layers
from keras_qat.lowering.recurrent import MOST_STEPS
from keras_qat.ops.registry import match

CONVOLUTIONS = {layers.ConvLSTM1D: layers.Conv1D, layers.ConvLSTM2D: layers.Conv2D}

_made: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()
"""ConvLSTM -> its convolutions of inputs and of states, the same in all of its calls."""


def unroll_conv_lstm(call: Call) -> Callable[..., Any] | None:
    """Return a function that computes a ConvLSTM step by step; None if a row computes it."""
    layer, x = call.layer, call.inputs[0]
    is_plain = len(call.inputs) == 1 and not (layer.stateful or layer.return_state)
    is_plain &= not x.masked and call.kwargs.keys() <= {"mask"} and not call.kwargs.get("mask")
    is_plain &= layer.data_format == "channels_last" and not (
        layer.dropout or layer.recurrent_dropout
    )
    is_known = None not in x.shape[1:] and (x.shape[1] or 0) <= MOST_STEPS
    is_plain &= layer.activity_regularizer is None and layer.compute_dtype == "float32"
    if not is_plain or not is_known or match(call).op is not None:
        return None
    return lambda inputs, **_: _steps(layer, inputs)


def _steps(layer: keras.layers.Layer, x: tf.Tensor) -> tf.Tensor:
    of_inputs, of_states = _convolutions(layer)
    steps = tf.unstack(RestoreTime(x.shape[1])(of_inputs(FlattenTime()(x))), axis=1)
    gate, activation, outputs = layer.recurrent_activation, layer.activation, []
    hidden = carry = None
    for total in reversed(steps) if layer.go_backwards else steps:
        total = total if hidden is None else total + of_states(hidden)
        takes, keeps, values, gives = tf.split(total, 4, axis=-1)
        added = gate(takes) * activation(values)
        carry = added if carry is None else gate(keeps) * carry + added
        hidden = gate(gives) * activation(carry)
        outputs.append(hidden)
    return tf.stack(outputs, 1) if layer.return_sequences else hidden


def _convolutions(layer: keras.layers.Layer) -> tuple[Any, Any]:
    """Return layers with the weights of a ConvLSTM's cell."""
    if layer not in _made:
        convolution, cell = CONVOLUTIONS[type(layer)], layer.cell
        of_inputs = convolution(
            4 * layer.filters,
            layer.kernel_size,
            layer.strides,
            layer.padding,
            dilation_rate=layer.dilation_rate,
            use_bias=layer.use_bias,
            kernel_regularizer=layer.kernel_regularizer,
            kernel_constraint=layer.kernel_constraint,
            bias_regularizer=layer.bias_regularizer,
            bias_constraint=layer.bias_constraint,
            trainable=layer.trainable,
            name="inputs",
        )
        of_states = convolution(
            4 * layer.filters,
            layer.kernel_size,
            padding="same",
            use_bias=False,
            kernel_regularizer=layer.recurrent_regularizer,
            kernel_constraint=layer.recurrent_constraint,
            trainable=layer.trainable,
            name="states",
        )
        of_inputs.kernel, of_states.kernel = cell.kernel, cell.recurrent_kernel
        of_inputs.bias, of_states.bias = cell.bias, None
        of_inputs.built = of_states.built = True
        _made[layer] = of_inputs, of_states
    return _made[layer]
