"""Writes `tf.einsum` out: of one tensor, of more than two, and of one and a constant."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.tf_operations import array
from keras_qat.lowering.written_out import require

MOST = 32
"""Products that one may be written out in, with the parts of a constant."""


def einsum(equation: Any, *inputs: Any, **kwargs: Any) -> Any:
    """Takes the arguments of `tf.einsum`, and computes one in parts."""
    ranks = [len(np.shape(tensor)) for tensor in inputs]
    terms, output = _written_out(equation, ranks)
    if len(inputs) > 2:
        first, rest = first_and_rest(equation, ranks)
        return tf.einsum(rest, tf.einsum(first, *inputs[:2]), *inputs[2:])
    if len(inputs) == 1:
        (term,) = terms
        # The batch stays in front.
        require(len(set(term)) == len(term) and output[:1] == term[:1])
        summed = [term.index(axis) for axis in term if axis not in output]
        kept = [axis for axis in term if axis in output]
        x = tf.reduce_sum(inputs[0], summed) if summed else inputs[0]
        order = [kept.index(axis) for axis in output]
        return x if order == sorted(order) else tf.transpose(x, order)
    if "..." in equation:
        return tf.einsum(f"{','.join(terms)}->{output}", *inputs)
    position = 0 if array(inputs[0]) is not None else 1
    factor = array(inputs[position])
    if factor is None:
        raise NotImplementedError
    factor = factor.astype(np.float32)
    return _with_constant(
        inputs[1 - position], terms[1 - position], factor, terms[position], output
    )


def first_and_rest(equation: str, ranks: list[int]) -> tuple[str, str]:
    """Returns the equation of the first two of several tensors, and that of the others."""
    terms, output = _written_out(equation, ranks)
    needed = set(output).union(*terms[2:])
    middle = "".join(dict.fromkeys(axis for axis in terms[0] + terms[1] if axis in needed))
    return f"{terms[0]},{terms[1]}->{middle}", f"{','.join([middle, *terms[2:]])}->{output}"


def _with_constant(x: Any, term: str, factor: np.ndarray, own: str, output: str) -> Any:
    """Returns the `tf.einsum` of a tensor and a constant, each with the letters of its axes."""
    require(all(len(set(axes)) == len(axes) for axes in (term, own)))
    require(set(own) <= {*term, *output} and set(term) <= {*own, *output})
    summed = [axis for axis in own if axis in term and axis not in output]
    added = [axis for axis in own if axis not in term]
    shared = [axis for axis in own if axis in term and axis in output]
    if summed and shared:  # A product for each entry of the axis.
        axis, position = shared[0], term.index(shared[0])
        require(position > 0 and (x.shape[position] or MOST + 1) <= MOST)
        without = ",".join(axes.replace(axis, "") for axes in (term, own))
        equation = f"{without}->{output.replace(axis, '')}"
        factors = np.moveaxis(factor, own.index(axis), 0)
        parts = [
            tf.einsum(equation, y, part)
            for y, part in zip(tf.unstack(x, axis=position), factors, strict=True)
        ]
        return tf.stack(parts, output.index(axis))
    if summed:
        require(len(own) > 2 or len(summed) > 1)  # Others are products with a matrix.
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


def _written_out(equation: str, ranks: list[int]) -> tuple[list[str], str]:
    """Returns the terms and the output of an equation, with letters in the place of "..."."""
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
