"""Predicts with TFLite files: accepts data in any form, and returns float values."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keras_qat.arithmetic.kernel_families import DEFAULT
from keras_qat.io.data import count_batches, pad_batch, read_batches, show_progress
from keras_qat.io.inputs import Input, Inputs, describe_excess, get_pixel_range
from keras_qat.messages import ByName, warn_caller
from keras_qat.tflite.interpreter import FileInterpreter, Kernels, dequantize, quantize, to_pixels
from keras_qat.tflite.metadata import read_input_keys, read_kernels, read_rescalings
from keras_qat.tflite.micro_interpreter import open_file
from keras_qat.tflite.reader import FileGraph, Tensor
from keras_qat.tflite.schema import read_contents


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """An input or output of a TFLite file.

    Attributes:
        shape: the shape, with None for unknown sizes.
        dtype: the type of the entries.
        scale: float value of one step. 0 for a tensor that is not quantized.
        zero_point: the quantized value of 0.
        rescaling: pair `(scale, offset)` that converts pixels to the model's input. None unless
            the input accepts pixels (`export_tflite(rescaling=...)`).
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype
    scale: float
    zero_point: int
    rescaling: tuple[Any, Any] | None = None

    @property
    def is_quantized(self) -> bool:
        """True if the entries are quantized values."""
        return self.scale > 0

    def quantize(self, values: ArrayLike) -> NDArray:
        """Quantizes float values: `floor(x / scale + 0.5) + zero_point`, clipped.

        Arrays of the tensor's type are returned unchanged. If the tensor is not quantized, values
        are only cast to its type. For inputs that accept pixels, values are converted to pixels.
        """
        array = np.asarray(values)
        if self.rescaling is not None and array.dtype != self.dtype:
            return to_pixels(array, *self.rescaling)
        if self.is_quantized and array.dtype != self.dtype:
            array = array.astype(np.float32)  # float32 rounds halves like Keras.
        return quantize(array, self.dtype, self.scale, self.zero_point)

    def dequantize(self, codes: ArrayLike) -> NDArray:
        """Returns the float values `scale * (codes - zero_point)` in float32."""
        return dequantize(np.asarray(codes), self.scale, self.zero_point)


