"""Defines an operator of a TFLite file, for the checks of targets."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from keras_qat.tflite.reader import FileGraph, Operation, Tensor


@dataclasses.dataclass(frozen=True)
class Site:
    """An operator of a file with its tensors and options.

    Args:
        graph: the file.
        operation: the operator.
    """

    graph: FileGraph
    operation: Operation

    @property
    def inputs(self) -> list[Tensor | None]:
        """The input tensors, None for an optional one that is left out."""
        tensors = self.graph.tensors
        return [tensors[index] if index >= 0 else None for index in self.operation.inputs]

    @property
    def outputs(self) -> list[Tensor]:
        """The output tensors."""
        return [self.graph.tensors[index] for index in self.operation.outputs]

    @property
    def tensors(self) -> list[Tensor]:
        """All input and output tensors."""
        return [tensor for tensor in (*self.inputs, *self.outputs) if tensor is not None]

    def option(self, name: str, default: Any = None) -> Any:
        """Returns an option by the schema's name."""
        return getattr(self.graph.options(self.operation), name, default)

    def constant(self, index: int) -> np.ndarray | None:
        """Returns the values of an input, None if they are known only at run time."""
        tensor = self.inputs[index]
        return None if tensor is None else self.graph.constant(tensor.index)
