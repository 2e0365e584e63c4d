"""Operators on whole numbers of 32 bits, which kernels neither scale nor round: parts of others.

They are as fast as in float in all runtimes, where kernels of 16 bits are slow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic.plain_operations import product
from keras_qat.ops.op import Op


def _row(code: str, function: Callable[[Any, Any], Any]) -> Op:
    return Op(code.lower(), lambda a: function(*a.q), lambda e: e.add(code))


SUM = _row("ADD", lambda x, y: x + y)
PRODUCT = _row("MUL", product)
LARGER = _row("MAXIMUM", tf.maximum)
SMALLER = _row("MINIMUM", tf.minimum)
