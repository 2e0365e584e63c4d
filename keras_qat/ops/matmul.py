"""Products of matrices, and other sums of products of two tensors."""

from __future__ import annotations

import dataclasses
import math
import re
import string
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.fixed_point import fixed_point, multiply, multiply_sums
from keras_qat.arithmetic.qparams import single
from keras_qat.inner_layers import Contract
from keras_qat.keras2.backend import keras
from keras_qat.keras2.graph import Call
from keras_qat.operations import operands
from keras_qat.ops.movement import open_sizes
from keras_qat.ops.op import Arguments, Attributes, Op
from keras_qat.tflite.emission import Emission

__all__ = ["CONTRACT", "MATMUL"]

_layers = keras.layers

Shape = tuple[int | None, ...]

EXACT_DEPTH = 258
"""How many products of two int8 numbers float32 adds up without an error."""

MAX_AXES = 5
"""Axes that the kernel takes, those of the matrices among them."""


def _product(a: Arguments) -> Any:
    """Sums of products, in whole numbers, times the ratio of the scales.

    XNNPACK multiplies in float32 and rounds half to even, if the second factor's zero point is 0.
    """
    depth = a.attributes["depth"]
    is_small = depth is not None and depth <= EXACT_DEPTH and not a.wide
    exact = tf.float32 if is_small else tf.float64
    dtype = a.q[0].dtype
    sums = tf.cast(a.on([tf.cast(each, exact) for each in a.q]), tf.float64)
    first, second = a.params
    product, output = single(first.scale * second.scale), a.output.scale
    if a.wide:
        return tf.cast(multiply_sums(tf.cast(sums, tf.int64), fixed_point(product / output)), dtype)

    def in_integers() -> Any:
        ratio = fixed_point(product / output)
        return tf.cast(multiply(tf.cast(sums, tf.int64), ratio), dtype)

    def in_float() -> Any:
        return tf.round(tf.cast(sums, tf.float32) * tf.cast(single(product / output), tf.float32))

    if a.family == "reference":
        return in_integers()
    return tf.cond(second.zero_point == 0, in_float, in_integers)


def _multiply_matrices(e: Emission, first: int, second: int, target: int, adjoint: bool) -> None:
    e.add(
        "BATCH_MATMUL",
        [first, second],
        [target],
        "BatchMatMulOptions",
        adjX=False,
        adjY=adjoint,
        asymmetricQuantizeInputs=False,
    )


def _transposed(e: Emission, source: int, order: tuple[int, ...], name: str) -> int:
    """A tensor with its axes in another order; itself if they are in this one."""
    if order == tuple(range(len(order))):
        return source
    shape = e.shape(source)
    target = e.temporary(name, tuple(shape[axis] for axis in order), source)
    _transpose(e, source, target, order)
    return target


def _transpose(e: Emission, source: int, target: int, order: tuple[int, ...]) -> None:
    permutation = e.constant("permutation", np.array(order, np.int32))
    e.add("TRANSPOSE", [source, permutation], [target], "TransposeOptions")


def _matmul_attributes(call: Call) -> Attributes:
    """`transposed`: whether the first and the second matrix are, `depth`: of the sums."""
    names = ("a", "b", "transpose_a", "transpose_b", "adjoint_a", "adjoint_b")
    a, _, *flags = operands(call, *names)
    flipped = tuple(bool(flags[place] or flags[place + 2]) for place in (0, 1))
    shape = getattr(a, "shape", (None, None))
    return {"transposed": flipped, "depth": shape[-2 if flipped[0] else -1]}


def _accepts_matmul(call: Call, attributes: Attributes) -> str | None:
    if len(call.inputs) != 2:
        return "not of two tensors"
    ranks = [len(value.shape) for value in call.inputs]
    return None if max(ranks) <= MAX_AXES else f"more than {MAX_AXES} axes"


