"""Finds small values that are lost in quantization, because larger values share their range.

For example, an int8 input has the features age (0 to 100) and share (0 to 0.1). Its scale is 0.4,
so every share is quantized to 0. The inputs of a concatenation also share a range. Such tensors are
numbered: slot 0, slot 1, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from keras_qat.config import specs
from keras_qat.graph.calls import Call, Graph, Value, flatten_values
from keras_qat.helper_layers.keras_variants import find_statistics
from keras_qat.keras2.backend import keras
from keras_qat.ops.registry import find_row
from keras_qat.placement.lost_features import (
    LEVELS,
    Ends,
    compute_lost_span,
    describe_lost_features,
    describe_small_features,
)
from keras_qat.training.fake_quantization.activation_quantizer import ActivationQuantizer
from keras_qat.training.fake_quantization.observers import LastValue
from keras_qat.training.layers import Quantize, QuantizeWrapper
from keras_qat.training.quantizers import PREFIX

MOST_FEATURES = 16
"""An input [batch, steps, features] is only checked if it has at most this number of features."""
_EXAMPLES = 64
"""To count the different values of a feature, at most this number of examples is read."""
FAR = 32
"""Outliers are only reported if they make the range more than this many times as wide."""
ENOUGH = 8
"""Outliers are only reported if the other values share fewer quantized values than this number."""
VARIED = 4
"""Outliers are only reported if the other values include at least this many distinct numbers."""
MARK = 0.01
"""If at least this share of the values are outliers, the model may cause them, not the data. For
example, a model may add -1e9 to masked values. The warning then suggests to change the model."""


def explain_losses(graph: Graph, data: Sequence[np.ndarray] | None = None) -> list[str]:
    """Returns warnings about features or tensors that are too small for their shared range.

    `data` is an array of examples for each input. Without `data`, features are judged by the mean
    and the variance in a normalization layer after the input.
    """
    features = _explain_by_statistics(graph) if data is None else explain_lost_features(graph, data)
    return [*features, *_explain_lost_tensors(graph)]


def explain_lost_features(graph: Graph, data: Sequence[np.ndarray]) -> Iterator[str]:
    """Yields a warning for each input with features that are too small for the input's range."""
    inputs = flatten_values(graph.inputs)
    for index, quantizer in find_input_quantizers(graph).items():
        if not has_features(data[index]) or not data[index].size:
            continue
        x, bits = replace_nonfinite(data[index]), quantizer.spec.bits
        axes = tuple(range(x.ndim - 1))
        low, high = x.min(axes).astype(float), x.max(axes).astype(float)
        shared = min(low.min(), 0.0), max(high.max(), 0.0)
        if quantizer.is_calibrated():  # The features are not the cause of a wider range.
            ends = quantizer.current_range()
            shared = max(shared[0], ends[0]), min(shared[1], ends[1])
        if lost := find_lost_features(low, high, x[:_EXAMPLES], shared, bits):
            name = inputs[index].name
            yield describe_lost_features(name, lost, x.shape[-1], shared, find_norm(graph, name))


def describe_lost_tensors(ends: dict[str, Ends], shared: Ends, bits: int) -> str:
    """Returns a warning if tensors are too small for their common range `shared`, or "".

    `ends` has the smallest and the largest value of each tensor, by name.
    """
    low, high = shared
    most = compute_lost_span(shared, bits)
    lost = [name for name, (start, end) in ends.items() if 0 < end - start < most]
    if not lost:
        return ""
    widest = max(ends, key=lambda name: ends[name][1] - ends[name][0])
    start, end = ends[lost[0]]
    others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    return (
        f"The output of '{lost[0]}', {start:.4g} to {end:.4g},{others} shares one range, {low:.4g} "
        f"to {high:.4g}, with '{widest}'. It spans less than {LEVELS} of {2**bits} quantized "
        f"values, and is lost. Scale these tensors alike before they are combined, for example "
        f"by a Rescaling or a BatchNormalization after '{widest}'. Or export them separately: "
        f"quantize_model(model, outputs=[...])."
    )


def find_lost_features(
    low: np.ndarray, high: np.ndarray, examples: np.ndarray, shared: Ends, bits: int
) -> dict[int, float]:
    """Returns {index: high - low} for features that are too small for the range `shared`.

    `low` and `high` have the extremes of each feature. Features with few different values in
    `examples` are left out, such as a pixel that is mostly 0.
    """
    spans = high - low
    lost = np.flatnonzero((spans > 0) & (spans < compute_lost_span(shared, bits)))
    rows = examples.reshape(-1, examples.shape[-1])
    return {
        int(index): float(spans[index]) for index in lost if len(np.unique(rows[:, index])) > LEVELS
    }


