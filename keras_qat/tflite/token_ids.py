"""Checks token ids before kernels read rows that a table does not have."""

from __future__ import annotations

import numpy as np

from keras_qat.tflite.reader import FileGraph

KEEPS_IDS = ("CAST", "RESHAPE")
"""Operators that an id passes on the way from an input to its table."""


class TokenIds:
    """The inputs of a file whose values are rows of a table.

    LiteRT refuses other ids without a name, and TFLite Micro reads what lies behind the table.

    Args:
        contents: the file's contents.
    """

    def __init__(self, contents: bytes) -> None:
        graph = FileGraph(contents)
        names = {tensor.index: name for name, tensor in graph.inputs.items()}
        self.rows: dict[str, int] = {}
        """Name of each such input -> the rows of its smallest table."""
        for operation in graph.operations:
            if operation.kernel != "GATHER" or graph.options(operation).axis != 0:
                continue
            table, index = operation.inputs[:2]
            while (before := graph.producers.get(index)) and before.kernel in KEEPS_IDS:
                index = before.inputs[0]
            if index in names and table not in graph.producers and table not in names:
                rows = int(graph.tensors[table].shape[0])
                self.rows[names[index]] = min(rows, self.rows.get(names[index], rows))

    def check(self, inputs: dict[str, np.ndarray]) -> None:
        """Raises a `ValueError` if an id is beyond its table."""
        for name, rows in self.rows.items():
            ids = np.trunc(inputs[name])
            if (beyond := ids[(ids < 0) | (ids >= rows)]).size:
                raise ValueError(
                    f"Token id {int(beyond[0])} of input '{name}' is beyond the Embedding's {rows} "
                    f"rows: ids are 0 to {rows - 1}."
                )
