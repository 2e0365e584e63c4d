"""Expands matrix products, `tf.einsum` and linear operations.

A cumulative sum is a product with a triangular matrix of ones. A resize is a product with a matrix
of interpolation weights. `split_layers` converts products with constants to layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.operations import call_function, get_argument, read_array
from keras_qat.keras2.backend import keras, layers
from keras_qat.keras2.layers_and_models import clone
from keras_qat.lowering.expand_call import Expansion, get_call, is_tensor, require, unwrap


def _frame(
    signal: tf.Tensor,
    frame_length: int,
    frame_step: int,
    pad_end: bool = False,
    pad_value: Any = 0,
    axis: Any = -1,
) -> tf.Tensor:
    size = signal.shape[axis]
    require(not pad_end and size is not None)
    starts = np.arange(0, size - frame_length + 1, frame_step)
    return tf.gather(signal, starts[:, None] + np.arange(frame_length), axis=axis)


def _overlap_and_add(signal: tf.Tensor, frame_step: int) -> tf.Tensor:
    """Expand `tf.signal.overlap_and_add`: split frames into pieces, shift and add them."""
    (count, size), step = signal.shape[-2:], int(frame_step)
    rank = len(signal.shape)
    require(rank > 2 and None not in signal.shape[1:])
    parts, outer = -(-size // step), [-1, *signal.shape[1:-2]]
    beside = [(0, 0)] * (rank - 2)
    signal = tf.pad(signal, [*beside, (0, 0), (0, parts * step - size)])
    total: tf.Tensor = 0
    for part in range(parts):
        piece = signal[..., part * step : (part + 1) * step]
        total += tf.pad(piece, [*beside, (part, parts - 1 - part), (0, 0)])
    y = tf.reshape(total, [*outer, (count + parts - 1) * step])
    return y[..., : (count - 1) * step + size]


MOST_PRODUCTS = 32
"""The maximum number of products of two tensors that replace one `tf.einsum`."""


def einsum(equation: str, *inputs: Any, **kwargs: object) -> tf.Tensor:
    """Expand `tf.einsum` of one tensor, of three or more, or of a tensor and a constant.

    A term is the part of the equation for one tensor, such as "ab" in "ab,bc->ac".
    """
    ranks = [len(np.shape(tensor)) for tensor in inputs]
    terms, output = _read_equation(equation, ranks)
    if len(inputs) > 2:
        first, rest = split_first_product(equation, ranks)
        return tf.einsum(rest, tf.einsum(first, *inputs[:2]), *inputs[2:])
    if len(inputs) == 1:
        (term,) = terms
        # The batch stays the first axis.
        require(len(set(term)) == len(term) and output[:1] == term[:1])
        summed = [term.index(axis) for axis in term if axis not in output]
        kept = [axis for axis in term if axis in output]
        x = tf.reduce_sum(inputs[0], summed) if summed else inputs[0]
        order = [kept.index(axis) for axis in output]
        return x if order == sorted(order) else tf.transpose(x, order)
    if "..." in equation:
        pairs = list(map(_squeeze_constant, inputs, terms, terms[::-1]))
        inputs, terms = tuple(x for x, _ in pairs), [term for _, term in pairs]
    others = terms[::-1]
    alone = [[a for a in t if a not in o + output] for t, o in zip(terms, others, strict=True)]
    if any(alone):
        inputs = tuple(map(_sum_axes, inputs, terms, alone))
        terms = [_without(term, axes) for term, axes in zip(terms, alone, strict=True)]
    if any(alone) or "..." in equation:
        return tf.einsum(f"{','.join(terms)}->{output}", *inputs)
    position = 0 if read_array(inputs[0]) is not None else 1
    factor = unwrap(read_array(inputs[position])).astype(np.float32)
    return _multiply_by_constant(
        inputs[1 - position], terms[1 - position], factor, terms[position], output
    )


def _squeeze_constant(x: Any, term: str, other: str) -> tuple[Any, str]:
    """Remove axes of size 1 from a constant `x` if the other tensor also has these axes.

    Return the constant and its new term. `other` is the term of the other tensor.
    """
    constant = read_array(x)
    if constant is None:
        return x, term
    axes = [i for i, axis in enumerate(term) if constant.shape[i] == 1 and axis in other]
    return np.squeeze(constant, tuple(axes)), _without(term, [term[i] for i in axes])


def _sum_axes(x: tf.Tensor, term: str, axes: list[str]) -> tf.Tensor:
    """Sum over the letters `axes` of `term`. A batch of unknown size cannot be summed."""
    if not axes:
        return x
    positions = tuple(map(term.index, axes))
    if (constant := read_array(x)) is not None:
        return constant.sum(positions)
    require(x.shape[0] or 0 not in positions)
    return tf.reduce_sum(x, positions)


def _without(term: str, axes: list[str]) -> str:
    return "".join(letter for letter in term if letter not in axes)


def split_first_product(equation: str, ranks: list[int]) -> tuple[str, str]:
    """Split an equation in two: "ab,bc,cd->ad" becomes "ab,bc->ac" and "ac,cd->ad"."""
    terms, output = _read_equation(equation, ranks)
    needed = set(output).union(*terms[2:])
    middle = "".join(dict.fromkeys(axis for axis in terms[0] + terms[1] if axis in needed))
    return f"{terms[0]},{terms[1]}->{middle}", f"{','.join([middle, *terms[2:]])}->{output}"


def _multiply_by_constant(
    x: tf.Tensor, term: str, factor: np.ndarray, own: str, output: str
) -> tf.Tensor:
    """Compute `tf.einsum(f"{term},{own}->{output}", x, factor)`. `factor` is a constant."""
    require(all(len(set(axes)) == len(axes) for axes in (term, own)))
    require(set(own) <= {*term, *output} and set(term) <= {*own, *output})
    summed = [axis for axis in own if axis in term and axis not in output]
    added = [axis for axis in own if axis not in term]
    shared = [axis for axis in own if axis in term and axis in output]
    if summed and shared:  # One product for each entry of the shared axis.
        axis, position = shared[0], term.index(shared[0])
        require(position > 0 and (x.shape[position] or MOST_PRODUCTS + 1) <= MOST_PRODUCTS)
        without = ",".join(axes.replace(axis, "") for axes in (term, own))
        equation = f"{without}->{output.replace(axis, '')}"
        factors = np.moveaxis(factor, own.index(axis), 0)
        parts = [
            tf.einsum(equation, y, part)
            for y, part in zip(tf.unstack(x, axis=position), factors, strict=True)
        ]
        return tf.stack(parts, output.index(axis))
    if summed:
        require(len(own) > 2 or len(summed) > 1)  # Other products already use a matrix.
        axes = [[letters.index(axis) for axis in summed] for letters in (term, own)]
        y, axes_of_y = tf.tensordot(x, factor, axes), [a for a in term if a not in summed] + added
    else:
        axes_of_y = [*term, *added]
        order = sorted(range(len(own)), key=lambda axis: axes_of_y.index(own[axis]))
        sizes = [factor.shape[own.index(axis)] if axis in own else 1 for axis in axes_of_y]
        for _ in added:
            x = tf.expand_dims(x, -1)
        y = x * np.transpose(factor, order).reshape(sizes)
    order = [axes_of_y.index(axis) for axis in output]
    return y if order == sorted(order) else tf.transpose(y, order)


def _read_equation(equation: str, ranks: list[int]) -> tuple[list[str], str]:
    """Split "...a,ab->...b" into ["Aa", "ab"] and "Ab". New letters replace "..."."""
    left, arrow, output = equation.replace(" ", "").partition("->")
    require(bool(arrow))
    unused = [letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if letter not in equation]
    terms = left.split(",")
    counts = [rank - len(term.replace("...", "")) for rank, term in zip(ranks, terms, strict=True)]
    letters = "".join(unused[: max(counts)])
    terms = [
        term.replace("...", letters[len(letters) - count :])
        for term, count in zip(terms, counts, strict=True)
    ]
    return terms, output.replace("...", letters)


def multiply_by_matrix(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return an expansion of a linear operation, such as `tf.signal.dct`, to a `tf.matmul`."""

    def multiply(x: tf.Tensor, *args: object, **kwargs: object) -> tf.Tensor:
        require(x.shape[-1] is not None)
        with tf.init_scope():
            matrix = np.asarray(operation(tf.eye(x.shape[-1])[None], *args, **kwargs))[0]
        return tf.matmul(x, matrix)

    return multiply


