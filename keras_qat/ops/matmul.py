"""Matrix products of two tensors, and other sums of products, such as `tf.einsum`."""

from __future__ import annotations

import dataclasses
import re
import string
from collections.abc import Callable, Sequence

import tensorflow as tf

from keras_qat.arithmetic.fixed_point import multiply_sums, to_fixed_point
from keras_qat.arithmetic.plain_operations import product
from keras_qat.arithmetic.quant_params import single
from keras_qat.graph.calls import Call, multiply_sizes
from keras_qat.graph.operations import get_operands
from keras_qat.helper_layers.operations import Contract
from keras_qat.keras2.backend import layers
from keras_qat.ops.emission import Emission, Shape
from keras_qat.ops.op import Arguments, Attributes, Op
from keras_qat.ops.requantize import Multiplier


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of an einsum equation, such as "bij,bjk->bik". Each letter is an axis."""

    first: str
    second: str
    output: str

    @property
    def batch(self) -> str:
        """The axes that both inputs and the output have: "b" in "bij,bjk->bik"."""
        return "".join(a for a in self.first if a in self.second and a in self.output)

    @property
    def sum_axes(self) -> str:
        """The axes that both inputs have, but not the output: "j" in "bij,bjk->bik"."""
        return "".join(a for a in self.first if a in self.second and a not in self.output)

    @property
    def rows(self) -> str:
        """The axes that only the first input has: "i" in "bij,bjk->bik"."""
        return "".join(a for a in self.first if a not in self.second)

    @property
    def columns(self) -> str:
        """The axes that only the second input has: "k" in "bij,bjk->bik"."""
        return "".join(a for a in self.second if a not in self.first)

    @property
    def result(self) -> str:
        """The axes of the output that the second input also has: "bk" in "bij,bjk->bik"."""
        return "".join(a for a in self.output if a in self.second)

    @property
    def are_matrices(self) -> bool:
        """Whether a product of matrices can compute the equation, after a transposition of axes."""
        terms = (self.first, self.second, self.output)
        stay = set(self.batch + self.rows + self.columns)
        return all(len(set(term)) == len(term) for term in terms) and stay == set(self.output)


def parse_equation(equation: str) -> Axes:
    return Axes(*re.split(",|->", equation))


def expand_ellipsis(terms: Sequence[str], count: int) -> list[str]:
    """Replaces "..." in the terms of an equation by `count` letters that the terms do not use."""
    unused = [letter for letter in string.ascii_letters if letter not in "".join(terms)]
    return [term.replace("...", "".join(unused[:count])) for term in terms]


def find_positions(axes: str, term: str) -> tuple[int, ...]:
    """Returns the position in `term` of each letter in `axes`."""
    return tuple(map(term.index, axes))


def emit_product(
    e: Emission, add: Callable[[int], None], shape: Shape, full: Shape, order: tuple[int, ...]
) -> None:
    """Adds a matrix product to a file. If necessary, adds a RESHAPE and a TRANSPOSE after it.

    Args:
        add: function that adds the matrix product, given the index of the output tensor.
        shape: the shape of the matrix product. It has one axis for all rows and one for all
            columns.
        full: the shape after the RESHAPE, with separate axes.
        order: the permutation from the axes of `full` to those of the output.
    """
    (output,) = e.outputs
    stays = list(order) == sorted(order)
    product = output if stays and shape == full else e.temporary("product", shape, output)
    add(product)
    if not stays:
        e.transpose(e.make_reshaped(product, full, "split"), order, output)
    elif product != output:
        e.reshape(product, output)


EXACT_DEPTH = 2**24 // 255**2
"""The maximum number of int8 products that float32 sums exactly. Each product is at most 255^2."""

MAX_AXES = 5
"""The maximum number of axes of BATCH_MATMUL's inputs."""


def _prepare(a: Arguments) -> Multiplier:
    """Return the multiplier that rescales sums of products to the output."""
    first, second = a.params
    product = first.scale * second.scale
    ratio = (product if a.family.ratios == "float64" else single(product)) / a.output.scale
    if a.family.matrix_products is None or a.wide:
        return Multiplier(to_fixed_point(ratio))
    in_float32 = tf.cast(single(ratio), tf.float32)
    return Multiplier(to_fixed_point(ratio), in_float32, second.zero_point == 0)


