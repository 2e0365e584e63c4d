"""What is to be known of a model before its file is trusted: whether it ever quantized."""

from __future__ import annotations

from typing import Any

from keras_qat.frontend.graph import Graph
from keras_qat.training.layers.scheduled_layer import NEVER
from keras_qat.training.schedule import scheduled_layers

__all__ = ["EXAMPLES_PER_BATCH", "untrained"]


EXAMPLES_PER_BATCH = 32
"""How many examples count as a batch where training goes on from ranges of `calibrate`."""
FEW = 4
"""Ranges of fewer examples are told."""


def untrained(model: Any, calls: Graph) -> list[str]:
    """Why the file of a model does not compute what the model was trained to: sentences.

    Args:
        model: a quantization-aware model.
        calls: its calls.
    """
    found = (_before_delay(model, calls), _without_data(model), _few_examples(model))
    return [each for each in found if each]


def _before_delay(model: Any, calls: Graph) -> str:
    """Quantization is off, or has not begun, perhaps as weights of an earlier step were loaded."""
    waiting = {
        layer: (int(layer.step.numpy()), int(layer.quantize_from.numpy()))
        for layer in scheduled_layers(model)
    }
    waiting = {layer: counts for layer, counts in waiting.items() if counts[0] < counts[1]}
    if not waiting:
        return ""
    layer, (step, start) = max(waiting.items(), key=lambda each: each[1][1])
    per_step = calls.call_counts().get(layer, 1)  # A layer counts its calls.
    when = (
        "Quantization is switched off"
        if start == NEVER
        else f"Quantization begins at training step {(start - 1) // per_step + 1}, and "
        f"{step // per_step} are done (weights that were restored bring their step along)"
    )
    return (
        f"'{model.name}' has not been quantized so far: {when}. Its predictions are in float, "
        f"the file's are not. Train on, or call keras_qat.set_quantization(model) to see what "
        f"the file computes."
    )


def _without_data(model: Any) -> str:
    """Ranges are still those that the recipe begins with."""
    blind = [
        quantizer.spec.initial_range
        for layer in scheduled_layers(model)
        for quantizer in layer.quantizers
        if quantizer.has_only_begun
    ]
    if not blind:
        return ""
    low, high = blind[0]
    return (
        f"{len(blind)} quantizers of '{model.name}' have seen no data yet, and keep the range that "
        f"the recipe begins with, {low:g} to {high:g}. Train the model, or call "
        f"keras_qat.calibrate(model, data)."
    )


def _few_examples(model: Any) -> str:
    """Ranges were calibrated on next to nothing. Each batch of training counts as enough."""
    counters = [
        observer.counter
        for layer in scheduled_layers(model)
        for quantizer in layer.quantizers
        for observer in quantizer.observers
    ]
    counts = [float(each.numpy()) for each in counters if each is not None]
    examples = round(max(counts, default=0.0) * EXAMPLES_PER_BATCH)
    if not 0 < examples < FEW:
        return ""
    return (
        f"The ranges of '{model.name}' come from {examples} example{'s'[: examples - 1]}: numbers "
        f"beyond them are cut off. Calibrate on some hundred."
    )