def _keep_band(input: tf.Tensor, num_lower: int, num_upper: int) -> tf.Tensor:
    rows, columns = input.shape[-2:]
    require(None not in (rows, columns))
    return input * tf.linalg.band_part(np.ones((rows, columns), np.float32), num_lower, num_upper)


def _multiply_axes(a: tf.Tensor, b: tf.Tensor, axes: Any) -> tf.Tensor:
    """Expand `tf.tensordot` to a `tf.matmul`. A transpose moves the summed axes to the end."""
    count = axes if isinstance(axes, int) else 0
    given = [range(-count, 0), range(count)] if count else map(tf.nest.flatten, axes)
    summed, rows = (
        [axis % len(x.shape) for axis in part] for x, part in zip((a, b), given, strict=True)
    )
    require(0 < len(rows) == len(summed) and 0 not in summed)  # The batch stays the first axis.
    kept, others = (
        [axis for axis in range(len(x.shape)) if axis not in part]
        for x, part in ((a, summed), (b, rows))
    )
    order = kept + summed
    x = a if order == sorted(order) else tf.transpose(a, order)
    matrix = read_array(b)
    if matrix is not None:
        b = matrix.astype(np.float32)
    if len(rows) == 1 and len(b.shape) == 1:
        return tf.squeeze(tf.matmul(x, b[:, None]), -1)
    if len(rows) == 1 and len(b.shape) == 2:
        return tf.matmul(x, b, transpose_b=rows == [1])
    sizes = [a.shape[axis] for axis in kept[1:]]
    require(None not in [*sizes, *b.shape])
    b = b if rows + others == sorted(rows + others) else tf.transpose(b, rows + others)
    summed_size = math.prod(b.shape[: len(rows)])
    matrix = tf.reshape(b, [summed_size, -1])
    y = tf.matmul(tf.reshape(x, [-1, *sizes, summed_size]), matrix)
    return tf.reshape(y, [-1, *sizes, *b.shape[len(rows) :]])


