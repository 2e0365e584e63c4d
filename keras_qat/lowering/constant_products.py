"""Turns products with constants, and what is one, into layers that do not train.

Sums so far and images of other sizes are such products: with triangles of ones, and with the
weights of the old pixels in the new ones. Rows of a constant table are an Embedding's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Value
from keras_qat.graph.tf_operations import array, operands
from keras_qat.helper_layers.operations import WeightTensor
from keras_qat.keras2.backend import layers
from keras_qat.lowering.builder import LoweringContext, PartsBuilder
from keras_qat.ops.slicing import GATHER_ARGUMENTS

_FLAGS = ("transpose_a", "transpose_b", "adjoint_a", "adjoint_b")


def multiply_along(
    parts: PartsBuilder, x: Value, axis: int, matrix: np.ndarray, name: str, output: Any = None
) -> Value:
    """Adds the product of a tensor and a constant matrix along one axis.

    Args:
        parts: takes the calls.
        x: the tensor.
        axis: the axis that is summed over, and that holds the result.
        matrix: the constant, [size of the axis, size of the result].
        name: the name of the parts; "" for the name of the call's layer.
        output: the output, by default a new tensor.
    """
    rank, axis = len(x.shape), axis % len(x.shape)
    order = [other for other in range(rank) if other != axis] + [axis]
    back = [order.index(other) for other in range(rank)]
    operation = type(parts.call.layer)
    at_end = axis == rank - 1
    if not at_end:
        turned = parts.new(f"{name}_turned".lstrip("_"), operation, tf.transpose)
        x = parts.add(turned, x, order, shape=[x.shape[other] for other in order])
    dense = parts.new(
        name if at_end else f"{name}_product".lstrip("_"),
        layers.Dense,
        matrix.shape[1],
        use_bias=False,
        trainable=False,
        weights=[tf.Variable(matrix.astype(np.float32), trainable=False)],
    )
    shape = (*x.shape[:-1], matrix.shape[1])
    if at_end:
        return parts.add(dense, x, shape=shape, output=output)
    product = parts.add(dense, x, shape=shape)
    shape = tuple(product.shape[other] for other in back)
    turn_back = parts.new(name, operation, tf.transpose)
    return parts.add(turn_back, product, back, shape=shape, output=output)


def split_product(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers tf.matmul of a tensor and a constant matrix, on either side."""
    a, b, *flags = operands(call, "a", "b", *_FLAGS)
    turned = [bool(flags[side] or flags[side + 2]) for side in (0, 1)]
    x, constant, axis = (a, b, -1) if isinstance(a, Value) else (b, a, -2)
    matrix = array(constant)
    if not isinstance(x, Value) or not x.is_float or matrix is None or matrix.ndim != 2:
        return []
    if axis == -1:
        matrix, axis = matrix.T if turned[1] else matrix, -2 if turned[0] else -1
    else:
        matrix, axis = matrix if turned[0] else matrix.T, -1 if turned[1] else -2
    is_plain = axis == (-1 if x is a else -2)
    if not is_plain or len(x.shape) + axis < 1 or x.shape[axis] != matrix.shape[0]:
        return []
    parts = PartsBuilder(call, context)
    multiply_along(parts, x, axis, matrix, "", call.output)
    return parts.calls


def with_constant_weight(call: Call, context: LoweringContext) -> list[Call]:
    """Makes a tensor of weights that do not train of a constant with several matrices.

    A product of a tensor and such a constant, one matrix for each entry of other axes, is then one
    of two tensors.
    """
    arguments = [*call.args, *call.kwargs.values()]
    constants = [leaf for leaf in arguments if getattr(array(leaf), "ndim", 0) > 2]
    if len(call.inputs) != 1 or not call.inputs[0].is_float or len(constants) != 1:
        return []
    matrices = np.asarray(constants[0], np.float32)
    parts, weights = PartsBuilder(call, context), [tf.Variable(matrices, trainable=False)]
    options = {"frozen": [0], "trainable": False, "weights": weights}
    layer = parts.new("constant", WeightTensor, [matrices.shape], **options)
    tensor = parts.add(layer, call.inputs[0], shape=matrices.shape)
    args = [tensor if leaf is constants[0] else leaf for leaf in call.args]
    kwargs = {n: tensor if leaf is constants[0] else leaf for n, leaf in call.kwargs.items()}
    return parts.end(call.layer, *args, kwargs=kwargs)


_UNIT = "1"
"""Names the axis of size 1 that a vector gets to be a matrix."""


