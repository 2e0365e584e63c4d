"""Runs TFLite files in TFLite's interpreter. No other module uses the interpreter."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import platform
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keras_qat.arithmetic.kernel_families import FAMILIES, XNNPACK
from keras_qat.io.data import show_progress
from keras_qat.tflite.input_checks import SoftmaxCheck, TokenIdCheck
from keras_qat.tflite.reader import FileGraph
from keras_qat.tflite.schema import describe_damage, read_contents, unpack

Kernels = Literal["xnnpack", "xnnpack_arm64", "optimized", "reference", "tflm"]

KERNELS: dict[str, str] = {
    "xnnpack": "AUTO",
    "xnnpack_arm64": "AUTO",
    "optimized": "BUILTIN_WITHOUT_DEFAULT_DELEGATES",
    "reference": "BUILTIN_REF",
}
"""Maps names of kernels to names in `OpResolverType`. With "AUTO", XNNPACK runs most operators, and
optimized kernels run the rest. "tflm" is missing, because `micro_interpreter` runs it."""

Runtime = Literal["ai-edge-litert", "tensorflow", "tflite-runtime"]

RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)
"""Packages that contain TFLite's interpreter, in order of preference."""


def _import_interpreter(runtime: Runtime | None) -> tuple[ModuleType, str]:
    """Import an interpreter. Return its module, and the name and version of the package."""
    if runtime not in (None, *RUNTIMES):
        raise ValueError(f"runtime={runtime!r}: use one of {', '.join(map(repr, RUNTIMES))}.")
    for name in RUNTIMES if runtime is None else (runtime,):
        with contextlib.suppress(ImportError):
            if name == "tensorflow":
                module = importlib.import_module("tensorflow").lite
            else:
                module = importlib.import_module(f"{name.replace('-', '_')}.interpreter")
            try:
                version = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:  # The build has another name.
                version = ""
            return module, f"{name} {version}".rstrip()
    raise ImportError(f"runtime={runtime!r} is not installed: pip install {runtime}.")


class Refusal(ValueError):
    """Raised if an interpreter has no kernel for an operator of a file, or rejects the operator."""