def _multiply_outer(a: tf.Tensor, b: tf.Tensor, *flags: object, **options: object) -> tf.Tensor:
    """Expand `a @ b` of integers with shapes [..., n, 1] and [..., 1, m] to `a * b`."""
    require(not any(flags) and not any(options.values()) and a.shape[-1] == 1)
    return a * b


EARLY: dict[str, Expansion] = {
    "band_part": _keep_band,
    "einsum": einsum,
    "tensordot": _multiply_axes,
    "frame": _frame,
    "overlap_and_add": _overlap_and_add,
    **{
        operation.__name__: multiply_by_matrix(operation)
        for operation in (
            *(tf.signal.dct, tf.signal.idct),
            tf.signal.mfccs_from_log_mel_spectrograms,
        )
    },
}


def _einsum_dense(layer: keras.layers.Layer, x: tf.Tensor) -> tf.Tensor:
    """Expand an EinsumDense with axes that only the input has. They are summed first."""
    inputs, kernel, output = re.split(",|->", layer.equation)
    summed = [axis for axis in inputs.replace("...", "") if axis not in kernel + output]
    require(summed and layer.built)
    offset = len(x.shape) - len(inputs) if inputs.startswith("...") else 0
    x = tf.reduce_sum(x, [inputs.index(axis) + offset for axis in summed])
    return clone(layer, equation=f"{_without(inputs, summed)},{kernel}->{output}")(x)


LAYERS: dict[type, Expansion] = {layers.EinsumDense: _einsum_dense}

EARLY_OF_INTEGERS: dict[str, Expansion] = {"matmul": _multiply_outer}


_UNIT = "1"
"""Stands for an axis of size 1 in an equation."""


def _multiply_along(x: tf.Tensor, axis: int, matrix: np.ndarray, name: str = "") -> tf.Tensor:
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
    """Expand `matrix @ tensor` to `tensor @ matrix`, between transposes. The matrix is constant."""
    matrix = unwrap(read_array(a))
    require(matrix.ndim == 2 and is_tensor(b) and len(b.shape) > 2)
    require(not transpose_b and not adjoint_b)
    return _multiply_along(b, -2, matrix if transpose_a or adjoint_a else matrix.T)


def expand_einsum(equation: str, *inputs: Any, **options: object) -> tf.Tensor:
    """Expand a `tf.einsum` of a tensor and a constant matrix or vector to a `tf.matmul`."""
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
    """Expand a resize to products with two matrices, which are resized identity matrices."""
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
            resized = call_function(call, ones, target, **options)
        return np.asarray(resized).reshape(-1, before[axis]).T

    rows = _multiply_along(images, 1, find_weights(0), "rows")
    return _multiply_along(rows, 2, find_weights(1))


OF_FLOATS: dict[str, Expansion] = {"cumsum": _cumulative_sum}
