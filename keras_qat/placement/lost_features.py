"""Warns of lost features in the model's inputs.

All features of an input share one range. If the range is 0 to 1000, all values from 0 to 1 become
the same integer. A feature with these values is lost.
"""

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
"""A feature is lost if it spans fewer than `LEVELS` quantized values, and if the input's range is
at least `FAR` times as wide as the feature's."""
SHOWN = 5
"""Maximum number of features in a warning."""
UNVARIED = 2e-6
"""A feature with at most this standard deviation counts as constant in the training data."""


def compute_lost_span(shared: Ends, bits: int) -> float:
    """Returns the least width of a feature that is not lost. `shared` is the input's range."""
    width = shared[1] - shared[0]
    return min(LEVELS * width / (2**bits - 1), width / FAR)


def predict_losses(graph: Graph, specs: Mapping[Value, Any]) -> Iterator[str]:
    """Yields warnings about lost features of inputs that a normalization layer reads."""
    readers = graph.consumers()
    for value in flatten_values(graph.inputs):
        spec = specs.get(value)
        norms = [call.layer for call in readers[value] if has_statistics(call.layer)]
        if isinstance(spec, QuantSpec) and norms:
            yield from describe_small_features(value, norms[0], None, spec.bits, norms[0].name)


def has_statistics(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer knows the mean and deviation of its input, like Normalization."""
    return bool(layer.built) and find_statistics(layer) is not None


def describe_small_features(
    value: Value, norm: keras.layers.Layer, ends: Ends | None, bits: int, name: str
) -> Iterator[str]:
    """Yields a warning if features of an input are lost, according to its normalization layer.

    `ends` is the input's range. If it is None, the layer's statistics determine the range. `name`
    is the layer's name in the float model.
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
    """Returns a warning about lost features of the input `name`, with advice.

    `lost` maps the index of a lost feature to the width of its range. `count` is the number of all
    features. `norm` is the name of a layer that normalizes the input, or "".
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
