"""The list of all operators. Where several rows list a layer, the first that accepts it has it."""

from __future__ import annotations

from keras_qat.ops import elementwise
from keras_qat.ops.activations import ACTIVATIONS
from keras_qat.ops.lookup import LOOKUPS
from keras_qat.ops.normalize import UNIT_NORM
from keras_qat.ops.op import Op
from keras_qat.ops.softmax import SOFTMAX

__all__ = ["ROWS"]

ROWS: list[Op] = [
    elementwise.ADD,
    elementwise.SUBTRACT,
    elementwise.MULTIPLY,
    elementwise.MAXIMUM,
    elementwise.MINIMUM,
    *ACTIVATIONS,
    *LOOKUPS,
    SOFTMAX,
    UNIT_NORM,
]
