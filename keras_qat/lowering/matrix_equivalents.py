"""TensorFlow's operations on diagonals of matrices, written out for `equivalents`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.tf_operations import number
from keras_qat.lowering.written_out import require


def _band_part(input: Any, num_lower: Any, num_upper: Any, name: Any = None) -> Any:
    rows, columns = input.shape[-2:]
    require(None not in (rows, columns))
    return input * tf.linalg.band_part(np.ones((rows, columns), np.float32), num_lower, num_upper)


def _diagonal(x: Any) -> Any:
    """Returns square matrices, or columns as such, with zeros beside the diagonal."""
    require(x.shape[-2] is not None and x.shape[-1] in (1, x.shape[-2]))
    return x * np.eye(x.shape[-2], dtype=np.float32)


def _with_diagonal(input: Any, diagonal: Any, name: Any = None, k: Any = 0, **_: Any) -> Any:
    rows, columns = input.shape[-2:]
    require(rows is not None and rows == columns and number(k) == 0)
    on = np.eye(rows, dtype=np.float32)
    return input * (1.0 - on) + diagonal[..., None] * on


MATRICES: dict[str, Callable[..., Any]] = {
    "band_part": _band_part,
    "diag": lambda diagonal, name=None: _diagonal(diagonal[..., None]),
    "diag_part": lambda input, name=None: tf.reduce_sum(_diagonal(input), -1),
    "set_diag": _with_diagonal,
    "trace": lambda x, name=None: tf.reduce_sum(_diagonal(x), [-2, -1]),
}
"""Kind of an operation -> a function that takes its arguments."""
