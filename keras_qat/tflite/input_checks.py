"""Checks for inputs that would make TFLite kernels crash the process or read invalid memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from keras_qat.tflite.reader import FileGraph, Tensor

if TYPE_CHECKING:
    from keras_qat.tflite.interpreter import FileInterpreter

LARGEST_SUM = 511.0
"""Largest safe sum of `exp(score - largest score)` in a softmax. Kernels abort at 512."""

MARGIN = 0.97
"""`SoftmaxCheck` permits this share of `LARGEST_SUM`, because kernels round differently."""

KEEPS_IDS = ("CAST", "RESHAPE")
"""Operators that may be between an input of token ids and the GATHER of an Embedding."""


class EndsProcess(ValueError):
    """Raised for inputs that would make a kernel crash the process."""


class SoftmaxCheck:
    """Finds inputs that would make TFLite's fixed-point softmax crash the process.

    TFLite's portable kernels and TFLite Micro abort if the exponentials of a softmax add up to 512.
    XNNPACK's softmax does not abort, so this check first runs the file with XNNPACK.

    Args:
        graph: the file.
        open_file: function that opens the file in XNNPACK. The interpreter must keep all tensors.
    """

    def __init__(self, graph: FileGraph, open_file: Callable[[], FileInterpreter]) -> None:
        self.scores: list[Tensor] = [
            tensor
            for operation in graph.operations
            if operation.kernel == "SOFTMAX"
            and (tensor := graph.tensors[operation.inputs[0]]).type == "int8"
            and tensor.shape[-1] > LARGEST_SUM
        ]
        self._open_file = open_file
        self._file: FileInterpreter | None = None

    def check(self, inputs: dict[str, NDArray]) -> None:
        """Raises `EndsProcess` if the exponentials of a softmax add up to nearly 512 or more."""
        if not self.scores:
            return
        self._file = self._file or self._open_file()
        self._file.run_once(inputs)
        for scores in self.scores:
            quantized = self._file.interpreter.get_tensor(scores.index).astype(np.float64)
            below = (quantized - quantized.max(-1, keepdims=True)) * scores.scale
            if np.exp(below).sum(-1).max() > MARGIN * LARGEST_SUM:
                raise EndsProcess(
                    f"SOFTMAX in TFLite Micro and in TFLite's portable kernels ends the process if "
                    f"exponentials add up to 512. The {scores.shape[-1]} scores of an example are "
                    f"nearly equal, as in an untrained model. Use trained weights or "
                    f"kernels='xnnpack', or leave the last softmax out of the model."
                )


class TokenIdCheck:
    """Finds token ids beyond the rows of an Embedding.

    LiteRT's error does not name the input, and TFLite Micro reads invalid memory.
    """

    def __init__(self, graph: FileGraph) -> None:
        names = {tensor.index: name for name, tensor in graph.inputs.items()}
        self.rows: dict[str, int] = {}
        """Maps each input of token ids to the number of rows of its smallest Embedding."""
        for operation in graph.operations:
            if operation.kernel != "GATHER" or graph.options(operation).axis != 0:
                continue
            table, index = operation.inputs[:2]
            while (source := graph.producers.get(index)) and source.kernel in KEEPS_IDS:
                index = source.inputs[0]
            if index in names and table not in graph.producers and table not in names:
                rows = int(graph.tensors[table].shape[0])
                self.rows[names[index]] = min(rows, self.rows.get(names[index], rows))

    def check(self, inputs: dict[str, NDArray]) -> None:
        """Raises a `ValueError` if the Embedding has no row for a token id."""
        for name, rows in self.rows.items():
            ids = np.trunc(inputs[name])
            if (beyond := ids[(ids < 0) | (ids >= rows)]).size:
                raise ValueError(
                    f"Token id {int(beyond[0])} of input '{name}' is beyond the Embedding's {rows} "
                    f"rows. Ids must be 0 to {rows - 1}."
                )