def has_features(x: np.ndarray) -> bool:
    """Guesses from the shape if the last axis of an input holds features with different scales."""
    return x.ndim == 2 or (x.ndim == 3 and x.shape[-1] <= MOST_FEATURES)


def replace_nonfinite(x: np.ndarray) -> np.ndarray:
    """Replaces NaN and infinity by 0. Some models accept such inputs, and replace them too."""
    return x if np.isfinite(x).all() else np.nan_to_num(x, posinf=0.0, neginf=0.0)


def find_input_quantizers(graph: Graph) -> dict[int, ActivationQuantizer]:
    """Returns {input index: quantizer} for inputs that do not share a range with other tensors."""
    readers = graph.consumers()
    quantizers = {}
    for index, value in enumerate(flatten_values(graph.inputs)):
        layers = [call.layer for call in readers[value] if isinstance(call.layer, Quantize)]
        own = [layer for layer in layers if layer.slots == 1]
        if value.is_float and own and isinstance(own[0].spec, specs.QuantSpec):
            quantizers[index] = own[0].quantizer
    return quantizers


def find_masked_scores(graph: Graph) -> set[ActivationQuantizer]:
    """Returns the quantizers of masked attention scores. Their ranges need no check.

    `MaskScores` replaces masked scores by values a little below the others, not by -1e9.
    """
    masked = set()
    for call in graph.calls:
        if isinstance(call.layer, Quantize):
            for quantizer, value in zip(call.layer.quantizers, call.inputs, strict=False):
                row = value.producer and find_row(value.producer.layer)
                masked |= {quantizer} if row and row.has_mark else set()
    return masked


def name_slots(graph: Graph) -> dict[Quantize, dict[int, str]]:
    """Returns {layer: {slot: name of the tensor in the float model}}.

    If a Rescaling by 1 converts a tensor to the shared range, the result has the tensor's name.
    """
    names: dict[Quantize, dict[int, str]] = {}
    for call in graph.calls:
        slot = call.kwargs.get("slot", 0)
        if not isinstance(call.layer, Quantize) or slot is None:  # An average of earlier tensors.
            continue
        producer = call.inputs[0].producer
        tensors: tuple[str, ...] = call.layer.tensors
        name = tensors[slot] if slot < len(tensors) else str(call.layer.name)
        before = producer.inputs[0].producer if producer and _is_rescaling_by(producer, 1) else None
        if before is not None and before.layer in names:
            name = names[before.layer][before.kwargs.get("slot", 0)]
        names.setdefault(call.layer, {})[slot] = name.removeprefix(PREFIX)
    return names


def find_varying_slots(graph: Graph) -> set[tuple[Quantize, int]]:
    """Returns pairs (layer, slot) for the tensors that depend on the model's inputs.

    Other tensors hold weights or constants, such as the class token of vision transformers.
    """
    varying, slots = set(flatten_values(graph.inputs)), set()
    for call in graph.calls:
        op = find_row(call.layer)
        is_constant = op is not None and (op.reads_only_weights or op.is_constant)
        is_constant = is_constant or _is_rescaling_by(call, 0)
        if not is_constant and varying.intersection(call.inputs):
            varying.update(flatten_values(call.outputs))
            if isinstance(call.layer, Quantize):
                slots.add((call.layer, call.kwargs.get("slot", 0)))
    return slots


def _is_rescaling_by(call: Call, factor: float) -> bool:
    """Return True if a call is a Rescaling by `factor`, without an offset."""
    layer = get_first_layer(call)
    if not isinstance(layer, keras.layers.Rescaling) or np.any(layer.offset):
        return False
    return bool(np.all(np.equal(layer.scale, factor)))


def get_first_layer(call: Call) -> keras.layers.Layer:
    """Returns the layer of a call or, for a QuantizeWrapper, the first layer inside the wrapper."""
    return call.layer.sublayers[0] if isinstance(call.layer, QuantizeWrapper) else call.layer


