"""TFLite files that predict as models do: data as users have it in, real numbers out."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from keras_qat.io.data import Input, Inputs, batch_count, batches
from keras_qat.io.progress import shown
from keras_qat.tflite.interpreter import Kernels, to_codes, to_pixels, to_values
from keras_qat.tflite.metadata import rescaled_inputs
from keras_qat.tflite.micro_interpreter import open_file
from keras_qat.tflite.reader import FileGraph, Tensor
from keras_qat.tflite.schema import contents_of

__all__ = ["TFLiteModel", "TensorInfo", "tensor_infos"]


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """An input or output of a TFLite file.

    Attributes:
        shape: its shape, None for sizes that the file leaves open.
        dtype: the type of its entries.
        scale: the real value of one step; 0 for a tensor that is not quantized.
        zero_point: the code of 0.
        rescaling: of an input that takes pixels (`export_tflite(rescaling=...)`), scale and offset
            that make the model's numbers of them; else None.
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype
    scale: float
    zero_point: int
    rescaling: tuple[Any, Any] | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether its entries are codes of real numbers."""
        return self.scale > 0

    def quantize(self, values: Any) -> np.ndarray:
        """The codes of real numbers: `floor(x / scale + 0.5) + zero_point`, clipped.

        Arrays of its own type are codes already. Of a tensor that is not quantized, the values.
        Where codes are pixels, those of the model's numbers.
        """
        array = np.asarray(values)
        if self.rescaling is not None and array.dtype != self.dtype:
            return to_pixels(array, *self.rescaling)
        if self.is_quantized and array.dtype != self.dtype:
            array = array.astype(np.float32)  # As Keras does, so that halves are the same.
        return to_codes(array, self.dtype, self.scale, self.zero_point)

    def dequantize(self, codes: Any) -> np.ndarray:
        """The real numbers of codes: `scale * (codes - zero_point)` in float32."""
        detail = {"dtype": self.dtype, "quantization": (self.scale, self.zero_point)}
        return to_values(np.asarray(codes), detail)


class TFLiteModel:
    """A TFLite file that predicts as its model does.

    It takes real numbers, which it quantizes, and gives real numbers. What it takes and gives has
    the names and the order of the model's inputs and outputs.

    Args:
        file: its path or contents; one of another program too.
        kernels: which kernels compute it: "xnnpack" (as on phones), "optimized" (TFLite's own),
            "reference" (its portable ones), or "tflm": TFLite Micro, for files of known sizes,
            `export_tflite(batch_size=1)`.

    Raises:
        ValueError: if it is not a TFLite file, there are no such kernels, or one that it needs is
            not among them.
        ImportError: for "tflm" without the package `tflite-micro`.

    Example:
        >>> file = keras_qat.TFLiteModel("model.tflite")
        >>> file.inputs["image"]
        TensorInfo(shape=(None, 8, 8, 1), dtype=dtype('int8'), scale=0.0039, zero_point=-128)
        >>> file.predict(x_test)
    """

    def __init__(self, file: str | os.PathLike[str] | bytes, kernels: Kernels = "xnnpack") -> None:
        contents = contents_of(file)
        self._file = open_file(contents, kernels)
        graph = FileGraph(contents)  # The interpreter sorts by name.
        if graph.signatures > 1:
            raise ValueError(
                f"The TFLite file has {graph.signatures} signatures: convert the one function "
                f"that is to predict, or run the file with LiteRT's get_signature_runner."
            )
        self.inputs: Mapping[str, TensorInfo] = tensor_infos(
            graph.inputs, rescaled_inputs(contents)
        )
        """Name of each input -> its shape, type, scale and zero point, in the model's order."""
        self.outputs: Mapping[str, TensorInfo] = tensor_infos(graph.outputs, {})
        """Name of each output -> the same."""
        names = list(self.inputs)
        self._inputs = Inputs(
            "the file" if isinstance(file, bytes) else Path(file).name,
            [Input(name, name, each.shape, False) for name, each in self.inputs.items()],
            names if len(names) > 1 else names[0],
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
        """What the file computes for data.

        Args:
            x: inputs, as `model.predict` takes them: an array, a list of arrays or a dict of them
                by name, a `tf.data.Dataset`, a generator or a function that makes one. Labels
                that come along are ignored. Real numbers are quantized by `TensorInfo.quantize`;
                arrays of the input's own integer type are its codes.
            batch_size: how many examples of arrays are run at a time. A file with a batch of its
                own runs with that, for any number of examples.
            verbose: 1 shows progress.
            steps: how many batches are read of a dataset or a generator; all by default.
            codes: whether outputs stay the integers that the file gives.

        Returns:
            An array if the file has one output, otherwise a list in the order of `outputs`.

        Raises:
            ValueError: if the data is not what the file takes; the message names the input.
        """
        total = batch_count(self._inputs, x, batch_size, steps)
        read = batches(self._inputs, x, batch_size, steps)
        parts = [self._run(batch) for batch in shown(read, "The file", verbose, total)]
        found = [np.concatenate(each) for each in zip(*parts, strict=True)]
        if not codes:
            pairs = zip(found, self.outputs.values(), strict=True)
            found = [info.dequantize(each) for each, info in pairs]
        return found if len(found) > 1 else found[0]

    def reset_states(self) -> None:
        """Begins anew, with zeros, in a file that keeps the states of recurrent layers.

        `predict` goes on where the last one ended, as a model's does with `stateful=True`.
        """
        self._file.reset_states()

    def _run(self, batch: list[np.ndarray]) -> list[np.ndarray]:
        """The outputs for a batch of any size, in integers where the file has them."""
        count = len(batch[0])
        own = next(iter(self.inputs.values())).shape[0] or 1
        given = {}
        for (name, info), values in zip(self.inputs.items(), batch, strict=True):
            _check_type(self._inputs.model, name, info, values)
            quantized = info.quantize(values)
            missing = [quantized[-1:]] * (-count % own)
            given[name] = np.concatenate([quantized, *missing]) if missing else quantized
        found = self._file.run(given, count)
        return [found[name][:count] for name in self.outputs]

    def __repr__(self) -> str:
        ends = {"inputs": self.inputs, "outputs": self.outputs}
        lines = [
            f"{end[:-1]} {name}: {info}"
            for end, all_ in ends.items()
            for name, info in all_.items()
        ]
        return "\n".join([f"TFLiteModel of {self._inputs.model}, {self._file.kernels}", *lines])


def _check_type(file: str, name: str, info: TensorInfo, values: np.ndarray) -> None:
    """Raises a `ValueError` if an input in integers, such as indices, would lose what is given."""
    if info.is_quantized or info.dtype.kind not in "iu" or values.dtype == info.dtype:
        return
    limits = np.iinfo(info.dtype)
    low, high = values.min(), values.max()
    if low < limits.min or high > limits.max or np.any(values % 1):
        raise ValueError(
            f"Input '{name}' of '{file}' takes {info.dtype}, integers that stand for themselves; "
            f"given are {values.dtype} from {low} to {high}."
        )


def tensor_infos(tensors: dict[str, Tensor], rescaled: dict[str, Any]) -> Mapping[str, TensorInfo]:
    """Name of each tensor -> what is said of it; `rescaled`: of inputs that take pixels."""
    found = {name: _info(each, rescaled.get(name)) for name, each in tensors.items()}
    return MappingProxyType(found)


def _info(tensor: Tensor, rescaling: tuple[Any, Any] | None) -> TensorInfo:
    shape = tuple(None if size < 0 else size for size in tensor.shape)
    scale = tensor.scale if tensor.is_quantized else 0.0
    return TensorInfo(shape, tensor.dtype, scale, tensor.zero_point, rescaling)
