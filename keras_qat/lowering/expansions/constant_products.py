"""Expands linear operations to products with constant matrices.

A cumulative sum is a product with a triangle of ones, and a resize is one with the weights of the
old pixels in the new ones. `constant_weights.py` makes layers of such products.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.operations import get_argument, read_array
from keras_qat.lowering.expand_call import (
    Expansion,
    get_call,
    is_tensor,
    require,
    unwrap,
)

_UNIT = "1"
"""Names the axis of size 1 that makes a matrix of a vector."""


def _multiply_along(x: tf.Tensor, axis: int, matrix: np.ndarray, name: str = "") -> tf.Tensor:
    """Multiply by a matrix, [size of the axis, size of the result], along one axis."""
    matrix = matrix.astype(np.float32)
    last = len(x.shape) - 1
    if axis % len(x.shape) == last:
        return tf.matmul(x, matrix, name=name or None)
    order = [other for other in range(last + 1) if other != axis % len(x.shape)]
    order.append(axis % len(x.shape))
    x = tf.transpose(x, order, name=f"{name}_turned".lstrip("_"))
    product = tf.matmul(x, matrix, name=f"{name}_product".lstrip("_"))
    return tf.transpose(product, np.argsort(order).tolist(), name=name or None)


def expand_product(
    a: tf.Tensor,
    b: tf.Tensor,
    transpose_a: bool = False,
    transpose_b: bool = False,
    adjoint_a: bool = False,
    adjoint_b: bool = False,
    **options: object,
) -> tf.Tensor:
    """Multiply a constant matrix by a tensor, on its right-hand side."""
    matrix = unwrap(read_array(a))
    require(matrix.ndim == 2 and is_tensor(b) and len(b.shape) > 2)
    require(not transpose_b and not adjoint_b)
    return _multiply_along(b, -2, matrix if transpose_a or adjoint_a else matrix.T)


def expand_einsum(equation: str, *inputs: Any, **options: object) -> tf.Tensor:
    """Multiply a tensor by a constant matrix or vector that share one axis."""
    terms, output = equation.replace(" ", "").split("->")
    require(len(inputs) == 2 and "..." not in equation and sum(map(is_tensor, inputs)) == 1)
    position = 0 if is_tensor(inputs[0]) else 1
    x, matrix = inputs[position], unwrap(read_array(inputs[1 - position]))
    term, axes = terms.split(",")[position], terms.split(",")[1 - position]
    is_vector = matrix.ndim == len(axes) == 1
    if is_vector:
        kept, axes, matrix = output, axes + _UNIT, matrix[:, None]
        output = term.replace(axes[0], _UNIT)
        require(output.replace(_UNIT, "") == kept and len(kept) > 1)
    summed = [axis for axis in axes if axis in term and axis not in output]
    added = [axis for axis in axes if axis not in term and axis in output]
    require(matrix.ndim == len(axes) == 2 and len(summed) == len(added) == 1)
    axis, result = term.index(summed[0]), term.replace(summed[0], added[0])
    require(axis > 0 and len(set(term)) == len(term) and sorted(result) == sorted(output))
    matrix = matrix if axes == summed[0] + added[0] else matrix.T
    if is_vector:
        return tf.squeeze(_multiply_along(x, axis, matrix, "multiplied"), axis)
    if result == output:
        return _multiply_along(x, axis, matrix)
    order = [result.index(letter) for letter in output]
    return tf.transpose(_multiply_along(x, axis, matrix, "multiplied"), order)


def _cumulative_sum(
    x: tf.Tensor, axis: Any = 0, exclusive: bool = False, reverse: bool = False
) -> tf.Tensor:
    require(isinstance(axis, int) and axis % len(x.shape) and x.shape[axis])
    triangle = np.tri(x.shape[axis], k=-1 if exclusive else 0)
    return _multiply_along(x, axis, triangle if reverse else triangle.T)


def expand_resize(images: tf.Tensor, size: Any, **options: object) -> tf.Tensor:
    """Resize by two products: with a matrix along rows, and one along columns.

    The matrices are what the operation makes of images with one row or column of ones.
    """
    call = get_call(images)
    require(len(images.shape) == 4 and images.dtype.is_floating)
    require(get_argument(call, "preserve_aspect_ratio") is not True)
    before, after = images.shape[1:3], call.output.shape[1:3]
    require(None not in (*before, *after))

    def find_weights(axis: int) -> np.ndarray:
        ones = np.eye(before[axis], dtype=np.float32)[None, :, None, :]
        ones = ones if axis == 0 else ones.transpose(0, 2, 1, 3)
        target = (after[0], 1) if axis == 0 else (1, after[1])
        with tf.init_scope():
            resized = call.layer.function(ones, target, **options)
        return np.asarray(resized).reshape(-1, before[axis]).T

    rows = _multiply_along(images, 1, find_weights(0), "rows")
    return _multiply_along(rows, 2, find_weights(1))


OF_FLOATS: dict[str, Expansion] = {"cumsum": _cumulative_sum}