def _emit_matmul(e: Emission) -> None:
    first, second = e.inputs
    turned, adjoint = e.attributes["transposed"]
    if turned:  # XNNPACK takes the second one transposed only.
        rank = len(e.shape(first))
        first = _transposed(e, first, (*range(rank - 2), rank - 1, rank - 2), "transposed")
    _multiply_matrices(e, first, second, e.outputs[0], adjoint)


MATMUL = Op(
    "matmul",
    _product,
    _emit_matmul,
    doc="products of matrices",
    symbols=("linalg.matmul",),
    attributes=_matmul_attributes,
    defaults={"transposed": (False, False), "depth": None},
    accepts=_accepts_matmul,
    symmetric=(1,),
)


def _equation(call: Call) -> str:
    """That of a layer as `tf.einsum` takes it, without an ellipsis; "" if there is none."""
    layer = call.layer
    if len(call.inputs) != 2:
        return ""
    ranks = [len(value.shape) for value in call.inputs]
    if isinstance(layer, _layers.Dot):
        axes = [layer.axes] * 2 if isinstance(layer.axes, int) else layer.axes
        unused = iter(string.ascii_lowercase[2:])
        terms = []
        for axis, rank in zip(axes, ranks, strict=True):
            inner = "".join(next(unused) for _ in range(rank - 1))
            place = axis % rank - 1
            terms.append("a" + inner[:place] + "b" + inner[place + 1 :])
        output = "a" + "".join(each for term in terms for each in term if each not in "ab")
        return f"{','.join(terms)}->{output}"
    given = layer.equation.replace(" ", "")
    letters = "".join(each for each in string.ascii_letters if each not in given)
    terms = re.split(",|->", given)
    if "..." in given:
        sizes = {rank - len(term) + 3 for rank, term in zip(ranks, terms, strict=False)}
        if len(sizes) > 1 or any("..." not in term for term in terms):
            return ""
        lead = letters[: sizes.pop()]
        terms = [term.replace("...", lead) for term in terms]
    if len(terms) == 2:
        both = "".join(terms)
        terms.append("".join(sorted(each for each in both if both.count(each) == 1)))
    return f"{terms[0]},{terms[1]}->{terms[2]}"


@dataclasses.dataclass(frozen=True)
class _Axes:
    """The axes of an equation, by what becomes of them: letters.

    Args:
        first, second, output: as the equation has them.
        batch: in both tensors and the output.
        summed: in both tensors only.
        rows, columns: in the first tensor only, or in the second, and in the output.
    """

    first: str
    second: str
    output: str
    batch: str
    summed: str
    rows: str
    columns: str

    @classmethod
    def of(cls, equation: str) -> _Axes:
        first, second, output = re.split(",|->", equation)
        both = [each for each in first if each in second]
        return cls(
            first,
            second,
            output,
            batch="".join(each for each in both if each in output),
            summed="".join(each for each in both if each not in output),
            rows="".join(each for each in first if each not in second),
            columns="".join(each for each in second if each not in first),
        )

    @property
    def are_matrices(self) -> bool:
        """Whether products of matrices compute it."""
        terms = (self.first, self.second, self.output)
        kept = set(self.batch + self.rows + self.columns)
        return all(len(set(term)) == len(term) for term in terms) and kept == set(self.output)

    @property
    def second_is_turned(self) -> bool:
        """Whether what is summed comes last in the second tensor."""
        return self.second == self.batch + self.columns + self.summed


def _contract_attributes(call: Call) -> Attributes:
    """`equation`: as for `tf.einsum`, `depth`: of the sums."""
    equation, depth = _equation(call), None
    if equation:
        sizes = _sizes(equation, call.inputs[0].shape, call.inputs[1].shape)
        summed = [sizes[each] for each in _Axes.of(equation).summed]
        depth = _product_of(summed)
    return {"equation": equation, "depth": depth}


