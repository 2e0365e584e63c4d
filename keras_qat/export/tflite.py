"""Export to TFLite: the one place that calls the converter."""

from __future__ import annotations

import os
import re
import warnings
from typing import Any, Literal

import tensorflow as tf
from tensorflow.lite.python.convert_phase import ConverterError

from keras_qat.export import int4, int16
from keras_qat.export.barrier import remove_barriers
from keras_qat.export.files import check_writable, replacing
from keras_qat.export.folded import scales_of_float_layers
from keras_qat.export.inference import call_module, check_exportable, inference_module
from keras_qat.export.packing import pack_weights
from keras_qat.export.placeholders import write_kernels
from keras_qat.export.unused_kernels import use_int8_kernels
from keras_qat.flatbuffer import edit
from keras_qat.kinds import kind_of
from keras_qat.specs import QuantSpec
from keras_qat.version import __version__

__all__ = ["convert", "export_tflite"]

EndType = Literal["int8", "uint8", "int16", "float32"]


def export_tflite(
    model: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    input_dtype: EndType | None = None,
    output_dtype: EndType | None = None,
    input_range: tuple[float, float] | None = None,
    pack_int4: bool = False,
) -> bytes:
    """Exports a trained quantization-aware model to an int8 TFLite file.

    The file has the model's inputs and outputs by name (as tensors and in its signature
    `serving_default`) and in the model's order, takes batches of any size, and says in its
    metadata how it was made: `read_metadata`. The same model gives the same bytes.

    Args:
        model: the model.
        path: where to write the file, or None. An existing file is replaced at the end only.
        input_dtype: type of the file's inputs: "int8", "uint8" or "float32" (with 16-bit
            activations "int16" or "float32"), by default that of its activations. With integers
            the caller quantizes, by the scale and zero point that the file gives.
        output_dtype: type of its outputs, likewise.
        input_range: minimum and maximum of inputs that have no quantizer, as those of
            `recipes.contrib`. Without it such inputs and the layers that read them are float.
        pack_int4: whether weights of at most 4 bits are stored two in a byte instead of one. That
            halves the file. Weights and biases are the same, but kernels sum in steps that are 18
            times as wide and round twice, so that some 2 % of a layer's codes are off by one; and
            they unpack the weights first, so that it is slower (docs/export.md has figures).

    Returns:
        The file's contents.

    Raises:
        ValueError: if the model is not quantized, a quantizer has no usable range, a type is
            none of those, or TFLite's converter refuses a layer; the message names it.
        OSError: if `path` cannot be written; checked before the work begins.

    Example:
        >>> keras_qat.export_tflite(qat, "model.tflite")
    """
    wide = getattr(getattr(model, "recipe", None), "activations", QuantSpec()).bits == 16
    ends = {"input_dtype": input_dtype, "output_dtype": output_dtype}
    types = [_end_type(name, dtype, wide) for name, dtype in ends.items()]
    if wide and pack_int4:
        raise ValueError("pack_int4=True: there are no kernels for int4 weights and 16 bits.")
    check_exportable(model)
    target = None if path is None else check_writable(path)
    writer, file = _converted(model, input_range, types, placeholders=True)
    if not write_kernels(file, writer.folded.values()):
        writer, file = _converted(model, input_range, types, placeholders=False)
    use_int8_kernels(file)
    remove_barriers(file)
    layers = writer.folded.values()
    biases = [(each.bias, each.bias_codes) for each in layers if each.bias is not None]
    if wide:
        int16.widen(file, biases)
    if pack_int4 and not int4.pack_weights(file, biases):
        raise ValueError(
            f"pack_int4=True: '{model.name}' has no weights of at most 4 bits in a layer whose "
            f"kernel takes int4. Quantize it with recipes.int4_weights(), or leave it out."
        )
    pack_weights(file, scales_of_float_layers(model))
    edit.name_ends(file, model.input_names, model.output_names)
    edit.add_metadata(file, {"version": __version__, "recipe": model.recipe.to_config()})
    contents = edit.pack(file)
    if target is not None:
        with replacing(target) as scratch:
            scratch.write_bytes(contents)
    return contents


def _converted(
    model: Any, input_range: tuple[float, float] | None, types: list[Any], placeholders: bool
) -> tuple[Any, Any]:
    """The writer of a model's inference function, and what the converter makes of it, unpacked."""
    module = inference_module(model, True, input_range, placeholders)
    try:
        return module.writer, edit.unpack(convert(module, *types))
    except ConverterError as error:
        raise ValueError(explain(error, module)) from error


def _end_type(name: str, dtype: str | None, wide: bool) -> Any:
    """The type that the converter is asked for; it is widened later if it is `wide`."""
    integer = tf.int8
    types = {"int16": integer} if wide else {"int8": integer, "uint8": tf.uint8}
    types["float32"] = tf.float32
    if dtype is not None and dtype not in types:
        *others, last = map(repr, types)
        raise ValueError(f"{name}={dtype!r}: use {', '.join(others)} or {last}.")
    return integer if dtype is None else types[dtype]


class _Converter(tf.lite.TFLiteConverter):
    """TFLite's converter, which freezes variables before it converts.

    A model that is quantized as a whole has none left, and freezing it all the same is half of
    the time again.
    """

    def _freeze_concrete_function(self) -> Any:
        (function,) = self._funcs
        if function.captured_inputs:
            return super()._freeze_concrete_function()
        return function.graph.as_graph_def(), function.inputs, function.outputs, function


def convert(module: tf.Module, input_type: Any, output_type: Any) -> bytes:
    """Converts the `serve` function of a module, whose ranges are in it."""
    function = module.serve.get_concrete_function()
    converter = _Converter.from_concrete_functions([function], module)
    # By way of a SavedModel, weights are written to the disk and read twice: half of the time.
    converter.experimental_lower_to_saved_model = False
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.inference_input_type = input_type
    converter.inference_output_type = output_type
    with warnings.catch_warnings():
        # "Statistics for quantized inputs were expected": the ranges are in the function.
        warnings.simplefilter("ignore", UserWarning)
        return converter.convert()


def explain(error: Exception, module: tf.Module) -> str:
    """What the converter does not convert, with the layer that has it.

    The converter does not name layers, so each is converted by itself: those of an unknown kind
    first, which are most likely the cause.
    """
    causes: dict[str, str] = {}
    for unknown in (True, False):
        for call in module.writer.graph.calls:
            if (kind_of(call) is None) is unknown:
                try:
                    convert(call_module(module.writer, call), tf.float32, tf.float32)
                except ConverterError as alone:
                    name = f"'{call.origin.removeprefix('quant_')}' ({type(call.layer).__name__})"
                    causes.setdefault(name, _reason(alone))
        if causes:
            break
    if not causes:
        return f"TFLite's converter refuses the model: {_reason(error)}."
    listed = "; ".join(f"{name}: {reason}" for name, reason in causes.items())
    return (
        f"TFLite's converter refuses {len(causes)} layers: {listed}. Replace them by what TFLite "
        f"has, or split the model there and export the parts."
    )


def _reason(error: Exception) -> str:
    """The first error in the converter's text that says something, without the path in front."""
    text = str(error)
    missing = sorted(set(re.findall(r"'(tf\.\w+)' op is neither a custom op nor a flex op", text)))
    if missing:
        return f"TFLite has no operation for {', '.join(missing)}"
    found = re.findall(r"error: (.*)", text)
    return found[0] if found else text.splitlines()[0]
