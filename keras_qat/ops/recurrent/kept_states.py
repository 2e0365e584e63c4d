"""Reads and writes the states that a stateful layer keeps from one call to the next.

The states are float variables of the layer. Training and `reset_states` use them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.ops.emission import Emission


def read_states(layer: Any, params: Sequence[QuantParams]) -> list[Any]:
    """Quantizes a layer's states. Returns values relative to the zero points, in int64."""
    quantized = []
    for state, own in zip(layer.states, params, strict=True):
        q = tf.cast(tf.round(tf.cast(state, tf.float64) / own.scale), tf.int64)
        limits = (tf.cast(end - own.zero_point, tf.int64) for end in (own.lowest, own.highest))
        quantized.append(tf.clip_by_value(q, *limits))
    return quantized


def store_states(
    layer: Any, params: Sequence[QuantParams], states: Sequence[Any], result: Any
) -> Any:
    """Converts quantized states to float, and assigns them to the layer's variables.

    Returns `result` with the assignments as control dependencies.
    """
    done = [
        variable.assign(
            tf.cast(tf.cast(q, tf.float64) * own.scale, variable.dtype), read_value=False
        )
        for variable, q, own in zip(layer.states, states, params, strict=True)
    ]
    with tf.control_dependencies(done):
        return tf.identity(result)


class StateVariable:
    """A 16-bit variable in a file, which keeps the state of an unrolled layer between runs."""

    def __init__(self, e: Emission, shape: tuple[int | None, ...], params: QuantParams) -> None:
        self.e, self.shape, self.params = e, shape, params
        column = int(np.prod(shape)), 1  # type: ignore[arg-type]
        wide = QuantParams(params.scale, 0, 16)
        self.variable = e.builder.variable(e.temporary("kept", column, wide))

    def read(self) -> int:
        """Adds operators that read the variable. It is 0 in the first run."""
        column = self.e.temporary("before", self.e.shape(self.variable), self.params)
        self.e.add("QUANTIZE", [self.variable], [column])
        return self.e.make_reshaped(column, self.shape, "begun")

    def write(self, state: int) -> int:
        """Adds an SVDF that writes `state` to the variable. Returns the SVDF's output.

        The SVDF has weights of 1 and a memory of one step. This memory is the variable. It is an
        input of the SVDF. If an operator had the variable as output, LiteRT would see a cycle, and
        would not use XNNPACK. Compilers remove the SVDF if nothing reads its output.
        """
        e, scale = self.e, self.params.scale
        column = e.make_reshaped(state, e.shape(self.variable), "column")
        unit = np.float32(1.0)
        inputs = [
            column,
            e.constant("feature", np.ones((1, 1), np.int8), QuantParams(unit, 0, 8)),
            e.constant("time", np.ones((1, 1), np.int16), QuantParams(unit, 0, 16)),
            e.constant("bias", np.zeros(1, np.int32), scales=scale),
            self.variable,
        ]
        written = e.temporary("written", e.shape(column), self.params)
        relu = schema.ActivationFunctionType.RELU  # Kernels require a ReLU, but do not compute it.
        e.add("SVDF", inputs, [written], rank=1, fusedActivationFunction=relu)
        return e.make_reshaped(written, self.shape, "ended")
