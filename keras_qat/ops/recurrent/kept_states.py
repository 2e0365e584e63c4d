"""States that a recurrent layer keeps from one call to the next, as kernels read and write them.

They are the layer's own variables, with real numbers, which training and `reset_states` share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.lite.python import schema_py_generated as schema

from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.ops.emission import Emission


def kept(layer: Any, params: Sequence[QuantParams]) -> list[Any]:
    """The states of a layer as quantized values less their zero points, in int64.

    A layer that has just been trained has states between the quantized ones.
    """
    found = []
    for state, each in zip(layer.states, params, strict=True):
        q = tf.cast(tf.round(tf.cast(state, tf.float64) / each.scale), tf.int64)
        ends = (tf.cast(end - each.zero_point, tf.int64) for end in (each.lowest, each.highest))
        found.append(tf.clip_by_value(q, *ends))
    return found


def keep(layer: Any, params: Sequence[QuantParams], states: Sequence[Any], result: Any) -> Any:
    """A result, once the layer has kept such states."""
    done = [
        variable.assign(
            tf.cast(tf.cast(q, tf.float64) * each.scale, variable.dtype), read_value=False
        )
        for variable, q, each in zip(layer.states, states, params, strict=True)
    ]
    with tf.control_dependencies(done):
        return tf.identity(result)


class InFile:
    """A state as a variable of a file, of 16 bits, for operators that keep no state themselves.

    Args:
        e: writes the file.
        shape: the state's, all of it known.
        params: of the state, as operators read it.
    """

    def __init__(self, e: Emission, shape: tuple[int | None, ...], params: QuantParams) -> None:
        self.e, self.shape, self.params = e, shape, params
        column = int(np.prod(shape)), 1  # type: ignore[arg-type]
        wide = QuantParams(params.scale, 0, 16)
        self.variable = e.builder.variable(e.temporary("kept", column, wide))

    def read(self) -> int:
        """The state that the last run wrote: zeros at first."""
        column = self.e.temporary("before", self.e.shape(self.variable), self.params)
        self.e.add("QUANTIZE", [self.variable], [column])
        return self.e.reshaped(column, self.shape, "begun")

    def write(self, state: int) -> int:
        """Writes a state, and gives it back: by SVDF, with weights of 1 and a memory of one step.

        It is an operator that only reads its variable, and changes it where it is. One that gave it
        would be in front of the first, and LiteRT hands nothing of such a circle to XNNPACK. What
        it gives has to be read by others, or compilers would leave it out.
        """
        e, scale = self.e, self.params.scale
        column = e.reshaped(state, e.shape(self.variable), "column")
        unit = np.float32(1.0)
        given = [
            column,
            e.constant("feature", np.ones((1, 1), np.int8), QuantParams(unit, 0, 8)),
            e.constant("time", np.ones((1, 1), np.int16), QuantParams(unit, 0, 16)),
            e.constant("bias", np.zeros(1, np.int32), scales=scale),
            self.variable,
        ]
        written = e.temporary("written", e.shape(column), self.params)
        relu = schema.ActivationFunctionType.RELU  # Kernels ask for it, and compute none.
        e.add("SVDF", given, [written], rank=1, fusedActivationFunction=relu)
        return e.reshaped(written, self.shape, "ended")
