"""The list of all operators. Where several rows list a layer, the first that accepts it has it."""

from __future__ import annotations

from keras_qat.ops import elementwise
from keras_qat.ops.op import Op

__all__ = ["ROWS"]

ROWS: list[Op] = [
    elementwise.ADD,
    elementwise.SUBTRACT,
]