def _multiply(a: Arguments) -> tf.Tensor:
    depth, prepared, dtype = a.attributes["depth"], a.prepared, a.q[0].dtype
    is_small = depth is not None and depth <= EXACT_DEPTH and not a.wide
    exact = tf.float32 if is_small else tf.float64
    sums = tf.cast(a.run_layer([tf.cast(q, exact) for q in a.q]), tf.float64)
    if a.wide:
        return tf.cast(multiply_sums(tf.cast(sums, tf.int64), prepared.fixed), dtype)

    def multiply_in_float(factor: tf.Tensor) -> tf.Tensor:
        assert a.family.matrix_products is not None
        return a.family.matrix_products(tf.cast(sums, tf.float32), factor)

    return prepared.multiply(lambda: tf.cast(sums, tf.int64), dtype, multiply_in_float)


def _multiply_matrices(e: Emission, first: int, second: int, target: int, adjoint: bool) -> None:
    e.add("BATCH_MATMUL", [first, second], [target], adjY=adjoint)


def _matmul_attributes(call: Call) -> Attributes:
    """Return `transposed` (a bool for each input) and `depth` (the number of products per sum)."""
    names = ("a", "transpose_a", "transpose_b", "adjoint_a", "adjoint_b")
    a, *flags = get_operands(call, *names)
    flipped = tuple(bool(flags[index] or flags[index + 2]) for index in (0, 1))
    shape = getattr(a, "shape", (None, None))
    return {"transposed": flipped, "depth": shape[-2 if flipped[0] else -1]}


def _emit_matmul(e: Emission) -> None:
    first, second = e.inputs
    turned, adjoint = e.attributes["transposed"]
    if turned:  # XNNPACK can only transpose the second matrix.
        rank = len(e.shape(first))
        first = e.transpose(first, (*range(rank - 2), rank - 1, rank - 2))
    _multiply_matrices(e, first, second, e.outputs[0], adjoint)


MATMUL = Op(
    "matmul",
    _multiply,
    _emit_matmul,
    prepare=_prepare,
    doc="products of matrices",
    kinds=("matmul",),
    attributes=_matmul_attributes,
    defaults={"transposed": (False, False), "depth": None},
    accepts=lambda call, attributes: (
        None if len(call.inputs) == 2 else "it needs two input tensors"
    ),
    max_axes=MAX_AXES,
    symmetric=(1,),
    multiplies_tensors=True,
    products=lambda call: multiply_sizes((call.output.elements, _matmul_attributes(call)["depth"])),
)


def _multiply_rows(a: Arguments) -> tf.Tensor:
    x, y = a.q
    products = tf.square(x) if x is y else product(x, y)
    sums = tf.reduce_sum(products, -1, keepdims=True)
    return multiply_sums(tf.cast(sums, tf.int64), a.prepared.fixed)


ROW_PRODUCTS = dataclasses.replace(
    MATMUL,
    name="row_products",
    compute=_multiply_rows,
    emit=lambda e: e.add("BATCH_MATMUL", adjY=True),
    doc="the dot product of each row of one tensor with a row of another, in 16 bits",
    kinds=(),
)
"""Computes dot products of vectors, for example inside LayerNormalization. Each vector is a matrix
with one row."""


def _find_equation(call: Call) -> str:
    """Return the einsum equation of a call, without an ellipsis. Return "" if it is unknown."""
    layer = call.layer
    if len(call.inputs) != 2:
        return ""
    ranks = [len(value.shape) for value in call.inputs]
    if isinstance(layer, layers.Dot):
        axes = [layer.axes] * 2 if isinstance(layer.axes, int) else layer.axes
        unused = iter(string.ascii_lowercase[2:])
        terms = []
        for axis, rank in zip(axes, ranks, strict=True):
            inner = "".join(next(unused) for _ in range(rank - 1))
            index = axis % rank - 1
            terms.append("a" + inner[:index] + "b" + inner[index + 1 :])
        output = "a" + "".join(axis for term in terms for axis in term if axis not in "ab")
        return f"{','.join(terms)}->{output}"
    terms = re.split(",|->", layer.equation.replace(" ", ""))
    if "..." in layer.equation:
        counts = {rank - len(term) + 3 for rank, term in zip(ranks, terms, strict=False)}
        if len(counts) > 1 or any("..." not in term for term in terms):
            return ""
        terms = expand_ellipsis(terms, counts.pop())
    if len(terms) == 2:
        both = "".join(terms)
        terms.append("".join(sorted(axis for axis in both if both.count(axis) == 1)))
    return f"{terms[0]},{terms[1]}->{terms[2]}"


