"""Running files in TFLite Micro: the one place that knows its interpreter.

It comes with the package `tflite-micro`, the extra `keras-qat[micro]`, and computes with the
reference kernels that microcontrollers have where no others are built in.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_qat.io.progress import shown
from keras_qat.tflite.interpreter import FileInterpreter, Kernels, Runtime, to_codes
from keras_qat.tflite.reader import FileGraph, Tensor
from keras_qat.tflite.schema import contents_of

__all__ = ["MicroInterpreter", "Runner", "open_file"]

ARENA = 64
"""The arena's size in multiples of the file, where tensors at once are more than it usually is."""

SMALLEST = 1 << 20
"""Bytes that the arena has at least."""


class MicroInterpreter:
    """A TFLite file in TFLite Micro: takes and gives real numbers, or codes.

    Args:
        file: its path or contents; of a batch whose size is known, `export_tflite(batch_size=1)`.

    Raises:
        ImportError: without the package `tflite-micro`.
        ValueError: if TFLite Micro lacks an operator or refuses the file.
    """

    kernels = "tflm"

    def __init__(self, file: str | os.PathLike[str] | bytes) -> None:
        self.contents = contents_of(file)
        graph = FileGraph(self.contents)
        self._inputs, self._outputs = graph.inputs, graph.outputs
        self.size = len(self.contents)
        is_open = [name for name, each in self._inputs.items() if -1 in each.shape]
        if is_open:
            raise ValueError(
                f"TFLite Micro takes no open sizes; the input '{is_open[0]}' is of the shape "
                f"{list(self._inputs[is_open[0]].shape)}. Export with batch_size=1, and a model "
                f"whose keras.Input has all other sizes."
            )
        places = {index: place for place, index in enumerate(graph.ends("inputs"))}
        self._places = {name: places[each.index] for name, each in self._inputs.items()}
        places = {index: place for place, index in enumerate(graph.ends("outputs"))}
        self._given = {name: places[each.index] for name, each in self._outputs.items()}
        self._interpreter = self._loaded(max(SMALLEST, ARENA * self.size))
        self.runtime = f"tflite-micro {importlib.metadata.version('tflite-micro')}"

    def _loaded(self, arena: int) -> Any:
        try:
            from tflite_micro.python.tflite_micro import runtime
        except ImportError as error:
            raise ImportError(
                'kernels="tflm" needs TFLite Micro: pip install --pre tflite-micro.'
            ) from error
        with _said() as said:
            try:
                return runtime.Interpreter.from_bytes(self.contents, arena_size=arena)
            except RuntimeError as error:
                failed = error
        raise ValueError(f"TFLite Micro refuses this file: {_joined(said) or failed}") from failed

    def arena_size(self) -> int:
        """Bytes that the interpreter has taken of its arena, as it records them.

        With the pointers of this computer: a chip of 32 bits keeps somewhat less. While it prepares
        the file it takes more for a moment, up to half as much again in small ones.
        """
        with _said() as said:
            self._interpreter.print_allocations()
        (found,) = re.findall(r"Arena allocation total (\d+) bytes", "\n".join(said))
        return int(found)

    @property
    def inputs(self) -> dict[str, dict[str, Any]]:
        """Name of each input in the signature -> its details, as in `FileInterpreter.inputs`."""
        return {name: _details(each) for name, each in self._inputs.items()}

    @property
    def outputs(self) -> dict[str, dict[str, Any]]:
        """Name of each output in the file's signature -> its details."""
        return {name: _details(each) for name, each in self._outputs.items()}

    @property
    def batch_size(self) -> int:
        """How many examples the file takes at a time."""
        return int(next(iter(self._inputs.values())).shape[0])

    def _invoke(self) -> None:
        with _said() as said:
            try:
                self._interpreter.invoke()
                return
            except RuntimeError as error:
                failed = error
        raise ValueError(f"TFLite Micro can't run this file: {_joined(said) or failed}") from failed

    def reset_states(self) -> None:
        """Writes zeros into the states that operators keep from one run to the next."""
        self._interpreter.reset()

    def run_once(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """As `run`, in silence."""
        return self.run(inputs)

    def run(
        self, inputs: dict[str, np.ndarray], batch: int = 1, verbose: int = 0
    ) -> dict[str, np.ndarray]:
        """The raw outputs for real or integer inputs, so many at a time as the file takes.

        Args:
            inputs: an array for each input, any multiple of those.
            batch: as of `FileInterpreter.run`; the file says it.
            verbose: 1 shows progress.
        """
        count, size = len(next(iter(inputs.values()))), self.batch_size
        if count % size:
            raise ValueError(f"The file takes {size} examples at a time; {count} are given.")
        found: dict[str, list[np.ndarray]] = {name: [] for name in self._outputs}
        for turn in shown(range(count // size), "The file", verbose):
            for name, tensor in self._inputs.items():
                rows = tensor.shape[0]
                given = inputs[name][turn * rows : (turn + 1) * rows]
                codes = to_codes(given, tensor.dtype, tensor.scale, tensor.zero_point)
                self._interpreter.set_input(np.ascontiguousarray(codes), self._places[name])
            self._invoke()
            for name, parts in found.items():
                parts.append(np.array(self._interpreter.get_output(self._given[name])))
        return {
            name: np.concatenate(parts) if len(parts) > 1 else parts[0]
            for name, parts in found.items()
        }


@contextlib.contextmanager
def _said() -> Iterator[list[str]]:
    """The lines that the interpreter writes to the process' standard error, which it alone has."""
    lines: list[str] = []
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(kept, 2)
            os.close(kept)
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


Runner = FileInterpreter | MicroInterpreter


def open_file(
    file: str | os.PathLike[str] | bytes, kernels: Kernels, runtime: Runtime | None = None
) -> Runner:
    """A TFLite file in the interpreter that has these kernels.

    Raises:
        ValueError, ImportError: as of `FileInterpreter` and `MicroInterpreter`.
    """
    if kernels != "tflm":
        return FileInterpreter(file, kernels, runtime)
    if runtime is not None:
        raise ValueError(f"runtime={runtime!r} has not the kernels 'tflm': leave it out.")
    return MicroInterpreter(file)
