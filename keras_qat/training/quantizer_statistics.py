"""What each quantizer of a model does to its tensor: what is cut off, how large the error is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.config.specs import QuantSpec
from keras_qat.io.data import batch_count, batches
from keras_qat.io.progress import shown
from keras_qat.training.calibration.histogram import Histogram, counts_of, folded
from keras_qat.training.calibration.methods import squared_error
from keras_qat.training.calibration.watch import Observed
from keras_qat.training.layers.scheduled_layer import Phase
from keras_qat.training.quantizers import Quantizer, layer_quantizers, quantized_weight
from keras_qat.training.schedule import check_quantized, scheduled_layers

__all__ = ["QuantizerStatistics", "statistics"]

QUANTIZING = Phase(training=False, quantizing=True, frozen=True, calibrated=True)


@dataclasses.dataclass(frozen=True)
class QuantizerStatistics:
    """One quantizer and the numbers that it quantizes.

    Args:
        quantizer: its name, tensors and range.
        histogram: of the numbers in front of it, computed in float.
        is_weight: whether they are a weight.
        below, above: share of the numbers that lie beyond either end of the range.
        sqnr: signal to quantization noise of this tensor alone, in dB. None without a range, and
            where the noise or the signal is zero.
    """

    quantizer: Quantizer
    histogram: Histogram
    is_weight: bool
    below: float
    above: float
    sqnr: float | None

    @property
    def saturation(self) -> float:
        """Share of the numbers that are cut off."""
        return self.below + self.above


def statistics(
    model: Any,
    data: Any,
    steps: int | None = None,
    batch_size: int | None = None,
    verbose: int = 0,
) -> list[QuantizerStatistics]:
    """The statistics of all quantizers that the model's data reach, in the order of the layers.

    Args and errors: as for `calibrate`. Nothing of the model changes.
    """
    check_quantized(model, ": call keras_qat.quantize_model(model) first.")
    seen = Observed(model, counts=True, fixed=True)
    total = batch_count(model, data, batch_size, steps)
    read = batches(model, data, batch_size, steps, finite=True)
    for batch in shown(read, "Statistics of quantizers", verbose, total):
        seen.add(batch)
    histograms = seen.histograms()
    found: list[QuantizerStatistics] = []
    for layer in scheduled_layers(model):
        weights, activations = layer_quantizers(layer)
        found += map(_of_weight, weights, *_weights(layer))
        found += [
            _of_activation(each, histograms[quantizer])
            for each, quantizer in zip(activations, layer.quantizers, strict=True)
            if quantizer in histograms
        ]
    return found


def _of_activation(quantizer: Quantizer, histogram: Histogram) -> QuantizerStatistics:
    if not quantizer.calibrated:
        return QuantizerStatistics(quantizer, histogram, False, 0.0, 0.0, None)
    ends, spec = (float(quantizer.minimum), float(quantizer.maximum)), quantizer.spec
    below, not_above = histogram.below(np.array(ends)) / histogram.size
    if not isinstance(spec, QuantSpec):
        spec = QuantSpec(spec.bits, symmetric=spec.bits == 16)
    sqnr = _decibels(histogram.energy, squared_error(histogram, spec, ends))
    highest = bool(histogram.high[-1] > ends[1])  # Or the highest number counts as above itself.
    above = 1 - float(not_above) if highest else 0.0
    return QuantizerStatistics(quantizer, histogram, False, float(below), above, sqnr)


def _weights(layer: Any) -> tuple[Iterable[np.ndarray], Iterable[np.ndarray]]:
    """The weights of a layer that are quantized, before and after."""
    found = [
        (quantized_weight(layer, name), quantizer)
        for name, quantizer in getattr(layer, "weight_quantizers", {}).items()
    ]
    before = [tf.convert_to_tensor(weight) for weight, _ in found]
    after = [quantizer(x, QUANTIZING) for x, (_, quantizer) in zip(before, found, strict=True)]
    return [each.numpy() for each in before], [each.numpy() for each in after]


def _of_weight(quantizer: Quantizer, before: np.ndarray, after: np.ndarray) -> QuantizerStatistics:
    counts = folded(counts_of(tf.reshape(before, [1, -1])).numpy())
    histogram = Histogram.of(counts, float(before.min()), float(before.max()))
    low, high = np.min(quantizer.minimum), np.max(quantizer.maximum)
    below, above = float(np.mean(before < low)), float(np.mean(before > high))
    if not quantizer.calibrated:
        return QuantizerStatistics(quantizer, histogram, True, 0.0, 0.0, None)
    real = before.astype(np.float64)
    sqnr = _decibels(float(np.sum(real**2)), float(np.sum((after - real) ** 2)))
    return QuantizerStatistics(quantizer, histogram, True, below, above, sqnr)


def _decibels(signal: float, noise: float) -> float | None:
    return float(10 * np.log10(signal / noise)) if signal > 0 and noise > 0 else None