def _contract_attributes(call: Call) -> Attributes:
    """Return `equation` (as for einsum) and `depth` (the number of products per sum)."""
    equation, depth = _find_equation(call), None
    if equation:
        axes, (first, second) = parse_equation(equation), call.inputs
        sizes = _find_sizes(axes, first.shape, second.shape)
        depth = multiply_sizes([sizes[axis] for axis in axes.sum_axes])
    return {"equation": equation, "depth": depth}


def _find_sizes(axes: Axes, first: Shape, second: Shape) -> dict[str, int | None]:
    sizes = dict(zip(axes.second, second, strict=True))
    for axis, size in zip(axes.first, first, strict=True):
        sizes[axis] = sizes.get(axis) if size is None else size
    return sizes


def _accepts_contract(call: Call, attributes: Attributes) -> str | None:
    if len(call.inputs) != 2:
        return "it needs two input tensors"
    if getattr(call.layer, "normalize", False):
        return "normalize=True"
    if not attributes["equation"]:
        return "an equation with an unknown number of axes"
    axes = parse_equation(attributes["equation"])
    if not axes.are_matrices:
        return "not a matrix product"
    first, second = (value.shape for value in call.inputs)
    sizes = [dict(zip(axes.first, first, strict=True)), dict(zip(axes.second, second, strict=True))]
    if any(sizes[0][axis] != sizes[1][axis] for axis in axes.batch + axes.sum_axes):
        return "an axis is broadcast to the other tensor"
    is_plain = len(axes.rows) == len(axes.columns) == len(axes.sum_axes) == 1
    if not is_plain and max(shape.count(None) for shape in (first, second, call.output.shape)) > 1:
        return "sizes are known only at run time"
    return None


def _emit_contract(e: Emission) -> None:
    """Add a BATCH_MATMUL. Transpose and reshape the inputs to matrices, and the output back."""
    axes, (first, second) = parse_equation(e.attributes["equation"]), e.inputs
    sizes = _find_sizes(axes, e.shape(first), e.shape(second))
    # Whether the summed axes are the last axes of the second tensor.
    turned = axes.second == axes.batch + axes.columns + axes.sum_axes

    def make_matrices(source: int, term: str, axis_groups: tuple[str, str], name: str) -> int:
        order = find_positions(axes.batch + "".join(axis_groups), term)
        source = e.transpose(source, order, name=f"{name}_transposed")
        return e.make_reshaped(source, _group_axes(sizes, axes.batch, axis_groups), name)

    inner = (axes.columns, axes.sum_axes) if turned else (axes.sum_axes, axes.columns)
    left = make_matrices(first, axes.first, (axes.rows, axes.sum_axes), "first")
    right = make_matrices(second, axes.second, inner, "second")
    output = axes.batch + axes.rows + axes.columns
    emit_product(
        e,
        lambda target: _multiply_matrices(e, left, right, target, turned),
        _group_axes(sizes, axes.batch, (axes.rows, axes.columns)),
        tuple(sizes[axis] for axis in output),
        find_positions(axes.output, output),
    )


def _count_contract(call: Call) -> int | None:
    attributes = _contract_attributes(call)
    return (
        multiply_sizes((call.output.elements, attributes["depth"])) if attributes["equation"] else 0
    )


def _group_axes(sizes: dict[str, int | None], batch: str, groups: tuple[str, str]) -> Shape:
    """Return the shape of matrices for BATCH_MATMUL, with one merged axis for each group of axes.

    For example, `groups` ("ij", "k") become i * j rows and k columns. More than 3 batch axes are
    merged into one, because BATCH_MATMUL supports only 3.
    """
    lead = [batch] if len(batch) > MAX_AXES - 2 else list(batch)
    return tuple(multiply_sizes([sizes[axis] for axis in group]) for group in (*lead, *groups))


CONTRACT = dataclasses.replace(
    MATMUL,
    name="contract",
    emit=_emit_contract,
    doc="sums of products of two tensors along shared axes",
    layers=(Contract, layers.Dot),
    kinds=(),
    attributes=_contract_attributes,
    products=_count_contract,
    needs=("equation",),
    defaults={"depth": None},
    accepts=_accepts_contract,
    max_axes=Op.max_axes,
)
