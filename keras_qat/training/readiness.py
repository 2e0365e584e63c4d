"""Checks whether a model can be exported or trained further, and advises what to change."""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from keras_qat.config import specs
from keras_qat.graph.calls import Graph
from keras_qat.io.atomic_files import check_writable
from keras_qat.keras2.backend import keras
from keras_qat.keras2.layers_and_models import list_layers
from keras_qat.messages import KNOWN, get_package, pluralize
from keras_qat.training.fake_quantization.phase import NEVER
from keras_qat.training.layers import QuantizeWrapper
from keras_qat.training.quantizers import PREFIX, list_activation_quantizers
from keras_qat.training.schedule import (
    check_is_graph,
    check_process,
    check_quantized,
    list_quantizers,
    list_scheduled_layers,
)

DIVERGED = "The training diverged: go back to an earlier checkpoint and lower the learning rate."

TRAINING_ONLY = ("dropout", "rate", "seed", "momentum", "initializer", "regularizer", "constraint")
"""Suffixes of attributes that do not affect inference, such as `kernel_regularizer`."""

VALUES = (tf.Tensor, tf.Variable, np.ndarray)
"""Types of attributes that `check_settings` ignores, because `adapt` or `assign` may set them."""

NONE = object()

Settings: TypeAlias = Sequence[tuple[keras.layers.Layer, dict[str, object]]]
"""For each layer, the attributes that are named like constructor arguments, such as `strides`."""

UNEQUAL = 0.02
"""Tolerance for a symmetric range: the maximum of `abs(low + high) / max(-low, high)`."""

EXAMPLES_PER_BATCH = 32
"""Number of calibration examples that count as one batch in moving averages."""


def check_before_export(
    model: keras.Model,
    path: str | os.PathLike[str] | None,
    directory: bool = False,
    but_not: Collection[str] = (),
) -> None:
    """Raises an error if a model is not quantized or `path` cannot be written.

    Args:
        model: the model to export.
        path: where to write, or None.
        directory: True if the export writes a directory.
        but_not: suffixes that `path` must not have, because they mean other formats.
    """
    check_quantized(model)
    if path is not None and Path(path).suffix in but_not:
        raise ValueError(
            f"{str(path)!r} is the name of another format. export_tflite writes .tflite files, "
            f"export_c .cc, and export_saved_model directories."
        )
    if path is not None:
        check_writable(path, directory)


def check_exportable(model: keras.Model) -> None:
    """Raises a `ValueError` if a model is not quantized, or a quantizer has no usable range."""
    check_quantized(model)
    check_is_graph(model)
    check_process(model)
    check_settings(model)
    listed = [q for q in list_activation_quantizers(model) if isinstance(q.spec, specs.QuantSpec)]
    unusable = [q for q in listed if not np.all(np.isfinite([q.minimum, q.maximum]))]
    broken = [q.name for q in unusable]
    inputs = [name for name in model.input_names if any(name in q.quantizes for q in unusable)]
    if inputs:
        raise ValueError(
            f"The data for {list_some(list(map(repr, inputs)))} held NaN or infinity in training, "
            f"which made {pluralize(len(broken), 'range')} unusable. Remove such examples, and "
            f"continue from an earlier checkpoint."
        )
    if broken:
        raise ValueError(
            f"{pluralize(len(broken), 'quantizer has', 'quantizers have')} a range with NaN or "
            f"infinity: {list_some(broken)}. {DIVERGED}"
        )
    broken = [weight.name for weight in model.weights if not _is_finite(weight)]
    if broken:
        raise ValueError(
            f"{pluralize(len(broken), 'weight holds', 'weights hold')} NaN or infinity: "
            f"{list_some(broken)}. {DIVERGED}"
        )
    blind = [q.name for q in listed if not q.calibrated]
    if blind:
        raise ValueError(
            f"{pluralize(len(blind), 'quantizer has', 'quantizers have')} seen no data yet: "
            f"{list_some(blind)}. Train the model (fit, or calls with training=True), or call "
            f"keras_qat.calibrate(model, data); then export."
        )


def _is_finite(weight: tf.Variable) -> bool:
    if not weight.dtype.is_floating:
        return True
    values = np.asarray(weight.value())  # This makes no copy.
    with np.errstate(all="ignore"):  # If the sum is finite, all values are finite.
        return bool(np.isfinite(np.sum(values)) or np.all(np.isfinite(values)))


