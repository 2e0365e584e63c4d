"""Families of structures. The members of a family are branches of one model, exported together."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tests.networks.small import functional

Structure = Callable[..., Any]
"""A function of one tensor for each input."""

Shape = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Family:
    """Structures on the same inputs, and facts about them.

    Args:
        shapes: shapes of the inputs.
        structures: structures by name.
        int8: whether the file has no float operations.
        sizes: sizes of the inputs, if the shapes have unknown sizes.
        slow: whether it takes too long for every run.
    """

    shapes: Sequence[Shape]
    structures: Mapping[str, Structure]
    int8: bool = True
    sizes: Sequence[tuple[int, ...]] | None = None
    slow: bool = False

    def model(self, without: Sequence[str] = ()) -> Any:
        """Returns a model with one output for each structure, in order."""
        made = [structure for name, structure in self.structures.items() if name not in without]
        return functional(*self.shapes, build=lambda *inputs: [make(*inputs) for make in made])

    def inputs(self, count: int = 64) -> list[np.ndarray]:
        """Returns inputs for that model, with a different range for each."""
        numbers = np.random.default_rng(7)
        return [
            ((1.5 + 0.7 * index) * numbers.normal(size=(count, *shape))).astype(np.float32)
            for index, shape in enumerate(self.sizes or self.shapes)
        ]

    def place(self, structure: str) -> int:
        """Returns the index of a structure's output."""
        return list(self.structures).index(structure)


def each_alone(shapes: Sequence[Shape], structures: Mapping[str, Structure]) -> dict[str, Family]:
    """Returns a family for each structure. One model would compute equal operations once."""
    return {name: Family(shapes, {name: structure}) for name, structure in structures.items()}


def chain(*parts: Callable[[], Any]) -> Structure:
    """Returns a structure of layers in sequence, which are created for each branch."""

    def build(x: Any) -> Any:
        for part in parts:
            x = part()(x)
        return x

    return build
