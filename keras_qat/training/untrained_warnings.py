"""Warnings about models whose files would compute something other than was trained."""

from __future__ import annotations

from typing import Any

from keras_qat.graph.calls import Graph
from keras_qat.messages import counted
from keras_qat.training.layers.scheduled_layer import NEVER
from keras_qat.training.quantizers import PREFIX
from keras_qat.training.schedule import scheduled_layers

UNEQUAL = 0.02
"""Part by which the ends of a symmetric range may differ: one step of 7 bits and more."""

EXAMPLES_PER_BATCH = 32
"""Calibration examples that count as one batch when training continues."""


def untrained(model: Any, calls: Graph) -> list[str]:
    """Returns sentences on why a model's file would not compute what the model was trained to.

    Args:
        model: a quantization-aware model.
        calls: its calls.
    """
    sentences = (_before_delay(model, calls), _without_data(model), _of_another_recipe(model))
    return [sentence for sentence in sentences if sentence]


def _before_delay(model: Any, calls: Graph) -> str:
    """Returns a sentence if quantization is off or has not begun, as for restored early weights."""
    waiting = {
        layer: (int(layer.step.numpy()), int(layer.quantize_from.numpy()))
        for layer in scheduled_layers(model)
    }
    waiting = {layer: counts for layer, counts in waiting.items() if counts[0] < counts[1]}
    if not waiting:
        return ""
    layer, (step, start) = max(waiting.items(), key=lambda item: item[1][1])
    per_step = calls.count_calls().get(layer, 1)  # A layer counts its calls.
    when = (
        "Quantization is switched off"
        if start == NEVER
        else f"Quantization begins at training step {(start - 1) // per_step + 1}, and "
        f"{step // per_step} are done (restored weights bring their step along)"
    )
    return (
        f"'{model.name}' has not been quantized so far: {when}. Its predictions are in float, "
        f"the file's are not. Continue training, or call keras_qat.set_quantization(model) to see "
        f"what the file computes."
    )


def _without_data(model: Any) -> str:
    """Returns a sentence if ranges are still the initial ones of the recipe."""
    ranges = [x.untouched_range for layer in scheduled_layers(model) for x in layer.quantizers]
    blind = [ends for ends in ranges if ends is not None]
    if not blind:
        return ""
    low, high = blind[0]
    return (
        f"{counted(len(blind), 'quantizer has', 'quantizers have')} seen no data yet in "
        f"'{model.name}', and the recipe's initial range, {low:g} to {high:g}. "
        f"Train the model, or call keras_qat.calibrate(model, data)."
    )


def _of_another_recipe(model: Any) -> str:
    """Returns a sentence if ranges that have to be symmetric around zero are not.

    Keras loads the weights of another recipe if they have the same shapes.
    """
    for layer in scheduled_layers(model):
        for quantizer in layer.quantizers:
            if not getattr(quantizer.spec, "symmetric", False):
                continue
            low, high = quantizer.current_range()
            if low < high and abs(low + high) > UNEQUAL * max(-low, high):
                name = layer.name.removeprefix(PREFIX).removesuffix("_quant")
                return (
                    f"The range of '{name}' in '{model.name}' is {low:.4g} to {high:.4g}, but the "
                    f"recipe has symmetric ranges: weights of another recipe were loaded, and what "
                    f"lies beyond is clipped. Call keras_qat.calibrate(model, data) after loading."
                )
    return ""


def describe_difference(model: Any) -> str:
    """Returns a sentence if `quantize_model` found that the float model computes otherwise."""
    names = getattr(model, "differing_outputs", "")
    if not names:
        return ""
    return (
        f"'{model.name}' does not compute what its float model does, before anything is rounded: "
        f"{names} differed on random inputs when it was quantized. Quantize the float "
        f"model again, with recipe.override(layer, open=False) for the layer of which "
        f"quantize_model warns."
    )
