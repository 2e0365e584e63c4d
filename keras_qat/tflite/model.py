"""Predicts with TFLite files: takes data in any form, and returns real numbers."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from keras_qat.arithmetic.kernel_families import DEFAULT
from keras_qat.io.data import batch_count, batches, padded
from keras_qat.io.excess import describe_excess, ends_in_pixels
from keras_qat.io.inputs import Input, Inputs
from keras_qat.io.progress import shown
from keras_qat.messages import ByName, warn_caller
from keras_qat.tflite.interpreter import FileInterpreter, Kernels, to_codes, to_pixels, to_values
from keras_qat.tflite.metadata import input_keys, model_kernels, rescaled_inputs
from keras_qat.tflite.micro_interpreter import open_file
from keras_qat.tflite.reader import FileGraph, Tensor
from keras_qat.tflite.schema import contents_of


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """An input or output of a TFLite file.

    Attributes:
        shape: the shape, with None for open sizes.
        dtype: the type of the entries.
        scale: real value of one step; 0 for a tensor that is not quantized.
        zero_point: the quantized value that stands for 0.
        rescaling: for an input that takes pixels (`export_tflite(rescaling=...)`), the scale and
            offset that turn pixels into the model's input; else None.
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

    def quantize(self, values: Any) -> np.ndarray:
        """Quantizes real numbers: `floor(x / scale + 0.5) + zero_point`, clipped.

        Arrays of the tensor's own type are returned as they are. So are all values of a tensor
        that is not quantized. Inputs that take pixels get the pixels of the model's numbers.
        """
        array = np.asarray(values)
        if self.rescaling is not None and array.dtype != self.dtype:
            return to_pixels(array, *self.rescaling)
        if self.is_quantized and array.dtype != self.dtype:
            array = array.astype(np.float32)  # As Keras does, so that halves are the same.
        return to_codes(array, self.dtype, self.scale, self.zero_point)

    def dequantize(self, codes: Any) -> np.ndarray:
        """Returns the real numbers `scale * (codes - zero_point)` in float32."""
        detail = {"dtype": self.dtype, "quantization": (self.scale, self.zero_point)}
        return to_values(np.asarray(codes), detail)


INSTEAD = {
    "evaluate": "The model's evaluate computes the integers of its file; or compare what predict "
    "returns with the labels.",
    "fit": "A file cannot be trained: train the model, and export it again.",
    "summary": "Print the file to see its inputs and outputs; keras_qat.summary(model) has layers.",
    "save": "It is a file already: keras_qat.export_tflite(model, path) writes it.",
}
"""Methods of Keras models that people try on a file -> what to do."""


