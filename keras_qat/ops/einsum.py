"""Equations, as `tf.einsum` takes them, as products of matrices."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable, Sequence

from keras_qat.ops.emission import Emission

Shape = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of an equation, by what becomes of them: letters.

    Args:
        first, second, output: as the equation has them.
    """

    first: str
    second: str
    output: str

    @property
    def batch(self) -> str:
        """Those in both tensors and the output."""
        return _those(self.first, lambda each: each in self.second and each in self.output)

    @property
    def summed(self) -> str:
        """Those in both tensors only."""
        return _those(self.first, lambda each: each in self.second and each not in self.output)

    @property
    def rows(self) -> str:
        """Those of the first tensor that the second one has not."""
        return _those(self.first, lambda each: each not in self.second)

    @property
    def columns(self) -> str:
        """Those of the second tensor that the first one has not."""
        return _those(self.second, lambda each: each not in self.first)

    @property
    def are_matrices(self) -> bool:
        """Whether products of matrices compute it."""
        terms = (self.first, self.second, self.output)
        kept = set(self.batch + self.rows + self.columns)
        return all(len(set(term)) == len(term) for term in terms) and kept == set(self.output)


def _those(term: str, among: Callable[[str], bool]) -> str:
    return "".join(filter(among, term))


def without_ellipsis(terms: Sequence[str], count: int) -> list[str]:
    """Terms with letters for their ellipses, which stand for so many axes."""
    unused = [each for each in string.ascii_letters if each not in "".join(terms)]
    return [term.replace("...", "".join(unused[:count])) for term in terms]


def places(axes: str, among: str) -> tuple[int, ...]:
    """Where axes are among others."""
    return tuple(map(among.index, axes))


def add_product(
    e: Emission, add: Callable[[int], None], shape: Shape, full: Shape, order: tuple[int, ...]
) -> None:
    """Adds a product of matrices and what makes the output of it.

    Args:
        e: the operator.
        add: adds the product, written to a tensor.
        shape: that of the product.
        full: its shape with the output's axes, of which several make one in matrices.
        order: that of the axes in the output.
    """
    (output,) = e.outputs
    stays = list(order) == sorted(order)
    product = output if stays and shape == full else e.temporary("product", shape, output)
    add(product)
    if not stays:
        e.transpose(e.reshaped(product, full, "split"), order, output)
    elif product != output:
        e.reshape(product, output)
