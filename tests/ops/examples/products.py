"""Examples of products of two tensors."""

import re

import tensorflow as tf

from keras_qat.helper_layers.operations import Contract
from keras_qat.keras2.backend import keras
from tests.ops.examples.example import Example, chosen, sizes

EQUATIONS = (
    *("abc,adc->abd", "abc,acd->abd", "abd,acd->abc", "acb,acd->abd", "abc,adc->adb"),
    *("aecd,abcd->acbe", "acbe,aecd->abcd", "abcd,abcd->ab", "abcd,aecd->abe", "abc,abc->abc"),
    *("ab,ab->a", "abcd,acd->ab", "abc,ac->ab", "ab,ac->abc", "...bc,...dc->...bd", "abc,adc"),
    "abcdef,abcdgf->abcdeg",
)


def _matmul(numbers):
    lead = sizes(numbers, 1, 4, numbers.integers(0, 3))
    rows, depth, columns = sizes(numbers, 1, 8, 3)
    turned, adjoint = (bool(number) for number in numbers.integers(0, 2, 2))
    other = tuple(chosen(numbers, 1, size) for size in lead)
    first = (*lead, *((depth, rows) if turned else (rows, depth)))
    second = (*other, *((columns, depth) if adjoint else (depth, columns)))
    return Example(
        lambda x, y: tf.matmul(x, y, transpose_a=turned, transpose_b=adjoint), (first, second)
    )


def _dot(axes, *shapes):
    return Example(lambda x, y: keras.layers.Dot(axes)([x, y]), shapes)


def _contract(numbers):
    size = {item: int(numbers.integers(1, 5)) for item in "bcdefgh"}
    if numbers.random() < 0.3:
        axes = (int(numbers.integers(1, 4)), int(numbers.integers(1, 3)))
        first, second = (3, 4, 5), [6, 7]
        second[axes[1] - 1] = first[axes[0] - 1]
        return chosen(
            numbers,
            _dot(axes, first, tuple(second)),
            _dot(-1, (5, 4), (3, 4)),
            _dot(1, (5,), (5,)),
            _dot((2, 1), (300, 4), (4, 3)),
            _dot(1, (300, 4), (300, 3)),
        )
    equation = chosen(numbers, *EQUATIONS)
    terms = [term.replace("...", "ah")[1:] for term in re.split(",|->", equation)[:2]]
    shapes = tuple(tuple(size[axis] for axis in term) for term in terms)
    return Example(lambda x, y: Contract(equation)([x, y]), shapes)


EXAMPLES = {"matmul": _matmul, "contract": _contract}