class TFLiteModel:
    """A TFLite file that predicts like its model.

    It quantizes inputs and returns float values. Inputs and outputs have the names and the order
    of the model's inputs and outputs.

    Args:
        file: path or contents of the file. Files of other programs work too.
        kernels: the kernels that run the file: "xnnpack" (as on phones), "optimized" (TFLite's
            optimized kernels), "reference" (TFLite's portable kernels) or "tflm" (TFLite Micro, for
            files with `export_tflite(batch_size=1)`). The default is the kernel family of the
            model's `predict`, or "xnnpack" for files of other programs. If the default cannot run
            the file on this computer, "xnnpack" runs the file, with a warning.

    Raises:
        ValueError: if this is not a TFLite file, `kernels` is unknown, or a kernel is missing.
        ImportError: for "tflm" without the package `tflite-micro`.

    Example:
        >>> file = keras_qat.TFLiteModel("model.tflite")
        >>> file.inputs["image"]
        TensorInfo(shape=(None, 8, 8, 1), dtype=dtype('int8'), scale=0.0039, zero_point=-128)
        >>> file.predict(x_test)
    """

    def __init__(
        self, file: str | os.PathLike[str] | bytes, kernels: Kernels | None = None
    ) -> None:
        contents = read_contents(file)
        self._file = open_file(contents, kernels) if kernels else _open_as_model(contents)
        graph = FileGraph(contents)  # The interpreter sorts outputs by name.
        if graph.signatures > 1:
            raise ValueError(
                f"The TFLite file has {graph.signatures} signatures. Convert only the function "
                f"that predicts, or run the file with LiteRT's get_signature_runner."
            )
        self.inputs: Mapping[str, TensorInfo] = describe_tensors(
            graph.inputs, read_rescalings(contents)
        )
        """Maps input names to shape, type, scale and zero point, in the model's order."""
        self.outputs: Mapping[str, TensorInfo] = describe_tensors(graph.outputs, {})
        """Maps output names to shape, type, scale and zero point, in the model's order."""
        pixels = {
            name: get_pixel_range(*info.rescaling)
            for name, info in self.inputs.items()
            if info.rescaling is not None
        }
        self._ranges, self._warned = graph.get_input_ranges() | pixels, False
        names, keys = list(self.inputs), read_input_keys(contents)
        self._inputs = Inputs(
            "the file" if isinstance(file, bytes) else Path(file).name,
            [
                Input(name, keys.get(name, name), info.shape, False)
                for name, info in self.inputs.items()
            ],
            names if len(names) > 1 else names[0],
            graph.find_float_inputs,
        )

    def predict(
        self,
        x: Any,
        batch_size: int = 32,
        verbose: int = 0,
        steps: int | None = None,
        *,
        codes: bool = False,
    ) -> NDArray | list[NDArray]:
        """Computes the file's outputs for data.

        Args:
            x: inputs, as for `model.predict`: an array, a list or a dict of arrays, a
                `tf.data.Dataset`, a generator, or a function that returns a generator. Keys of a
                dict are the model's keys or input names. Labels are ignored. Float values are
                quantized by `TensorInfo.quantize`. Arrays of the input's type, such as int8, do not
                change.
            batch_size: batch size for arrays. A file with a fixed batch size uses the fixed size,
                and accepts any number of examples.
            verbose: 1 shows progress.
            steps: maximum number of batches to read from a dataset or a generator. Default: all.
            codes: whether to return the file's integers instead of float values.

        Returns:
            An array if the file has one output, otherwise a list in the order of `outputs`.

        Raises:
            ValueError: if the data does not fit the file. The message names the input.
        """
        total = count_batches(self._inputs, x, batch_size, steps)
        read = read_batches(self._inputs, x, batch_size, steps)
        results: list[list[NDArray]] = []
        for batch in show_progress(read, "The file", verbose, total):
            if not results:
                self._check_ranges(batch)
            results.append(self._run(batch))
        outputs = [np.concatenate(arrays) for arrays in zip(*results, strict=True)]
        if not codes:
            pairs = zip(outputs, self.outputs.values(), strict=True)
            outputs = [info.dequantize(array) for array, info in pairs]
        return outputs if len(outputs) > 1 else outputs[0]

    __call__ = predict

    def reset_states(self) -> None:
        """Sets the states of recurrent layers in the file to zeros.

        Otherwise `predict` continues from the states of the last `predict`, as in Keras.
        """
        self._file.reset_states()

    def _check_ranges(self, batch: list[NDArray]) -> None:
        """Warn once if input values exceed the range that the file can represent."""
        if self._warned:
            return
        for (name, info), values in zip(self.inputs.items(), batch, strict=True):
            is_quantized = info.dtype.kind != "f" and values.dtype == info.dtype
            if name not in self._ranges or is_quantized:
                continue
            if reason := describe_excess(name, values, *self._ranges[name]):
                self._warned = True
                warn_caller(reason)

    def _run(self, batch: list[NDArray]) -> list[NDArray]:
        """Return the outputs for a batch of any size. They are not dequantized."""
        count = len(batch[0])
        fixed = next(iter(self.inputs.values())).shape[0] or 1
        full = {}
        for (name, info), values in zip(self.inputs.items(), batch, strict=True):
            _check_type(self._inputs.model, name, info, values)
            full[name] = pad_batch(info.quantize(values), fixed)
        outputs = self._file.run(full, count)
        return [outputs[name][:count] for name in self.outputs]

    def __repr__(self) -> str:
        sides = {"input": self.inputs, "output": self.outputs}
        lines = [
            f"{side} {name}: {info}"
            for side, infos in sides.items()
            for name, info in infos.items()
        ]
        return "\n".join([f"TFLiteModel of {self._inputs.model}, {self._file.kernels}", *lines])


def _open_as_model(contents: bytes) -> FileInterpreter:
    """Open a file with the kernels that it was exported for. If this fails, use XNNPACK."""
    kernels = read_kernels(contents)
    if kernels == DEFAULT.name:
        return open_file(contents, kernels)
    try:
        return open_file(contents, kernels)
    except (ValueError, ImportError) as error:
        file = open_file(contents, DEFAULT.name)  # Raises if the file is damaged.
        warn_caller(
            f"The file is for kernels={kernels!r}, which cannot run it on this computer: "
            f"{str(error).split('. ')[0].rstrip('.')}. XNNPACK's kernels run it instead, and their "
            f"results may differ by one quantized value."
        )
        return file


def _check_type(file: str, name: str, info: TensorInfo, values: NDArray) -> None:
    """Raise a `ValueError` if values for an input of integers, such as token ids, are invalid."""
    if info.is_quantized or info.dtype.kind not in "iu" or values.dtype == info.dtype:
        return
    limits = np.iinfo(info.dtype)
    low, high = values.min(), values.max()
    if low < limits.min or high > limits.max or np.any(values % 1):
        raise ValueError(
            f"Input '{name}' of '{file}' needs {info.dtype} values that are not quantized, but the "
            f"data has {values.dtype} from {low} to {high}."
        )


def describe_tensors(
    tensors: dict[str, Tensor], rescalings: dict[str, tuple[Any, Any]]
) -> Mapping[str, TensorInfo]:
    """Returns a `TensorInfo` for each tensor. `rescalings` is from `read_rescalings`."""
    infos = ByName()
    for name, tensor in tensors.items():
        shape = tuple(None if size < 0 else size for size in tensor.shape)
        scale = tensor.scale if tensor.is_quantized else 0.0
        rescaling = rescalings.get(name)
        infos[name] = TensorInfo(shape, tensor.dtype, scale, tensor.zero_point, rescaling)
    return MappingProxyType(infos)