def list_some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def read_settings(model: keras.Model) -> Settings:
    """Returns the settings of a model's layers, for `check_settings`. Leaves out custom layers."""
    layers = [layer for layer in list_layers(model) if get_package(type(layer)) in KNOWN]
    settings = [(x, _read_own_settings(x)) for x in layers if not isinstance(x, keras.Model)]
    for layer, own in settings:
        if isinstance(layer, QuantizeWrapper):  # Users may set inner layers' settings on a wrapper.
            names = {name for inner in layer.sublayers for name in _read_own_settings(inner)}
            own.update({name: vars(layer).get(name, NONE) for name in names})
    return settings


def _read_own_settings(layer: keras.layers.Layer) -> dict[str, object]:
    attributes = vars(layer)
    return {
        name: attributes[name]
        for name in inspect.signature(type(layer).__init__).parameters
        if name in attributes
        and not name.endswith(TRAINING_ONLY)
        and not isinstance(attributes[name], VALUES)
    }


def check_settings(model: keras.Model) -> None:
    """Raises a `ValueError` if an attribute such as `strides` was changed after quantization.

    Training, inference and files are made for the original attributes.
    """
    for layer, before in getattr(model, "settings", ()):
        now = vars(layer)
        for name, value in before.items():
            if now.get(name, NONE) is value:
                continue
            if isinstance(value, (bool, int, float, str, tuple)) and now.get(name) == value:
                continue
            raise ValueError(
                f"'{name}' of layer '{layer.name.removeprefix(PREFIX)}' was changed after "
                f"'{model.name}' was quantized. Set it in the float model "
                f"(keras_qat.strip_quantization returns it), and quantize that."
            )


def explain_untrained(model: keras.Model, graph: Graph) -> list[str]:
    """Returns warnings if the exported file would compute different results than training."""
    sentences = (explain_delay(model, graph), _explain_initial(model), _explain_asymmetry(model))
    return [sentence for sentence in sentences if sentence]


def explain_delay(model: keras.Model, graph: Graph) -> str:
    """Returns a warning if layers do not quantize yet. Otherwise return ""."""
    waiting = {
        layer: (int(layer.step.numpy()), int(layer.quantize_from.numpy()))
        for layer in list_scheduled_layers(model)
    }
    waiting = {layer: counts for layer, counts in waiting.items() if counts[0] < counts[1]}
    if not waiting:
        return ""
    layer, (step, start) = max(waiting.items(), key=lambda item: item[1][1])
    per_step = graph.count_calls().get(layer, 1)  # A layer counts its calls.
    when = (
        "quantization is switched off"
        if start == NEVER
        else f"quantization begins at training step {(start - 1) // per_step + 1}, and only "
        f"{step // per_step} steps are done (restored weights restore this count)"
    )
    return (
        f"'{model.name}' is not quantized yet: {when}. Its predictions are float, but the file "
        f"computes in integers. Continue training, or call keras_qat.set_quantization(model) to "
        f"predict as the file."
    )


def _explain_initial(model: keras.Model) -> str:
    """Return a warning if ranges are still the recipe's initial ranges, or ""."""
    ranges = [quantizer.untouched_range for quantizer in list_quantizers(model)]
    blind = [ends for ends in ranges if ends is not None]
    if not blind:
        return ""
    low, high = blind[0]
    return (
        f"{pluralize(len(blind), 'quantizer has', 'quantizers have')} seen no data yet in "
        f"'{model.name}', so the range is still the recipe's initial {low:g} to {high:g}. "
        f"Train the model, or call keras_qat.calibrate(model, data)."
    )


def _explain_asymmetry(model: keras.Model) -> str:
    """Return a warning if a range should be symmetric around zero, but is not, or "".

    Weights of another recipe may have been loaded. Keras does not notice this if the shapes are
    equal.
    """
    for layer in list_scheduled_layers(model):
        for quantizer in layer.quantizers:
            spec = quantizer.spec
            if not getattr(spec, "symmetric", False):
                continue
            low, high = quantizer.current_range()
            step = (high - low) / (2**spec.bits - 1)
            if low < high and abs(low + high) > max(1.5 * step, UNEQUAL * max(-low, high)):
                name = layer.name.removeprefix(PREFIX).removesuffix("_quant")
                return (
                    f"The range of '{name}' in '{model.name}' is {low:.4g} to {high:.4g}, but the "
                    f"recipe has symmetric ranges. Weights of another recipe were loaded, so "
                    f"values beyond the range are clipped. Call keras_qat.calibrate(model, data) "
                    f"after loading."
                )
    return ""


def describe_difference(model: keras.Model) -> str:
    """Returns a warning if `quantize_model` found a difference from the float model, or ""."""
    names = getattr(model, "differing_outputs", "")
    if not names:
        return ""
    return (
        f"'{model.name}' differs from its float model even without rounding: {names} differed "
        f"on random inputs when it was quantized. Quantize the float model again, with "
        f"recipe.override(layer, open=False) for the layer that quantize_model warns about."
    )
