"""Runs files in TFLite Micro's interpreter. No other module uses this interpreter.

The package `tflite-micro` (`keras-qat[micro]`) contains the interpreter and reference kernels,
which microcontrollers run by default. The arena is the memory for tensors and kernels.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_qat.messages import pluralize
from keras_qat.tflite.input_checks import EndsProcess, TokenIdCheck
from keras_qat.tflite.interpreter import (
    FileInterpreter,
    Refusal,
    Runtime,
    create_softmax_check,
    quantize,
)
from keras_qat.tflite.reader import FileGraph
from keras_qat.tflite.schema import read_contents

ARENA = 64
"""Memory for kernels, as a multiple of the file's size. Tensors need additional memory."""

SMALLEST, LARGEST = 1 << 20, (1 << 31) - 16
"""Minimum memory for kernels, and maximum arena, in bytes. TFLite Micro aborts at 2 GiB."""


class MicroInterpreter(FileInterpreter):
    """A TFLite file in TFLite Micro. Quantizes float inputs, but does not dequantize outputs.

    Raises:
        ImportError: without the package `tflite-micro`.
        Refusal: if TFLite Micro lacks an operator or rejects the file.
        ValueError: if the file has unknown sizes. `export_tflite(batch_size=1)` avoids them.
    """

    kernels = "tflm"

    def __init__(self, file: str | os.PathLike[str] | bytes) -> None:
        self.contents = read_contents(file)
        graph = FileGraph(self.contents)
        self.inputs, self.outputs = graph.inputs, graph.outputs
        self.size = len(self.contents)
        for name, tensor in self.inputs.items():
            if -1 in tensor.shape:
                advice = tensor.advise_on_sizes()
                raise ValueError(
                    f"TFLite Micro needs fixed sizes, but the input '{name}' has the shape "
                    f"{list(tensor.shape)}. {advice[0].upper()}{advice[1:]}."
                )
        positions = {index: i for i, index in enumerate(graph.ends("inputs"))}
        self._input_positions = {name: positions[t.index] for name, t in self.inputs.items()}
        positions = {index: i for i, index in enumerate(graph.ends("outputs"))}
        self._output_positions = {name: positions[t.index] for name, t in self.outputs.items()}
        tensors = sum(abs(math.prod(t.shape)) * t.dtype.itemsize for t in graph.tensors)
        self._interpreter = self._load(min(max(SMALLEST, ARENA * self.size) + tensors, LARGEST))
        self._checks = [create_softmax_check(graph, self.contents), TokenIdCheck(graph)]
        with contextlib.suppress(EndsProcess):
            # Some operators are refused only when they run, such as LOG of integers.
            self.run_once({name: np.zeros(t.shape, t.dtype) for name, t in self.inputs.items()})
        self.reset_states()
        self.runtime = f"tflite-micro {importlib.metadata.version('tflite-micro')}"

    def _load(self, arena: int) -> Any:
        try:
            from tflite_micro.python.tflite_micro import runtime
        except ImportError as error:
            raise ImportError(
                'kernels="tflm" needs TFLite Micro: pip install --pre tflite-micro.'
            ) from error
        with _explain_refusals():
            return runtime.Interpreter.from_bytes(self.contents, arena_size=arena)

    def arena_size(self) -> int:
        """Returns the size of the arena in bytes, as the interpreter reports it.

        A 32-bit chip needs slightly less, because pointers are smaller there. While the interpreter
        prepares a small file, it uses up to 1.5 times this size.
        """
        with _capture_stderr() as lines:
            self._interpreter.print_allocations()
        (size,) = re.findall(r"Arena allocation total (\d+) bytes", "\n".join(lines))
        return int(size)

    def reset_states(self) -> None:
        self._interpreter.reset()

    def run_once(self, inputs: dict[str, NDArray]) -> dict[str, NDArray]:
        """Runs all examples. Their number must be a multiple of the file's batch size."""
        # In a segment of a file, the first axis of an input is not always the batch.
        if any(np.shape(inputs[name]) != tensor.shape for name, tensor in self.inputs.items()):
            count, size = len(next(iter(inputs.values()))), self.batch_size
            assert size is not None
            if count % size:
                message = f"The file computes {pluralize(size, 'example')} at a time, not {count}."
                raise ValueError(message)
            if count > size:
                return self.run(inputs)
        for check in self._checks:
            check.check(inputs)
        for name, tensor in self.inputs.items():
            q = quantize(inputs[name], tensor.dtype, tensor.scale, tensor.zero_point)
            self._interpreter.set_input(np.asarray(q, order="C"), self._input_positions[name])
        with _explain_refusals():
            self._interpreter.invoke()
        return {
            name: np.array(self._interpreter.get_output(position))
            for name, position in self._output_positions.items()
        }


@contextlib.contextmanager
def _explain_refusals() -> Iterator[None]:
    """Run a `with` block. If it fails, raise a `Refusal` with TFLite Micro's explanation."""
    with _capture_stderr() as lines:
        try:
            yield
            return
        except RuntimeError as error:
            failed = error
    reasons = "; ".join(dict.fromkeys(line.strip() for line in lines if line.strip()))
    raise Refusal(f"TFLite Micro refuses this file: {reasons or failed}") from failed


@contextlib.contextmanager
def _capture_stderr() -> Iterator[list[str]]:
    """Capture standard error, also from C++. The list contains the lines after the `with` block."""
    lines: list[str] = []
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()


def open_file(
    file: str | os.PathLike[str] | bytes,
    kernels: str,
    runtime: Runtime | None = None,
    is_checked: bool = False,
) -> FileInterpreter:
    """Opens a TFLite file in TFLite's interpreter, or in TFLite Micro if `kernels` is "tflm".

    Args: as for `FileInterpreter`.

    Raises:
        ValueError, ImportError: as for `FileInterpreter` and `MicroInterpreter`.
    """
    if kernels != MicroInterpreter.kernels:
        return FileInterpreter(file, kernels, runtime, is_checked=is_checked)
    if runtime is not None:
        raise ValueError(f"kernels='tflm' does not support runtime={runtime!r}. Leave runtime out.")
    return MicroInterpreter(file)