def split_constant_einsum(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers tf.einsum of a tensor and a constant matrix, or vector, that share one axis."""
    equation, *tensors = tf.nest.flatten((call.args, call.kwargs), expand_composites=False)
    values = [tensor for tensor in tensors if isinstance(tensor, Value)]
    if len(values) != 1 or not isinstance(equation, str) or equation.count("->") != 1:
        return []
    arguments = [*call.args[1:], *call.kwargs.values()]
    terms, output = equation.replace(" ", "").split("->")
    if len(arguments) != 2 or terms.count(",") != 1 or "..." in equation:
        return []
    position = 0 if arguments[0] is values[0] else 1
    matrix = array(arguments[1 - position])
    x, term, of_matrix = values[0], terms.split(",")[position], terms.split(",")[1 - position]
    is_vector = False
    if matrix is not None and matrix.ndim == 1 and len(of_matrix) == 1:
        is_vector = True
        x_axes, matrix, of_matrix = output, matrix[:, None], of_matrix + _UNIT
        output = term.replace(of_matrix[0], _UNIT)
        if output.replace(_UNIT, "") != x_axes or len(x_axes) < 2:
            return []
    summed = [axis for axis in of_matrix if axis in term and axis not in output]
    added = [axis for axis in of_matrix if axis not in term and axis in output]
    if matrix is None or matrix.ndim != 2 or len(of_matrix) != 2 or not x.is_float:
        return []
    if len(summed) != 1 or len(added) != 1 or term.index(summed[0]) == 0:
        return []
    if len(set(term)) < len(term) or sorted(term.replace(summed[0], added[0])) != sorted(output):
        return []
    matrix = matrix if of_matrix == summed[0] + added[0] else matrix.T
    parts, result = PartsBuilder(call, context), term.replace(summed[0], added[0])
    axis = term.index(summed[0])
    if is_vector:
        product = multiply_along(parts, x, axis, matrix, "multiplied")
        return parts.end(parts.new("", type(call.layer), tf.squeeze), product, axis)
    if result == output:
        multiply_along(parts, x, axis, matrix, "", call.output)
        return parts.calls
    product = multiply_along(parts, x, axis, matrix, "multiplied")
    order = [result.index(name) for name in output]
    return parts.end(parts.new("", type(call.layer), tf.transpose), product, order)


def split_cumulative_sum(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers tf.cumsum along an axis of a known size to a product with a triangle of ones."""
    x, axis, exclusive, reverse = operands(call, "x", "axis", "exclusive", "reverse")
    axis = 0 if axis is None else axis
    if not isinstance(axis, int) or not x.is_float or not axis % len(x.shape):
        return []
    size = x.shape[axis]
    if size is None:
        return []
    triangle = np.tri(size, k=-1 if exclusive else 0)
    parts = PartsBuilder(call, context)
    multiply_along(parts, x, axis, triangle if reverse else triangle.T, "", call.output)
    return parts.calls


def split_linear_resize(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers any resize to two products: with a matrix along rows, and one along columns.

    The matrices are what the operation itself makes of one row, or column, after the other.
    """
    x, keeps_ratio = operands(call, "images", "preserve_aspect_ratio")
    before, after = (tuple(value.shape[1:3]) for value in (x, call.output))
    if len(x.shape) != 4 or not x.is_float or None in (*before, *after) or keeps_ratio is True:
        return []
    options = {
        name: argument for name, argument in call.kwargs.items() if name not in ("images", "size")
    }

    def weights(axis: int) -> np.ndarray:
        size: Any = before[axis]
        target = (after[0], 1) if axis == 0 else (1, after[1])
        image = np.eye(size, dtype=np.float32)[None, :, None, :]
        image = image if axis == 0 else image.transpose(0, 2, 1, 3)
        resized = call.layer.function(image, target, *call.args[2:], **options)
        return np.asarray(resized).reshape(-1, size).T

    with tf.init_scope():
        matrices = [weights(axis) for axis in (0, 1)]
    parts = PartsBuilder(call, context)
    rows = multiply_along(parts, x, 1, matrices[0], "rows")
    multiply_along(parts, rows, 2, matrices[1], "", call.output)
    return parts.calls


def split_constant_table(call: Call, context: LoweringContext) -> list[Call]:
    """Lowers tf.gather of a constant's rows, by a tensor of their numbers, to an Embedding."""
    table, indices, *options = operands(call, *GATHER_ARGUMENTS)
    table, shape = array(table), call.output.shape[1:]
    if table is None or not table.ndim or any(options) or not call.output.is_float:
        return []
    if not isinstance(indices, Value) or not indices.shape or None in shape:
        return []
    rows = table.reshape(len(table), -1).astype(np.float32)
    weights = [tf.Variable(rows, trainable=False)]
    parts = PartsBuilder(call, context)
    name = "" if table.ndim == 2 else "rows"
    embedding = parts.new(
        name, layers.Embedding, *rows.shape, trainable=False, weights=weights, dtype="float32"
    )
    if table.ndim == 2:
        return parts.end(embedding, indices)
    entries = parts.add(embedding, indices, shape=(*indices.shape, rows.shape[1]))
    return parts.end(parts.new("", type(call.layer), tf.reshape), entries, [-1, *shape])
