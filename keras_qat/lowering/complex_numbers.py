"""Arithmetic of complex numbers in real ones: each function takes and returns pairs of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.operations import MOVES
from keras_qat.lowering.expand_call import require
from keras_qat.lowering.expansions.matrices import first_and_rest

Pair = tuple[Any, Any]
"""Real and imaginary part; None for an imaginary part of zeros."""


def pair_of(x: Any) -> Pair:
    """Returns a pair, or a constant as one."""
    if isinstance(x, tuple):
        return x
    require(x is not None)
    constant = np.asarray(x)
    real, imag = (part.astype(np.float32) for part in (constant.real, constant.imag))
    return real, imag if imag.any() else None


def cast(x: Any, dtype: Any, name: Any = None) -> Any:
    if not isinstance(x, tuple):
        require(x is not None)
        return x, None
    return x if tf.as_dtype(dtype).is_complex else x[0]


def pair(real: Any, imag: Any, name: Any = None) -> Pair:
    if real is None:
        return tf.zeros_like(imag), imag
    is_zero = imag is None or not (tf.is_tensor(imag) or np.any(imag))
    return real, None if is_zero else imag


def zeros(shape: Any, dtype: Any = None, name: Any = None) -> Pair:
    return tf.zeros(shape), None


def add(x: Any, y: Any, name: Any = None) -> Pair:
    (a, b), (c, d) = pair_of(x), pair_of(y)
    return a + c, _sum(b, d)


def subtract(x: Any, y: Any, name: Any = None) -> Pair:
    return add(x, negative(pair_of(y)))


def negative(x: Pair, name: Any = None) -> Pair:
    return -x[0], _minus(x[1])


def conjugate(x: Pair, name: Any = None) -> Pair:
    return x[0], _minus(x[1])


def square(x: Pair, name: Any = None) -> Pair:
    return multiply(x, x)


def divide(x: Any, y: Any, name: Any = None) -> Pair:
    c, d = divisor = pair_of(y)
    if d is None:
        return tuple(part if part is None else part / c for part in pair_of(x))  # type: ignore[return-value]
    return divide(multiply(x, conjugate(divisor)), (c * c + d * d, None))


def exp(x: Pair, name: Any = None) -> Pair:
    length, angle = tf.exp(x[0]), x[1]
    return (length, None) if angle is None else (length * tf.cos(angle), length * tf.sin(angle))


def matmul(
    a: Any, b: Any, transpose_a: Any = False, transpose_b: Any = False, **options: Any
) -> Pair:
    require(not any(value for name, value in options.items() if name != "name"))
    return _products(lambda x, y: tf.matmul(x, y, transpose_a, transpose_b), a, b)


def multiply(x: Any, y: Any, name: Any = None) -> Pair:
    return _products(lambda a, b: a * b, x, y)


def einsum(equation: Any, *inputs: Any, **options: Any) -> Pair:
    if len(inputs) == 1:
        (x,) = inputs
        return tuple(part if part is None else tf.einsum(equation, part) for part in x)  # type: ignore[return-value]
    if len(inputs) > 2:
        ranks = [len(np.shape(pair_of(x)[0])) for x in inputs]
        first, rest = first_and_rest(equation, ranks)
        return einsum(rest, einsum(first, *inputs[:2]), *inputs[2:])
    return _products(lambda x, y: tf.einsum(equation, x, y), *inputs)


def tensordot(a: Any, b: Any, axes: Any, name: Any = None) -> Pair:
    return _products(lambda x, y: tf.tensordot(x, y, axes), a, b)


def _products(product: Callable[[Any, Any], Any], x: Any, y: Any) -> Pair:
    """Returns a product of complex numbers, given that of real ones."""
    (a, b), (c, d) = pair_of(x), pair_of(y)

    def of(left: Any, right: Any) -> Any:
        return None if left is None or right is None else product(left, right)

    return _sum(of(a, c), _minus(of(b, d))), _sum(of(a, d), of(b, c))


def _sum(x: Any, y: Any) -> Any:
    return y if x is None else x if y is None else x + y


def _minus(x: Any) -> Any:
    return None if x is None else -x


def part(index: int) -> Callable[..., Any]:
    def of(input: Pair, name: Any = None) -> Any:
        require(input[index] is not None)
        return input[index]

    return of


ARITHMETIC: dict[str, Callable[..., Any]] = {
    "cast": cast,
    "complex": pair,
    "zeros": zeros,
    "add": add,
    "subtract": subtract,
    "multiply": multiply,
    "divide": divide,
    "negative": negative,
    "conj": conjugate,
    "square": square,
    "exp": exp,
    "matmul": matmul,
    "einsum": einsum,
    "tensordot": tensordot,
    "real": part(0),
    "imag": part(1),
}
"""Kind of an operation -> what it computes of pairs."""

PARTWISE = MOVES.union(("cumsum", "fftshift", "ifftshift", "pad", "reduce_mean", "reduce_sum"))
"""Operations that do the same with the real and with the imaginary part."""
