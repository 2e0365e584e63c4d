"""An operator of a TFLite file, as the checks of a target see it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from keras_qat.tflite.reader import FileGraph, Operation, Tensor

__all__ = ["Site"]


@dataclasses.dataclass(frozen=True)
class Site:
    """An operator of a file, as checks see it.

    Args:
        graph: the file.
        operation: the operator.
    """

    graph: FileGraph
    operation: Operation

    @property
    def inputs(self) -> list[Tensor | None]:
        """The tensors that it reads, None for one that is left out."""
        tensors = self.graph.tensors
        return [tensors[index] if index >= 0 else None for index in self.operation.inputs]

    @property
    def outputs(self) -> list[Tensor]:
        """The tensors that it gives."""
        return [self.graph.tensors[index] for index in self.operation.outputs]

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [each for each in (*self.inputs, *self.outputs) if each is not None]

    def option(self, name: str, default: Any = None) -> Any:
        """One of its options, by the name that TFLite's schema has."""
        return getattr(self.graph.options(self.operation), name, default)

    def constant(self, place: int) -> np.ndarray | None:
        """The values of an input, None if they are known at run time only."""
        tensor = self.inputs[place]
        return None if tensor is None else self.graph.constant(tensor.index)
