"""Running TFLite files: the one place that knows the interpreter."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import warnings
from collections.abc import Iterator
from typing import Any, Literal, get_args

import numpy as np

from keras_qat.io.progress import shown
from keras_qat.tflite.schema import contents_of

__all__ = ["KERNELS", "FileInterpreter", "Kernels", "Runtime", "to_codes", "to_pixels", "to_values"]

Kernels = Literal["xnnpack", "optimized", "reference", "tflm"]

KERNELS: dict[str, str] = {
    "xnnpack": "AUTO",
    "optimized": "BUILTIN_WITHOUT_DEFAULT_DELEGATES",
    "reference": "BUILTIN_REF",
}
"""Which kernels compute a file -> the interpreter's name for them. XNNPACK where it has one, as
on phones; TFLite's own optimized ones; its reference ones. "tflm" is `micro`'s interpreter."""


Runtime = Literal["ai-edge-litert", "tensorflow", "tflite-runtime"]

RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)
"""Packages that have TFLite's interpreter: by default the first one that is installed."""


def _module_of(runtime: Runtime) -> Any:
    if runtime == "tensorflow":
        import tensorflow as tf

        return tf.lite
    return importlib.import_module(f"{runtime.replace('-', '_')}.interpreter")


def _interpreter_module(runtime: Runtime | None) -> tuple[Any, str]:
    """The interpreter's module, and the name and version of its package."""
    if runtime not in (None, *RUNTIMES):
        raise ValueError(f"runtime={runtime!r}: use one of {', '.join(map(repr, RUNTIMES))}.")
    for name in RUNTIMES if runtime is None else (runtime,):
        with contextlib.suppress(ImportError):
            module = _module_of(name)
            try:
                version = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:  # A build of another name.
                version = ""
            return module, f"{name} {version}".rstrip()
    raise ImportError(f"runtime={runtime!r} is not installed: pip install {runtime}.")


