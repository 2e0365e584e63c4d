"""Export to TFLite: the one place that calls the converter."""

from __future__ import annotations

import os
import warnings
from typing import Any, Literal

import tensorflow as tf

from keras_qat.export.files import check_writable, replacing
from keras_qat.export.inference import check_exportable, inference_module

__all__ = ["convert", "export_tflite"]

EndType = Literal["int8", "uint8", "float32"]


def export_tflite(
    model: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    input_dtype: EndType = "int8",
    output_dtype: EndType = "int8",
    input_range: tuple[float, float] | None = None,
) -> bytes:
    """Exports a trained quantization-aware model to an int8 TFLite file.

    Args:
        model: the model.
        path: where to write the file, or None. An existing file is replaced at the end only.
        input_dtype: type of the file's inputs; with integers the caller quantizes, by the scale
            and zero point that the file gives.
        output_dtype: type of its outputs.
        input_range: minimum and maximum of inputs that have no quantizer, as those of
            `recipes.contrib`. Without it such inputs and the layers that read them are float.

    Returns:
        The file's contents.

    Raises:
        ValueError: if the model is not quantized, a quantizer has no usable range, or a type is
            none of those.
        OSError: if `path` cannot be written; checked before the work begins.

    Example:
        >>> keras_qat.export_tflite(qat, "model.tflite")
    """
    types = {"int8": tf.int8, "uint8": tf.uint8, "float32": tf.float32}
    for name, dtype in (("input_dtype", input_dtype), ("output_dtype", output_dtype)):
        if dtype not in types:
            raise ValueError(f"{name}={dtype!r}: use 'int8', 'uint8' or 'float32'.")
    check_exportable(model)
    target = None if path is None else check_writable(path)
    module = inference_module(model, for_tflite=True, input_range=input_range)
    contents = convert(module, types[input_dtype], types[output_dtype])
    if target is not None:
        with replacing(target) as scratch:
            scratch.write_bytes(contents)
    return contents


def convert(module: tf.Module, input_type: Any, output_type: Any, quantized: bool = True) -> bytes:
    """Converts the `serve` function of a module; unquantized for comparisons in float."""
    function = module.serve.get_concrete_function()
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function], module)
    if quantized:
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        converter.inference_input_type = input_type
        converter.inference_output_type = output_type
    with warnings.catch_warnings():
        # "Statistics for quantized inputs were expected": the ranges are in the function.
        warnings.simplefilter("ignore", UserWarning)
        return converter.convert()
