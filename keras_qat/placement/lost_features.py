"""Describes features that are too small for an input's range, which larger features share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from keras_qat.config.specs import QuantSpec
from keras_qat.graph.calls import Graph, Value, flatten_values
from keras_qat.helper_layers.keras_variants import find_statistics
from keras_qat.keras2.backend import keras

Ends = tuple[float, float]

LEVELS, FAR = 4, 32
"""A feature or a concatenated tensor is lost if it spans fewer quantized values than `LEVELS` and
the range is at least `FAR` times as wide."""
SHOWN = 5
"""Maximum number of features in a sentence."""
UNVARIED = 2e-6
"""A feature with at most this standard deviation counts as constant in the training data."""


def compute_lost_span(shared: Ends, bits: int) -> float:
    """Returns how far apart values of a feature must be for a range to distinguish them."""
    width = shared[1] - shared[0]
    return min(LEVELS * width / (2**bits - 1), width / FAR)


def predict_losses(graph: Graph, specs: Mapping[Value, Any]) -> Iterator[str]:
    """Describes features that are too small for a plan's ranges, given normalization statistics."""
    readers = graph.consumers()
    for value in flatten_values(graph.inputs):
        spec = specs.get(value)
        norms = [call.layer for call in readers[value] if has_statistics(call.layer)]
        if isinstance(spec, QuantSpec) and norms:
            yield from describe_small_features(value, norms[0], None, spec.bits, norms[0].name)


def has_statistics(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer has statistics of its input."""
    return bool(layer.built) and find_statistics(layer) is not None


def describe_small_features(
    value: Value, norm: keras.layers.Layer, ends: Ends | None, bits: int, name: str
) -> Iterator[str]:
    """Describes features that vary too little for an input's range, given its normalization layer.

    Args:
        value: the input.
        norm: the layer.
        ends: the input's range; None if it has no range yet.
        bits: bits of its quantized values.
        name: the name of the layer in the float model.
    """
    mean, deviation = find_statistics(norm) or (np.empty(0), np.empty(0))
    if deviation.size != value.shape[-1] or deviation.size < 2:
        return
    if ends is None:
        low, high = mean - 2 * deviation, mean + 2 * deviation
        ends = min(float(low.min()), 0.0), max(float(high.max()), 0.0)
    most = compute_lost_span(ends, bits) / LEVELS
    small = np.flatnonzero((deviation > UNVARIED) & (deviation < most))
    if lost := {int(index): float(LEVELS * deviation[index]) for index in small}:
        yield describe_lost_features(value.name, lost, deviation.size, ends, name)


def describe_lost_features(
    name: str, lost: dict[int, float], count: int, ends: Ends, norm: str = ""
) -> str:
    """Returns a warning about features that are too small for the range of an input, with advice.

    Args:
        name: the input's name.
        lost: index of a feature -> width of its range.
        count: number of features of the input.
        ends: the range of the input.
        norm: the name of the layer that normalizes the input; "" without one.
    """
    advice = (
        f" '{norm}' can normalize them before rounding if it stays in float: quantize_model(model, "
        f"scope=lambda layer: layer.name != '{norm}')."
    )
    listed = ", ".join(map(str, [*lost][:SHOWN])) + ", ..." * (len(lost) > SHOWN)
    features, span, are = f"features {listed}", "span", "are"
    if len(lost) == 1:
        features, span, are = f"feature {listed}", "spans", "is"
    is_kept = min(lost.values()) > compute_lost_span(ends, 16)
    finer = ", or use recipes.int16x8()" if is_kept else ""
    return (
        f"Input '{name}': {features} (of 0 to {count - 1}) {span} less than {LEVELS} quantized "
        f"values and {are} lost, because all features share one range, {ends[0]:.4g} to "
        f"{ends[1]:.4g}. Scale all features alike before the model{finer}.{advice * bool(norm)}"
    )