class TFLiteModel:
    """A TFLite file that predicts like its model.

    It quantizes inputs and returns real numbers. Inputs and outputs have the names and the order
    of the model's.

    Args:
        file: path or contents of the file, which another program may have written.
        kernels: the kernels that run it: "xnnpack" (as on phones), "optimized" (TFLite's own),
            "reference" (TFLite's portable ones), or "tflm" (TFLite Micro, for files with
            `export_tflite(batch_size=1)`). By default those that the model's `predict` computes as,
            which its target or `quantize_model(kernels=)` decided, and "xnnpack" for files of other
            programs. If they cannot run the file here, "xnnpack" does, with a warning.

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
        contents = contents_of(file)
        self._file = open_file(contents, kernels) if kernels else _open_as_model(contents)
        graph = FileGraph(contents)  # The interpreter sorts by name.
        if graph.signatures > 1:
            raise ValueError(
                f"The TFLite file has {graph.signatures} signatures. Convert only the function "
                f"to predict with, or run the file with LiteRT's get_signature_runner."
            )
        self.inputs: Mapping[str, TensorInfo] = tensor_infos(
            graph.inputs, rescaled_inputs(contents)
        )
        """Name of each input -> its shape, type, scale and zero point, in the model's order."""
        self.outputs: Mapping[str, TensorInfo] = tensor_infos(graph.outputs, {})
        """Name of each output -> its shape, type, scale and zero point, in the model's order."""
        pixels = {
            name: ends_in_pixels(*info.rescaling)
            for name, info in self.inputs.items()
            if info.rescaling is not None
        }
        self._ranges, self._warned = graph.input_ranges() | pixels, False
        names, keys = list(self.inputs), input_keys(contents)
        self._inputs = Inputs(
            "the file" if isinstance(file, bytes) else Path(file).name,
            [
                Input(name, keys.get(name, name), info.shape, False)
                for name, info in self.inputs.items()
            ],
            names if len(names) > 1 else names[0],
            graph.read_in_float,
        )

    def predict(
        self,
        x: Any,
        batch_size: int = 32,
        verbose: int = 0,
        steps: int | None = None,
        *,
        codes: bool = False,
    ) -> np.ndarray | list[np.ndarray]:
        """Computes the file's outputs for data.

        Args:
            x: inputs, as `model.predict` takes them: an array, a list of arrays or a dict of arrays
                by the model's keys, or else by name, a `tf.data.Dataset`, a generator or a function
                that makes one. Labels are ignored. Real numbers are quantized by
                `TensorInfo.quantize`; arrays of the input's own integer type are taken as they are.
            batch_size: how many examples of arrays to run at a time. A file with a fixed batch size
                runs with that, for any number of examples.
            verbose: 1 shows progress.
            steps: the most batches to read of a dataset or a generator; all by default.
            codes: whether to return the file's integers as they are.

        Returns:
            An array if the file has one output, otherwise a list in the order of `outputs`.

        Raises:
            ValueError: if the data does not fit the file; the message names the input.
        """
        total = batch_count(self._inputs, x, batch_size, steps)
        read = batches(self._inputs, x, batch_size, steps)
        parts: list[list[np.ndarray]] = []
        for batch in shown(read, "The file", verbose, total):
            if not parts:
                self._look(batch)
            parts.append(self._run(batch))
        outputs = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
        if not codes:
            pairs = zip(outputs, self.outputs.values(), strict=True)
            outputs = [info.dequantize(array) for array, info in pairs]
        return outputs if len(outputs) > 1 else outputs[0]

    __call__ = predict

    def __getattr__(self, name: str) -> Any:
        instead = INSTEAD.get(name, "")
        raise AttributeError(f"A TFLiteModel has no {name!r}. {instead}".strip(), name=name)

    def reset_states(self) -> None:
        """Resets the states of recurrent layers that the file keeps to zeros.

        Each `predict` continues from the last one's states, as a model with `stateful=True` does.
        """
        self._file.reset_states()

    def _look(self, batch: list[np.ndarray]) -> None:
        """Warns once, of the first batch of a `predict`, if it does not fit the inputs' ranges."""
        if self._warned:
            return
        for (name, info), values in zip(self.inputs.items(), batch, strict=True):
            holds_codes = info.dtype.kind != "f" and values.dtype == info.dtype
            if name not in self._ranges or holds_codes:
                continue
            if reason := describe_excess(name, values, *self._ranges[name]):
                self._warned = True
                warn_caller(reason)

    def _run(self, batch: list[np.ndarray]) -> list[np.ndarray]:
        """Returns the outputs for a batch of any size, as integers where the file has them."""
        count = len(batch[0])
        fixed = next(iter(self.inputs.values())).shape[0] or 1
        full = {}
        for (name, info), values in zip(self.inputs.items(), batch, strict=True):
            _check_type(self._inputs.model, name, info, values)
            full[name] = padded(info.quantize(values), fixed)
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
    """Opens a file with the kernels that its model computes as, or with XNNPACK's."""
    kernels = model_kernels(contents)
    if kernels == DEFAULT.name:
        return open_file(contents, kernels)
    try:
        return open_file(contents, kernels)
    except (ValueError, ImportError) as error:
        file = open_file(contents, DEFAULT.name)  # Raises if the file is damaged.
        warn_caller(
            f"The model of this file computes as kernels={kernels!r}, which cannot run it here: "
            f"{str(error).split('. ')[0].rstrip('.')}. XNNPACK's kernels run it, and their values "
            f"may differ by single steps."
        )
        return file


def _check_type(file: str, name: str, info: TensorInfo, values: np.ndarray) -> None:
    """Raises a `ValueError` if an integer input, such as indices, would change the values."""
    if info.is_quantized or info.dtype.kind not in "iu" or values.dtype == info.dtype:
        return
    limits = np.iinfo(info.dtype)
    low, high = values.min(), values.max()
    if low < limits.min or high > limits.max or np.any(values % 1):
        raise ValueError(
            f"Input '{name}' of '{file}' takes {info.dtype} values that are not quantized, but the "
            f"data has {values.dtype} from {low} to {high}."
        )


def tensor_infos(tensors: dict[str, Tensor], rescaled: dict[str, Any]) -> Mapping[str, TensorInfo]:
    """Describes tensors by name. `rescaled` holds scale and offset of inputs that take pixels."""
    infos = {name: _info(tensor, rescaled.get(name)) for name, tensor in tensors.items()}
    return MappingProxyType(ByName(infos))


def _info(tensor: Tensor, rescaling: tuple[Any, Any] | None) -> TensorInfo:
    shape = tuple(None if size < 0 else size for size in tensor.shape)
    scale = tensor.scale if tensor.is_quantized else 0.0
    return TensorInfo(shape, tensor.dtype, scale, tensor.zero_point, rescaling)
