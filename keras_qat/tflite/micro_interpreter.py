"""Runs files in TFLite Micro's interpreter. No other module uses it.

The interpreter is in the package `tflite-micro`, the extra `keras-qat[micro]`. It has the reference
kernels, which microcontrollers run unless others are built in.
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

from keras_qat.messages import counted
from keras_qat.tflite.interpreter import FileInterpreter, Refusal, Runtime, to_codes
from keras_qat.tflite.reader import FileGraph, Tensor
from keras_qat.tflite.schema import contents_of
from keras_qat.tflite.sums_of_softmax import EndsProcess, SumsOfSoftmax
from keras_qat.tflite.token_ids import TokenIds

ARENA = 64
"""Room for what kernels keep, in multiples of the file's size."""

SMALLEST, LARGEST = 1 << 20, (1 << 31) - 16
"""Least such room in bytes, and the largest arena: from 2 GiB on TFLite Micro ends the process."""


class MicroInterpreter(FileInterpreter):
    """A TFLite file in TFLite Micro: takes real numbers or integers, returns the raw outputs.

    Args:
        file: path or contents of a file with known sizes, `export_tflite(batch_size=1)`.

    Raises:
        ImportError: without the package `tflite-micro`.
        Refusal: if TFLite Micro lacks an operator or refuses the file.
        ValueError: if the file has open sizes.
    """

    kernels = "tflm"

    def __init__(self, file: str | os.PathLike[str] | bytes) -> None:
        self.contents = contents_of(file)
        graph = FileGraph(self.contents)
        self._inputs, self._outputs = graph.inputs, graph.outputs
        self.size = len(self.contents)
        is_open = [name for name, tensor in self._inputs.items() if -1 in tensor.shape]
        if is_open:
            raise ValueError(
                f"TFLite Micro takes no open sizes, but the input '{is_open[0]}' has the shape "
                f"{list(self._inputs[is_open[0]].shape)}. Export with batch_size=1, and "
                f"quantize keras.Model(x, model(x)), where x is a keras.Input that has all other "
                f"sizes."
            )
        positions = {index: i for i, index in enumerate(graph.ends("inputs"))}
        self._input_positions = {name: positions[t.index] for name, t in self._inputs.items()}
        positions = {index: i for i, index in enumerate(graph.ends("outputs"))}
        self._output_positions = {name: positions[t.index] for name, t in self._outputs.items()}
        tensors = sum(abs(math.prod(t.shape)) * t.dtype.itemsize for t in graph.tensors)
        self._interpreter = self._load(min(max(SMALLEST, ARENA * self.size) + tensors, LARGEST))
        self._sums, self._ids = SumsOfSoftmax(self.contents), TokenIds(self.contents)
        with contextlib.suppress(EndsProcess):
            # Some operators are refused only once they run, as LOG of integers.
            self.run_once({name: np.zeros(t.shape, t.dtype) for name, t in self._inputs.items()})
        self.reset_states()
        self.runtime = f"tflite-micro {importlib.metadata.version('tflite-micro')}"

    def _load(self, arena: int) -> Any:
        try:
            from tflite_micro.python.tflite_micro import runtime
        except ImportError as error:
            raise ImportError(
                'kernels="tflm" needs TFLite Micro: pip install --pre tflite-micro.'
            ) from error
        with _stderr_lines() as lines:
            try:
                return runtime.Interpreter.from_bytes(self.contents, arena_size=arena)
            except RuntimeError as error:
                failed = error
        raise Refusal(f"TFLite Micro refuses this file: {_joined(lines) or failed}") from failed

    def arena_size(self) -> int:
        """Returns the bytes of the arena that the interpreter uses, as it records them.

        The figure is for this computer's pointers: a 32-bit chip needs slightly less. While the
        interpreter prepares a small file it uses up to half as much again.
        """
        with _stderr_lines() as lines:
            self._interpreter.print_allocations()
        (size,) = re.findall(r"Arena allocation total (\d+) bytes", "\n".join(lines))
        return int(size)

    @property
    def inputs(self) -> dict[str, dict[str, Any]]:
        """Name of each input in the file's signature -> details, as `FileInterpreter` has them."""
        return {name: _details(tensor) for name, tensor in self._inputs.items()}

    @property
    def outputs(self) -> dict[str, dict[str, Any]]:
        """Name of each output in the file's signature -> details."""
        return {name: _details(tensor) for name, tensor in self._outputs.items()}

    def _invoke(self) -> None:
        with _stderr_lines() as lines:
            try:
                self._interpreter.invoke()
                return
            except RuntimeError as error:
                failed = error
        raise Refusal(f"TFLite Micro refuses this file: {_joined(lines) or failed}") from failed

    def reset_states(self) -> None:
        """Resets the states that operators keep between runs to zeros."""
        self._interpreter.reset()

    def run_once(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Runs the file without showing progress, on a multiple of its batch size."""
        # Inputs of a piece of a model may have other sizes than the batch in front.
        if any(np.shape(inputs[name]) != tensor.shape for name, tensor in self._inputs.items()):
            count, size = len(next(iter(inputs.values()))), self.batch_size
            assert size is not None
            if count % size:
                message = f"The file takes {counted(size, 'example')} at a time, not {count}."
                raise ValueError(message)
            if count > size:
                return self.run(inputs)
        if self._sums:
            self._sums.check(inputs)
        if self._ids:
            self._ids.check(inputs)
        for name, tensor in self._inputs.items():
            codes = to_codes(inputs[name], tensor.dtype, tensor.scale, tensor.zero_point)
            self._interpreter.set_input(np.asarray(codes, order="C"), self._input_positions[name])
        self._invoke()
        return {
            name: np.array(self._interpreter.get_output(position))
            for name, position in self._output_positions.items()
        }


@contextlib.contextmanager
def _stderr_lines() -> Iterator[list[str]]:
    """Runs a block with the process' standard error captured, and yields its lines."""
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


def _joined(lines: list[str]) -> str:
    return "; ".join(dict.fromkeys(line.strip() for line in lines if line.strip()))


def _details(tensor: Tensor) -> dict[str, Any]:
    return {
        "index": tensor.index,
        "dtype": tensor.dtype.type,
        "shape_signature": np.array(tensor.shape),
        "quantization": (tensor.scale, tensor.zero_point),
    }


def open_file(
    file: str | os.PathLike[str] | bytes, kernels: str, runtime: Runtime | None = None
) -> FileInterpreter:
    """Opens a TFLite file in the interpreter that has these kernels.

    Raises:
        ValueError, ImportError: as for `FileInterpreter` and `MicroInterpreter`.
    """
    if kernels != MicroInterpreter.kernels:
        return FileInterpreter(file, kernels, runtime)
    if runtime is not None:
        raise ValueError(f"runtime={runtime!r} has no kernels 'tflm': leave runtime out.")
    return MicroInterpreter(file)