class FileInterpreter:
    """A TFLite file in an interpreter. Quantizes float inputs, but does not dequantize outputs.

    Args:
        file: path or contents of the file.
        kernels: the kernels that run the file: "xnnpack" (as on phones), "optimized" (TFLite's
            optimized kernels) or "reference" (TFLite's portable kernels).
        runtime: one of `RUNTIMES`. The default is the first of them that is installed.
        keeps_tensors: whether inner tensors can be read after a run.
        threads: number of threads.
        is_checked: True if the file is known to be valid. `read_file` then does not check it.

    Raises:
        ValueError: if this is not a TFLite file, `kernels` is unknown, or a kernel is missing.
        ImportError: if the runtime is not installed.
    """

    def __init__(
        self,
        file: str | os.PathLike[str] | bytes,
        kernels: str = "xnnpack",
        runtime: Runtime | None = None,
        keeps_tensors: bool = False,
        threads: int = 1,
        is_checked: bool = False,
    ) -> None:
        if kernels not in KERNELS:
            raise ValueError(
                f"kernels={kernels!r}: use one of {', '.join(map(repr, get_args(Kernels)))}."
            )
        family = FAMILIES.get(kernels, XNNPACK)
        if family.neon and platform.machine() not in ("aarch64", "arm64"):
            raise ValueError(
                f"kernels={kernels!r} run on 64-bit ARM only. Here, simulate(kernels={kernels!r}) "
                f"computes their quantized values."
            )
        contents = read_contents(file)
        graph = FileGraph(unpack(contents) if is_checked else contents)
        self.inputs, self.outputs = graph.inputs, graph.outputs
        """Maps input and output names in the file's signature to tensors."""
        module, self.runtime = _import_interpreter(runtime)
        resolvers = getattr(module, "OpResolverType", None) or module.experimental.OpResolverType
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self.interpreter = module.Interpreter(
                    model_content=contents,
                    num_threads=threads,
                    experimental_preserve_all_tensors=keeps_tensors,
                    experimental_op_resolver_type=getattr(resolvers, KERNELS[kernels]),
                )
            except (ValueError, RuntimeError) as error:
                if "builtin opcode" in str(error):
                    raise Refusal(
                        f"{module.__name__} has no {kernels} kernel for an operator of this file: "
                        f"{str(error).splitlines()[0]}"
                    ) from error
                raise ValueError(describe_damage(error)) from error
        self.kernels = kernels
        self._checks: list[SoftmaxCheck | TokenIdCheck] = [TokenIdCheck(graph)]
        if family.softmax == "fixed_point":
            self._checks.append(create_softmax_check(graph, contents))
        # Files store unknown sizes as 1. Kernels may refuse this size.
        if not any(-1 in tensor.shape[1:] for tensor in self.inputs.values()):
            with self._explain_refusals():
                self.interpreter.allocate_tensors()
        self.size = len(contents)
        self._shapes: dict[str, tuple[int, ...]] = {}

    @contextlib.contextmanager
    def _explain_refusals(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise ValueError(
                f"The {self.kernels} kernels refuse this TFLite file. "
                f"keras_qat.targets.problems(file, 'xnnpack') lists the operators without a LiteRT "
                f"kernel. If the file was damaged or changed, export it again. "
                f"The interpreter's error: {str(error).strip()}"
            ) from error

    def operations(self) -> list[tuple[str, list[np.dtype], list[np.dtype]]]:
        """Lists the name, the input types and the output types of each operator."""
        details = self.interpreter.get_tensor_details()
        types = {detail["index"]: np.dtype(detail["dtype"]) for detail in details}
        return [
            (
                operation["op_name"],
                [types[index] for index in operation["inputs"] if index >= 0],
                [types[index] for index in operation["outputs"] if index >= 0],
            )
            for operation in self.interpreter._get_ops_details()
            if operation["op_name"] != "DELEGATE"
        ]

    @property
    def batch_size(self) -> int | None:
        """The fixed batch size of the file, or None for any batch size."""
        sizes = [tensor.shape[0] for tensor in self.inputs.values()]
        return max((size for size in sizes if size > 0), default=None)

    def run(
        self, inputs: dict[str, NDArray], batch: int = 32, verbose: int = 0
    ) -> dict[str, NDArray]:
        """Runs any number of examples in batches. Outputs are not dequantized."""
        count, fixed = len(next(iter(inputs.values()))), self.batch_size
        if fixed is not None and count % fixed == 0:
            batch = fixed
        results = [
            self.run_once({name: array[start : start + batch] for name, array in inputs.items()})
            for start in show_progress(range(0, count, batch), "The file", verbose)
        ]
        return {name: np.concatenate([result[name] for result in results]) for name in self.outputs}

    def reset_states(self) -> None:
        """Sets the states of recurrent layers, which are kept between runs, to zeros."""
        self.interpreter.reset_all_variables()

    def run_once(self, inputs: dict[str, NDArray]) -> dict[str, NDArray]:
        """Runs the file once, with all examples in one batch."""
        for check in self._checks:
            check.check(inputs)
        for name, values in inputs.items():
            if self._shapes.get(name) != values.shape:
                self.interpreter.resize_tensor_input(self.inputs[name].index, values.shape)
                self._shapes[name] = values.shape
        with self._explain_refusals():
            self.interpreter.allocate_tensors()
            for name, values in inputs.items():
                tensor = self.inputs[name]
                q = quantize(values, tensor.dtype, tensor.scale, tensor.zero_point)
                self.interpreter.set_tensor(tensor.index, q)
            self.interpreter.invoke()
        return {
            name: self.interpreter.get_tensor(tensor.index) for name, tensor in self.outputs.items()
        }


def create_softmax_check(graph: FileGraph, contents: bytes) -> SoftmaxCheck:
    """Creates a `SoftmaxCheck` that runs the file in a separate interpreter."""
    return SoftmaxCheck(graph, lambda: FileInterpreter(contents, keeps_tensors=True))


def quantize(values: NDArray, dtype: np.dtype, scale: float, zero_point: int) -> NDArray:
    """Casts values to `dtype`. Values of other types are first quantized, unless the scale is 0."""
    if dtype.kind not in "iu" or scale == 0 or values.dtype == dtype:
        return np.asarray(values, dtype)
    limits = np.iinfo(dtype)
    # float32 is not precise enough for halves at the ends of 16 bits.
    precise = values.astype(np.float64) if limits.bits == 16 else values
    q = np.floor(precise / np.float32(scale) + np.float32(0.5)) + zero_point
    return np.clip(q, limits.min, limits.max).astype(dtype)


def to_pixels(values: NDArray, scale: ArrayLike, offset: ArrayLike) -> NDArray[np.uint8]:
    """Converts model inputs, which are `scale * pixel + offset`, back to pixels from 0 to 255."""
    scale, offset = (np.asarray(value, np.float64) for value in (scale, offset))
    pixels = (values.astype(np.float64) - offset) / np.where(scale == 0, np.inf, scale)
    return np.clip(np.floor(pixels + 0.5), 0, 255).astype(np.uint8)


def dequantize(q: NDArray, scale: float, zero_point: int) -> NDArray:
    """Converts quantized values to float. Values with a scale of 0 are returned unchanged."""
    if q.dtype.kind not in "iu" or scale == 0:
        return q
    return (q.astype(np.float32) - zero_point) * np.float32(scale)
