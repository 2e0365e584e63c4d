"""LSTM in training, with its states quantized at each step."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_qat.arithmetic import fake_quant
from keras_qat.keras2 import backend
from keras_qat.ops.recurrent.lstm import CELL, HIDDEN
from keras_qat.training.layers.recurrent.states import keep_states
from keras_qat.training.layers.scheduled_layer import Phase
from keras_qat.training.layers.weight_quantizer import weights_replaced


def lstm_quantized(layer: Any, x: Any, weights: dict[str, Any], phase: Phase, bits: int = 8) -> Any:
    """Computes an LSTM with given weights, and fake-quantizes its states from step to step.

    Args:
        layer: the layer, without masks and initial states.
        x: its input.
        weights: its weights, by their paths.
        phase: the phase of the call.
        bits: bits of the hidden state: 16 if activations have 16, else 8.
    """
    limits = HIDDEN.wide if bits == 16 else (HIDDEN.minimum, HIDDEN.maximum)
    highest = float(CELL.highest * CELL.scale)

    def step(x: Any, states: Any) -> tuple[Any, list[Any]]:
        _, (hidden, cell) = layer.cell(x, states, training=phase.training)
        low, high = map(tf.constant, limits)  # Here, as tf2onnx wants constants in the loop.
        hidden = fake_quant.fake_quantize_if(phase.quantizing, hidden, low, high, bits)
        # The cell has 16 bits, so finely that only its limits matter.
        cell = tf.clip_by_value(cell, -highest, highest)
        return hidden, [hidden, cell]

    backend.reset_dropout_mask(layer)
    with weights_replaced(layer, weights):
        last, outputs, states = backend.keras.backend.rnn(
            step,
            x,
            layer.states if layer.stateful else layer.get_initial_state(x),
            go_backwards=layer.go_backwards,
            unroll=layer.unroll,
            input_length=x.shape[1],
            return_all_outputs=layer.return_sequences,
        )
    if layer.stateful:
        keep_states(layer, states)
    return outputs if layer.return_sequences else last