class FileInterpreter:
    """A TFLite file that takes and gives real numbers, or codes.

    Args:
        file: its path or contents.
        kernels: which kernels compute it: "xnnpack" (as on phones), "optimized" (TFLite's own) or
            "reference" (its portable ones).
        runtime: the package whose interpreter runs it, by default the first of `RUNTIMES` that is
            installed.

    Raises:
        ValueError: if it is not a TFLite file, there are no such kernels, or one that it needs is
            not among them.
        ImportError: if the runtime is not installed.
    """

    def __init__(
        self,
        file: str | os.PathLike[str] | bytes,
        kernels: Kernels = "xnnpack",
        runtime: Runtime | None = None,
    ) -> None:
        if kernels not in KERNELS:
            raise ValueError(
                f"kernels={kernels!r}: use one of {', '.join(map(repr, get_args(Kernels)))}."
            )
        contents = contents_of(file)
        module, self.runtime = _interpreter_module(runtime)
        resolvers = getattr(module, "OpResolverType", None) or module.experimental.OpResolverType
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self.interpreter = module.Interpreter(
                    model_content=contents,
                    num_threads=1,
                    experimental_op_resolver_type=getattr(resolvers, KERNELS[kernels]),
                )
            except (ValueError, RuntimeError) as error:
                message = f"The TFLite file is damaged or cut short ({error}). Export it again."
                if "builtin opcode" in str(error):
                    lacking = f"The {kernels} kernels of {module.__name__} lack one for this file"
                    message = f"{lacking}: {str(error).splitlines()[0]}"
                raise ValueError(message) from error
        self.kernels = kernels
        open_sizes = [each["shape_signature"][1:] for each in self.interpreter.get_input_details()]
        if not any(-1 in sizes for sizes in open_sizes):  # Else files say 1, and kernels may not.
            with self._refusals():
                self.interpreter.allocate_tensors()
        self.size = len(contents)
        self._shapes: dict[str, tuple[int, ...]] = {}

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """Says what to do where kernels refuse a file."""
        try:
            yield
        except RuntimeError as error:
            raise ValueError(
                f"The {self.kernels} kernels refuse this TFLite file. "
                f"keras_qat.targets.problems(file, 'xnnpack') names operators that LiteRT has no "
                f"kernel for. If the file was damaged or changed, export it again. "
                f"The interpreter says: {str(error).strip()}"
            ) from error

    @property
    def inputs(self) -> dict[str, dict[str, Any]]:
        """Name of each input in the file's signature -> its details, as the interpreter says."""
        return self._details("inputs", self.interpreter.get_input_details())

    @property
    def outputs(self) -> dict[str, dict[str, Any]]:
        """Name of each output in the file's signature -> its details."""
        return self._details("outputs", self.interpreter.get_output_details())

    def _details(self, end: str, details: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        signatures = self.interpreter._get_full_signature_list()
        if not signatures:
            return {each["name"]: each for each in details}
        by_index = {each["index"]: each for each in details}
        (signature, *_) = signatures.values()
        return {name: by_index[index] for name, index in signature[end].items()}

    def operations(self) -> list[tuple[str, list[np.dtype], list[np.dtype]]]:
        """Each operation's name with the types of the tensors it reads and writes."""
        types = {
            each["index"]: np.dtype(each["dtype"]) for each in self.interpreter.get_tensor_details()
        }
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
        """How many examples the file takes at a time, on which shapes inside of it may depend.

        None: any number.
        """
        sizes = [int(each["shape_signature"][0]) for each in self.inputs.values()]
        return max((size for size in sizes if size > 0), default=None)

    def run(
        self, inputs: dict[str, np.ndarray], batch: int = 32, verbose: int = 0
    ) -> dict[str, np.ndarray]:
        """The raw outputs (codes, if they are integers) for real or integer inputs.

        Args:
            inputs: an array for each input, any number of examples.
            batch: how many examples are run at a time, if the file does not say it.
            verbose: 1 shows progress.
        """
        count, fixed = len(next(iter(inputs.values()))), self.batch_size
        if fixed is not None and count % fixed == 0:
            batch = fixed
        results = [
            self.run_once({name: each[start : start + batch] for name, each in inputs.items()})
            for start in shown(range(0, count, batch), "The file", verbose)
        ]
        return {name: np.concatenate([result[name] for result in results]) for name in self.outputs}

    def reset_states(self) -> None:
        """Writes zeros into the states that operators keep from one run to the next."""
        self.interpreter.reset_all_variables()

    def run_once(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """As `run`, with all of the inputs at a time; the sizes of their axes are free."""
        details = self.inputs
        for name, values in inputs.items():
            index = details[name]["index"]
            if self._shapes.get(name) != values.shape:
                self.interpreter.resize_tensor_input(index, values.shape)
                self._shapes[name] = values.shape
        with self._refusals():
            self.interpreter.allocate_tensors()
            for name, values in inputs.items():
                detail = details[name]
                codes = to_codes(values, np.dtype(detail["dtype"]), *detail["quantization"])
                self.interpreter.set_tensor(detail["index"], codes)
            self.interpreter.invoke()
        return {
            name: self.interpreter.get_tensor(detail["index"]).copy()
            for name, detail in self.outputs.items()
        }


def to_codes(values: np.ndarray, dtype: np.dtype, scale: float, zero_point: int) -> np.ndarray:
    """Real numbers as codes of a tensor; integers of its type, and float tensors, as they are."""
    if dtype.kind not in "iu" or scale == 0 or values.dtype == dtype:
        return np.asarray(values, dtype)
    limits = np.iinfo(dtype)
    # float32 does not tell a half from what is next to it at the ends of 16 bits.
    real = values.astype(np.float64) if limits.bits == 16 else values
    codes = np.floor(real / np.float32(scale) + np.float32(0.5)) + zero_point
    return np.clip(codes, limits.min, limits.max).astype(dtype)


def to_pixels(values: np.ndarray, scale: Any, offset: Any) -> np.ndarray:
    """The pixels, 0 to 255, of a model's inputs that are `scale * pixel + offset`."""
    scale, offset = (np.asarray(each, np.float64) for each in (scale, offset))
    pixels = (values.astype(np.float64) - offset) / np.where(scale == 0, np.inf, scale)
    return np.clip(np.floor(pixels + 0.5), 0, 255).astype(np.uint8)


def to_values(codes: np.ndarray, detail: dict[str, Any]) -> np.ndarray:
    """Codes of a tensor as real numbers."""
    scale, zero_point = detail["quantization"]
    if np.dtype(detail["dtype"]).kind not in "iu" or scale == 0:
        return codes
    return (codes.astype(np.float32) - zero_point) * np.float32(scale)
