"""Turns `tf.einsum` equations into products of matrices."""

from __future__ import annotations

import dataclasses
import re
import string
from collections.abc import Callable, Sequence

from keras_qat.ops.emission import Emission

Shape = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of an equation, as letters, sorted by what becomes of them.

    Args:
        first, second, output: as the equation has them.
    """

    first: str
    second: str
    output: str

    @property
    def batch(self) -> str:
        """Letters of axes that both tensors and the output have."""
        return "".join(a for a in self.first if a in self.second and a in self.output)

    @property
    def summed(self) -> str:
        """Letters of axes that both tensors have and the output has not."""
        return "".join(a for a in self.first if a in self.second and a not in self.output)

    @property
    def rows(self) -> str:
        """Letters of axes that only the first tensor has."""
        return "".join(a for a in self.first if a not in self.second)

    @property
    def columns(self) -> str:
        """Letters of axes that only the second tensor has."""
        return "".join(a for a in self.second if a not in self.first)

    @property
    def result(self) -> str:
        """Letters of axes that the output has of the second tensor, in its order."""
        return "".join(a for a in self.output if a in self.second)

    @property
    def are_matrices(self) -> bool:
        """Whether products of matrices compute it."""
        terms = (self.first, self.second, self.output)
        stay = set(self.batch + self.rows + self.columns)
        return all(len(set(term)) == len(term) for term in terms) and stay == set(self.output)


def parse_equation(equation: str) -> Axes:
    """Reads an equation of two terms and an output."""
    return Axes(*re.split(",|->", equation))


def expand_ellipsis(terms: Sequence[str], count: int) -> list[str]:
    """Returns terms with letters in place of their ellipses, which stand for `count` axes."""
    unused = [letter for letter in string.ascii_letters if letter not in "".join(terms)]
    return [term.replace("...", "".join(unused[:count])) for term in terms]


def find_positions(axes: str, among: str) -> tuple[int, ...]:
    """Returns the index of each axis among others."""
    return tuple(map(among.index, axes))


def emit_product(
    e: Emission, add: Callable[[int], None], shape: Shape, full: Shape, order: tuple[int, ...]
) -> None:
    """Adds a product of matrices, and the operators that turn it into the output.

    Args:
        e: the operator.
        add: adds the product, written to a tensor.
        shape: shape of the product.
        full: its shape with all axes of the output, of which several make one in matrices.
        order: the order of these axes in the output.
    """
    (output,) = e.outputs
    stays = list(order) == sorted(order)
    product = output if stays and shape == full else e.temporary("product", shape, output)
    add(product)
    if not stays:
        e.transpose(e.reshaped(product, full, "split"), order, output)
    elif product != output:
        e.reshape(product, output)
