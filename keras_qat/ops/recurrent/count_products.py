"""Counts the multiply-accumulates of recurrent layers."""

from __future__ import annotations

from keras_qat.graph.calls import Call, multiply_sizes


def count_steps(gates: int, call: Call) -> int | None:
    """Counts multiply-accumulates: each step multiplies its input and the state with all weights.

    Args:
        gates: number of gates.
        call: the call of a recurrent layer. A ConvLSTM does so at each position of an image.
    """
    layer, (_, steps, *sizes) = call.layer, call.inputs[0].shape
    units: int = layer.units if hasattr(layer, "units") else layer.filters
    weights = None if sizes[-1] is None else gates * units * (sizes[-1] + units)
    if not hasattr(layer, "kernel_size"):
        return multiply_sizes((steps, weights))
    positions = call.output.shape[2 if layer.return_sequences else 1 : -1]
    return multiply_sizes((steps, weights, *positions, *layer.kernel_size))
