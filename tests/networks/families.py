"""Families of structures: the members of one are branches of one model, exported together."""

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
    """Structures on the same inputs, and what is known of them.

    Args:
        shapes: of the inputs.
        structures: by name.
        int8: whether the file has no operation in float.
        sizes: of the inputs, where the shapes leave them open.
        slow: whether it takes too long to run each time.
    """

    shapes: Sequence[Shape]
    structures: Mapping[str, Structure]
    int8: bool = True
    sizes: Sequence[tuple[int, ...]] | None = None
    slow: bool = False

    def model(self, without: Sequence[str] = ()) -> Any:
        """A model with one output for each structure, in their order."""
        made = [structure for name, structure in self.structures.items() if name not in without]
        return functional(*self.shapes, build=lambda *inputs: [make(*inputs) for make in made])

    def inputs(self, count: int = 64) -> list[np.ndarray]:
        """Inputs for that model, each with a range of its own."""
        numbers = np.random.default_rng(7)
        return [
            ((1.5 + 0.7 * index) * numbers.normal(size=(count, *shape))).astype(np.float32)
            for index, shape in enumerate(self.sizes or self.shapes)
        ]

    def place(self, structure: str) -> int:
        """Which output of the model is that of a structure."""
        return list(self.structures).index(structure)


def each_alone(shapes: Sequence[Shape], structures: Mapping[str, Structure]) -> dict[str, Family]:
    """A family for each: in one model, what two of them have in common is computed once."""
    return {name: Family(shapes, {name: structure}) for name, structure in structures.items()}


def chain(*parts: Callable[[], Any]) -> Structure:
    """Layers (made when the structure is built, so each branch has its own) one after another."""

    def build(x: Any) -> Any:
        for part in parts:
            x = part()(x)
        return x

    return build
