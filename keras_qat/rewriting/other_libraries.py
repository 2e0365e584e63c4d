"""Converts models of other libraries: tfmot and Keras 3."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

from keras_qat.config import recipes
from keras_qat.config.recipe import Recipe
from keras_qat.imports import tfmot
from keras_qat.imports.keras3 import give_weights
from keras_qat.imports.keras3.backend import check_model
from keras_qat.keras2.backend import keras
from keras_qat.keras2.readability import check_readable
from keras_qat.messages import warn_caller
from keras_qat.rewriting.quantize import quantize_model
from keras_qat.rewriting.quantized_model import QuantizedModel
from keras_qat.rewriting.strip import strip_quantization
from keras_qat.training.calibration.calibrate import calibrate
from keras_qat.training.fake_quantization.observers import LastValue
from keras_qat.training.quantizers import list_layer_quantizers
from keras_qat.training.readiness import list_some
from keras_qat.training.schedule import list_scheduled_layers

STEPS = 1000
"""If training continues, a range has the weight of this many steps, as in tfmot's averages."""


def from_tfmot(model: Any, data: Any = None) -> Any:
    """Converts a model that tfmot quantized and trained to a quantization-aware model.

    The result has tfmot's weights, statistics of BatchNormalization, ranges of activations, bits
    and float layers, so it can be exported without training. A warning lists the tensors that are
    quantized here but not by tfmot: their ranges come from `data`, or later from `calibrate` or
    training.

    Args:
        model: the model, or the path of its `.h5` or `.keras` file. A path needs the package
            `tensorflow-model-optimization`. The model is not changed.
        data: inputs as for `calibrate`, for ranges that tfmot does not have.

    Returns:
        The quantization-aware model, not compiled.

    Raises:
        ValueError: if tfmot has not quantized the model, or it was not trained.
        ImportError: for a path without tfmot.

    Example:
        >>> qat = keras_qat.from_tfmot("qat.h5", x_train[:256])
        >>> keras_qat.export_tflite(qat, "model.tflite")
    """
    if isinstance(model, (str, os.PathLike)):
        model = tfmot.load(Path(model))
    plain, quantization = tfmot.read(model)
    qat = quantize_model(plain, _make_recipe(quantization))
    if data is not None:
        calibrate(qat, data)
    without = _set_ranges(qat, quantization.ranges)
    if without and data is None:
        warn_caller(
            f"tfmot has no ranges for {list_some(without)}, which keras_qat quantizes. Pass data: "
            f"keras_qat.from_tfmot(model, x_train[:256])."
        )
    return qat


def _make_recipe(quantization: tfmot.Quantization) -> Recipe:
    """Return the recipe with tfmot's most common bits, and overrides for layers with other bits."""
    weight_bits = _find_most_common(quantization.weight_bits)
    activation_bits = _find_most_common(quantization.activation_bits)
    recipe = recipes.int8(weight_bits, activation_bits)
    for name, bits in quantization.weight_bits.items():
        if bits != weight_bits:
            recipe = recipe.override(name, weight_bits=bits)
    for name, bits in quantization.activation_bits.items():
        if bits != activation_bits:
            recipe = recipe.override(name, activation_bits=bits)
    for name in quantization.float_layers:
        recipe = recipe.override(name, quantize=False)
    return recipe


def _find_most_common(bits: dict[str, int]) -> int:
    return Counter(bits.values()).most_common(1)[0][0] if bits else 8


def _set_ranges(qat: keras.Model, ranges: dict[str, tfmot.Range]) -> list[str]:
    """Set the ranges of activations, and return the tensors without one."""
    without: list[str] = []
    for layer in list_scheduled_layers(qat):
        listed = list_layer_quantizers(layer)[1]
        for quantizer, shown in zip(layer.quantizers, listed, strict=True):
            known = [ranges[tensor] for tensor in shown.quantizes if tensor in ranges]
            if known:
                low, high = min(known)[0], max(end for _, end in known)
                for observer in quantizer.observers:
                    assert isinstance(observer, LastValue)
                    observer.set(0.0 if quantizer.clips_at_zero else low, high, STEPS)
            elif quantizer.observers:
                without += shown.quantizes
    return without


def to_keras_3(model: keras.Model, keras_3_model: Any) -> Any:
    """Assigns the weights of a model to its original Keras 3 model, or to an equal one.

    Args:
        model: the model that `from_keras_3` returned, or a model that `quantize_model` made from it
            or from the Keras 3 model. For a quantized model, the weights are those of
            `strip_quantization(model)`.
        keras_3_model: the Keras 3 model. Only its weights change.

    Returns:
        The Keras 3 model.

    Raises:
        ValueError: if the models do not have the same layers with the same weights.

    Example:
        >>> qat = keras_qat.quantize_model(keras_3_model)
        >>> qat.fit(...)
        >>> keras_qat.to_keras_3(qat, keras_3_model).save("trained.keras")
    """
    check_model(keras_3_model)
    plain = strip_quantization(model) if isinstance(model, QuantizedModel) else model
    check_readable(plain)
    give_weights(plain, keras_3_model)
    return keras_3_model
