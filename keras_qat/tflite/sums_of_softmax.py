"""Softmax of 8 bits in fixed point: whose exponentials add up to what ends the process.

TFLite's portable kernel and TFLite Micro's assert that the sum is below 512, which 511 numbers
cannot reach. More are computed by XNNPACK first, which looks exponentials up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from keras_qat.tflite.reader import FileGraph, Tensor

if TYPE_CHECKING:
    from keras_qat.tflite.interpreter import FileInterpreter

LARGEST = 511.0
"""Of a sum, and of numbers that cannot add up to more, as each exponential is 1 at most."""

MARGIN = 0.97
"""For scores of XNNPACK that are a step off those of the kernel asked for."""


class EndsProcess(ValueError):
    """Inputs with which a kernel would end the process."""


class SumsOfSoftmax:
    """Tells which inputs of a file would end the process in TFLite's fixed-point softmax.

    Args:
        contents: the file.
    """

    def __init__(self, contents: bytes) -> None:
        self.contents = contents
        graph = FileGraph(contents)
        self.scores: list[Tensor] = [
            tensor
            for operation in graph.operations
            if operation.kernel == "SOFTMAX"
            and (tensor := graph.tensors[operation.inputs[0]]).type == "int8"
            and tensor.shape[-1] > LARGEST
        ]
        self._interpreter: FileInterpreter | None = None

    def check(self, inputs: dict[str, np.ndarray]) -> None:
        """Raises `EndsProcess` if the exponentials of a softmax add up to 512 or nearly so."""
        if not self.scores:
            return
        if self._interpreter is None:
            from keras_qat.tflite.interpreter import FileInterpreter

            self._interpreter = FileInterpreter(self.contents, keeps_tensors=True)
        self._interpreter.run_once(inputs)
        for scores in self.scores:
            codes = self._interpreter.interpreter.get_tensor(scores.index).astype(np.float64)
            below = (codes - codes.max(-1, keepdims=True)) * scores.scale
            if np.exp(below).sum(-1).max() > MARGIN * LARGEST:
                raise EndsProcess(
                    f"TFLite's portable kernel for SOFTMAX, as TFLite Micro's, ends the process "
                    f"where exponentials add up to 512: these {scores.shape[-1]} scores are "
                    f"nearly equal, as those of a model that is not trained. Use trained weights, "
                    f"kernels='xnnpack', or leave the last softmax out of the model."
                )
