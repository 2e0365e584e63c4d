"""Running TFLite files: the one place that knows the interpreter."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["TFLiteModel"]


def _interpreter_module() -> Any:
    try:
        from ai_edge_litert import interpreter
    except ImportError:
        import tensorflow as tf

        return tf.lite
    return interpreter


class TFLiteModel:
    """A TFLite file that takes and gives real numbers, or codes.

    Args:
        file: its path or contents.
        xnnpack: whether to run with XNNPACK (as phones do) or TFLite's own kernels.
        threads: how many threads.

    Raises:
        ValueError: if it is not a TFLite file.
    """

    def __init__(
        self, file: str | os.PathLike[str] | bytes, xnnpack: bool = True, threads: int = 1
    ) -> None:
        contents = file if isinstance(file, bytes) else Path(file).read_bytes()
        if contents[4:8] != b"TFL3":
            name = "The given bytes are" if isinstance(file, bytes) else f"{file} is"
            raise ValueError(f"{name} no TFLite file. Pass what keras_qat.export_tflite wrote.")
        module = _interpreter_module()
        resolver = module.OpResolverType if hasattr(module, "OpResolverType") else None
        if resolver is None:
            resolver = module.experimental.OpResolverType
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self.interpreter = module.Interpreter(
                    model_content=contents,
                    num_threads=threads,
                    experimental_op_resolver_type=resolver.AUTO
                    if xnnpack
                    else resolver.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
                )
            except (ValueError, RuntimeError) as error:
                raise ValueError(
                    f"The TFLite file is damaged or cut short ({error}). Export it again."
                ) from error
        self.interpreter.allocate_tensors()
        self.size = len(contents)

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

    def run(self, inputs: dict[str, np.ndarray], batch: int = 32) -> dict[str, np.ndarray]:
        """The raw outputs (codes, if they are integers) for real or integer inputs.

        Args:
            inputs: an array for each input, any number of examples.
            batch: how many examples are run at a time.
        """
        count = len(next(iter(inputs.values())))
        details, outputs = self.inputs, self.outputs
        shapes: dict[str, tuple[int, ...]] = {}
        results: dict[str, list[np.ndarray]] = {name: [] for name in outputs}
        for start in range(0, count, batch):
            chunk = {name: each[start : start + batch] for name, each in inputs.items()}
            for name, values in chunk.items():
                index = details[name]["index"]
                if shapes.get(name) != values.shape:
                    self.interpreter.resize_tensor_input(index, values.shape)
                    shapes[name] = values.shape
            self.interpreter.allocate_tensors()
            for name, values in chunk.items():
                self.interpreter.set_tensor(details[name]["index"], to_codes(values, details[name]))
            self.interpreter.invoke()
            for name, detail in outputs.items():
                results[name].append(self.interpreter.get_tensor(detail["index"]).copy())
        return {name: np.concatenate(result) for name, result in results.items()}


def to_codes(values: np.ndarray, detail: dict[str, Any]) -> np.ndarray:
    """Real numbers as codes of a tensor; integers of its type, and float tensors, as they are."""
    dtype = np.dtype(detail["dtype"])
    scale, zero_point = detail["quantization"]
    if dtype.kind not in "iu" or scale == 0 or values.dtype == dtype:
        return np.asarray(values, dtype)
    limits = np.iinfo(dtype)
    codes = np.floor(values / np.float32(scale) + np.float32(0.5)) + zero_point
    return np.clip(codes, limits.min, limits.max).astype(dtype)


def to_values(codes: np.ndarray, detail: dict[str, Any]) -> np.ndarray:
    """Codes of a tensor as real numbers."""
    scale, zero_point = detail["quantization"]
    if np.dtype(detail["dtype"]).kind not in "iu" or scale == 0:
        return codes
    return (codes.astype(np.float32) - zero_point) * np.float32(scale)