def _explain_lost_tensors(graph: Graph) -> Iterator[str]:
    masked, varying = find_masked_scores(graph), find_varying_slots(graph)
    for layer, names in name_slots(graph).items():
        quantizer, ends = layer.quantizer, {}
        if layer.slots == 1 or quantizer in masked:
            continue
        for slot, name in names.items():
            observer = dict(enumerate(quantizer.observers)).get(slot)  # None for a fixed range.
            if isinstance(observer, LastValue) and (layer, slot) in varying:
                ends[name] = observer.extremes()
        shared = quantizer.current_range()
        if reason := ends and describe_lost_tensors(ends, shared, quantizer.spec.bits):
            yield reason


def _explain_by_statistics(graph: Graph) -> Iterator[str]:
    """Yield a warning about features with a standard deviation below one quantization step."""
    inputs = flatten_values(graph.inputs)
    quantizers = {inputs[index]: own for index, own in find_input_quantizers(graph).items()}
    for value, norm in _find_norms(graph):
        if value in quantizers:
            ends, bits = quantizers[value].current_range(), quantizers[value].spec.bits
            yield from describe_small_features(
                value, norm, ends, bits, norm.name.removeprefix(PREFIX)
            )


def find_norm(graph: Graph, name: str) -> str:
    """Returns the name of the normalization layer that reads the input `name`, or ""."""
    norms = (norm for value, norm in _find_norms(graph) if value.name == name)
    return next((norm.name.removeprefix(PREFIX) for norm in norms), "")


def _find_norms(graph: Graph) -> Iterator[tuple[Value, keras.layers.Layer]]:
    """Yield (input, layer) for each input that goes directly into a normalization layer."""
    inputs = {value: value for value in flatten_values(graph.inputs)}
    for call in graph.calls:
        source = inputs.get(call.inputs[0]) if len(call.inputs) == 1 else None
        if source is not None and isinstance(call.layer, Quantize):
            inputs[call.output] = source
        elif source is not None and find_statistics(get_first_layer(call)) is not None:
            yield source, get_first_layer(call)


class Outliers(NamedTuple):
    """Values of a tensor that are far from most values.

    Args:
        value: the outlier with the largest magnitude.
        share: the share of the values that are outliers.
        low, high: the smallest and the largest of the other values.
    """

    value: float
    share: float
    low: float
    high: float


def find_outliers(
    values: np.ndarray, extremes: tuple[float, float], ends: tuple[float, float], bits: int
) -> Outliers | None:
    """Returns outliers if the other values are too small for the range. Otherwise returns None.

    `values` is a sample of a tensor. `extremes` are the smallest and the largest value of the
    entire tensor. `ends` is the tensor's quantization range.
    """
    low, high = ends
    rest = np.sort(np.clip(np.append(values.astype(np.float64).ravel(), extremes), low, high))
    outermost = None
    for _ in range(2):  # Both sides may have outliers.
        gaps = np.diff(rest)
        if not gaps.size or gaps.max() <= (rest[-1] - rest[0]) / 4:
            break
        below, above = np.split(rest, [int(gaps.argmax()) + 1])
        if abs(below[-1]) < abs(above[0]):
            rest, far = below, above[-1]
        else:
            rest, far = above, below[0]
        outermost = max(outermost or 0.0, float(far), key=abs)
    if outermost is None or abs(outermost) < abs(high if outermost > 0 else low) / 2:
        return None  # Outliers did not determine the range.
    needed = max(rest[-1], 0.0) - min(rest[0], 0.0)
    share = 1 - rest.size / (values.size + 2)
    is_lost = needed * FAR < high - low and needed * (2**bits - 1) < ENOUGH * (high - low)
    is_gate = abs(outermost) <= 1 and share >= MARK  # A saturated sigmoid, as in 1 - z.
    if not is_lost or is_gate or len(np.unique(rest)) < VARIED:
        return None
    return Outliers(outermost, share, float(rest[0]), float(rest[-1]))


def describe_outliers(far: Outliers, low: float, high: float, bits: int) -> str:
    needed = max(far.high, 0.0) - min(far.low, 0.0)
    remaining = max(1, int(needed / (high - low) * (2**bits - 1)))
    cost = (
        f"its range, {low:.4g} to {high:.4g}, is set by {far.value:.4g}, far outside of its other "
        f"values. Those range from {far.low:.4g} to {far.high:.4g}, and share only {remaining} of "
        f"{2**bits} quantized values."
    )
    if far.share < MARK:
        return (
            f"{cost} Remove such outliers from the data, or call calibrate with "
            f"method='percentile'."
        )
    near = 2 * (min(far.low, 0.0) if far.value < 0 else max(far.high, 0.0)) or np.sign(far.value)
    return f"{cost} Replace it in the model by a value near the others, such as {near:.2g}."