def _sizes(equation: str, first: Shape, second: Shape) -> dict[str, int | None]:
    """Size of each axis of an equation."""
    terms = re.split(",|->", equation)
    known = dict(zip(terms[1], second, strict=True))
    for each, size in zip(terms[0], first, strict=True):
        known[each] = known.get(each) if size is None else size
    return known


def _accepts_contract(call: Call, attributes: Attributes) -> str | None:
    if len(call.inputs) != 2:
        return "not of two tensors"
    if getattr(call.layer, "normalize", False):
        return "normalize=True"
    if not attributes["equation"]:
        return "an equation with axes of unknown number"
    axes = _Axes.of(attributes["equation"])
    if not axes.are_matrices:
        return "no product of matrices"
    sizes = [dict(zip(*each, strict=True)) for each in _terms_and_shapes(axes, call)]
    if any(sizes[0][each] != sizes[1][each] for each in axes.batch + axes.summed):
        return "axes that are repeated for the other tensor"
    is_plain = len(axes.rows) == len(axes.columns) == len(axes.summed) == 1
    shapes = [value.shape for value in call.inputs]
    if not is_plain and max(map(open_sizes, [*shapes, call.output.shape])) > 1:
        return "sizes that are not known before run time"
    return None


def _terms_and_shapes(axes: _Axes, call: Call) -> list[tuple[str, Shape]]:
    first, second = (value.shape for value in call.inputs)
    return [(axes.first, first), (axes.second, second)]


def _emit_contract(e: Emission) -> None:
    """TRANSPOSE and RESHAPE to matrices, BATCH_MATMUL, and back again."""
    axes = _Axes.of(e.attributes["equation"])
    first, second = e.inputs
    sizes = _sizes(e.attributes["equation"], e.shape(first), e.shape(second))
    turned = axes.second_is_turned

    def matrices(source: int, given: str, wanted: tuple[str, str], name: str) -> int:
        order = tuple(given.index(each) for each in axes.batch + "".join(wanted))
        source = _transposed(e, source, order, f"{name}_transposed")
        shape = _grouped(sizes, axes.batch, wanted)
        if shape == e.shape(source):
            return source
        target = e.temporary(name, shape, source)
        e.reshape(source, target)
        return target

    inner = (axes.columns, axes.summed) if turned else (axes.summed, axes.columns)
    left = matrices(first, axes.first, (axes.rows, axes.summed), "first")
    right = matrices(second, axes.second, inner, "second")
    (output,) = e.outputs
    made = axes.batch + axes.rows + axes.columns
    shape = _grouped(sizes, axes.batch, (axes.rows, axes.columns))
    full = tuple(sizes[each] for each in made)
    order = tuple(made.index(each) for each in axes.output)
    stays = order == tuple(range(len(order)))
    if stays and e.shape(output) == shape:
        _multiply_matrices(e, left, right, output, turned)
        return
    product = e.temporary("product", shape, output)
    _multiply_matrices(e, left, right, product, turned)
    if stays:
        e.reshape(product, output)
        return
    if shape != full:
        split = e.temporary("split", full, output)
        e.reshape(product, split)
        product = split
    _transpose(e, product, output, order)


def _product_of(sizes: list[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return math.prod(known) if len(known) == len(sizes) else None


def _grouped(sizes: dict[str, int | None], batch: str, groups: tuple[str, str]) -> Shape:
    """The shape of matrices: several axes make one."""

    def of_all(axes: str) -> int | None:
        return _product_of([sizes[each] for each in axes])

    lead = tuple(sizes[each] for each in batch)
    if len(batch) > MAX_AXES - 2:
        lead = (of_all(batch),)
    return (*lead, *map(of_all, groups))


CONTRACT = Op(
    "contract",
    _product,
    _emit_contract,
    doc="sums of products of two tensors along shared axes",
    layers=(Contract, _layers.Dot),
    attributes=_contract_attributes,
    needs=("equation",),
    defaults={"depth": None},
    accepts=_accepts_contract,
    symmetric=(1,),
)
