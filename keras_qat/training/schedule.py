"""Sets the training steps at which quantization and freezing begin, for all layers of a model."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

from keras_qat.config.arguments import switch
from keras_qat.graph.read_model import read_model
from keras_qat.keras2.backend import keras
from keras_qat.keras2.layers_and_models import list_layers
from keras_qat.keras2.readability import check_readable, is_graph_model
from keras_qat.training.fake_quantization.activation_quantizer import ActivationQuantizer
from keras_qat.training.fake_quantization.phase import NEVER
from keras_qat.training.scheduled_layer import ScheduledLayer


def list_scheduled_layers(model: keras.Model) -> Iterator[ScheduledLayer]:
    """Yields the quantize-aware layers of a model, including those in inner models."""
    return (layer for layer in list_layers(model) if isinstance(layer, ScheduledLayer))


def list_quantizers(model: keras.Model) -> list[ActivationQuantizer]:
    return [quantizer for layer in list_scheduled_layers(model) for quantizer in layer.quantizers]


def is_quantized(model: keras.Model) -> bool:
    return not isinstance(model, type) and any(True for _ in list_scheduled_layers(model))


def share_layers(model: keras.Model, other: Any) -> bool:
    return not set(list_scheduled_layers(model)).isdisjoint(list_scheduled_layers(other))


def check_quantized(model: keras.Model) -> None:
    if not is_quantized(model):
        recipe = getattr(model, "recipe", None)
        if recipe is not None:
            raise ValueError(
                f"Nothing in '{model.name}' is quantized: recipe {recipe.name} leaves all of its "
                f"layers in float. keras_qat.plan(float_model, recipe) lists the reasons."
            )
        check_readable(model)
        raise ValueError(
            f"'{model.name}' is not quantization-aware: call keras_qat.quantize_model(model) "
            f"first, then train or calibrate the model that it returns."
        )


def check_is_graph(model: keras.Model) -> None:
    """Raises a `ValueError` if a subclassed model calls quantize-aware layers in `call`."""
    if isinstance(model, ScheduledLayer) or is_graph_model(model) or not is_quantized(model):
        return
    raise ValueError(
        f"{type(model).__name__} '{model.name}' calls quantization-aware layers in Python code, "
        f"which cannot be exported. Replace the code by a functional model, for example "
        f"keras.Model(qat.inputs, tf.nn.l2_normalize(qat.output, -1)). Or quantize the entire "
        f"float {type(model).__name__}."
    )


def get_file_model(model: keras.Model) -> Any:
    """Returns the part of a model that is exported, which is usually the entire model.

    If users built `model` from quantize-aware layers, its `predict` also changes: it then returns
    the results of the exported file.

    Raises:
        ValueError: if the model is subclassed.
    """
    check_is_graph(model)
    if is_graph_model(model) and not hasattr(type(model), "file_model"):
        for layer in itertools.islice(list_scheduled_layers(model), 1):
            layer.make_exact(model)
    return getattr(model, "file_model", model)


IMPORTED_IN = os.getpid()


def check_process(model: keras.Model) -> None:
    """Raises a `RuntimeError` if a model was created before `os.fork`.

    The forked process lacks TensorFlow's threads, and would wait forever.
    """
    if os.getpid() == IMPORTED_IN:
        return
    made_in = {layer.made_in for layer in list_scheduled_layers(model)}
    if made_in and os.getpid() not in made_in:
        raise RuntimeError(
            f"'{model.name}' was made in another process (pid {min(made_in)}), and this process is "
            f"a fork of it. A fork lacks TensorFlow's threads, so the model would wait forever. "
            f"Load the model from its file in a spawned process "
            f"(multiprocessing.get_context('spawn')), or use it in the process that made it."
        )


def get_recipe(model: keras.Model) -> Any:
    """Returns the recipe of a model or its layers. Returns None without a recipe."""
    for part in [model, *getattr(model, "layers", ()), *list_scheduled_layers(model)]:
        if getattr(part, "recipe", None) is not None:
            return part.recipe
    return None


def set_quantization(model: keras.Model, enabled: bool = True) -> None:
    """Turns fake quantization on or off. Ranges are observed in both cases.

    This is for custom training loops. `callbacks.QuantDelay` turns quantization on at a given step.

    Args:
        model: a quantization-aware model.
        enabled: True to quantize.

    Raises:
        ValueError: if the model is not quantized.
        TypeError: if `enabled` is not a bool.
    """
    schedule(model, quantize_from=0 if switch("enabled", enabled) else NEVER)


def freeze_batch_norm(model: keras.Model, frozen: bool = True) -> None:
    """Freezes or unfreezes the statistics of BatchNormalization.

    With frozen statistics, training uses the moving statistics, which do not change. Gamma and beta
    continue to train. This is for custom training loops. `callbacks.FreezeBatchNorm` freezes at a
    given step.

    Args:
        model: a quantization-aware model.
        frozen: True to freeze.

    Raises:
        ValueError: if the model is not quantized.
        TypeError: if `frozen` is not a bool.
    """
    schedule(model, freeze_from=0 if switch("frozen", frozen) else NEVER)


def freeze_ranges(model: keras.Model, frozen: bool = True) -> None:
    """Freezes or unfreezes the ranges of activations in training.

    This is for custom training loops. `callbacks.FreezeRanges` freezes at a given step.

    Args:
        model: a quantization-aware model.
        frozen: True to freeze.

    Raises:
        ValueError: if the model is not quantized.
        TypeError: if `frozen` is not a bool.
    """
    schedule(model, freeze_ranges_from=0 if switch("frozen", frozen) else NEVER)


def steps_done(model: keras.Model) -> int:
    calls = read_model(model).count_calls()
    layers = list_scheduled_layers(model)
    return min((int(layer.step.numpy()) // calls.get(layer, 1) for layer in layers), default=0)


def schedule(model: keras.Model, **thresholds: int) -> None:
    """Sets the training steps, counted from 1, at which quantization or freezing begins.

    Args:
        model: a quantization-aware model.
        thresholds: the first step, by the names `quantize_from`, `freeze_from` (BatchNormalization)
            and `freeze_ranges_from`.

    Raises:
        ValueError: if the model is not quantized.
    """
    check_quantized(model)
    calls = read_model(model).count_calls()
    for layer in list_scheduled_layers(model):
        # A layer counts calls. A step may call it several times.
        per_step = calls.get(layer, 1)
        counts = {}
        for name, step in thresholds.items():
            counts[name] = (step - 1) * per_step + 1 if 0 < step < NEVER else step
        layer.set_thresholds(**counts)


def leave_in_float(layer: keras.layers.Layer, reason: str) -> None:
    """Marks a layer to compute in float, even if its operator has integer kernels."""
    layer.keras_qat_float_reason = reason


def get_float_reason(layer: keras.layers.Layer) -> str | None:
    return getattr(layer, "keras_qat_float_reason", None)


def ask_for_integers(layer: keras.layers.Layer) -> None:
    """Marks a layer to be quantized, although layers of its type stay in float by default."""
    layer.keras_qat_asked_for = True


def is_integer_requested(layer: keras.layers.Layer) -> bool:
    return getattr(layer, "keras_qat_asked_for", False)
