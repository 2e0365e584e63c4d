"""Statistics of quantizers: the share of values that they clip, and the error that they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.config.specs import QuantSpec
from keras_qat.training.calibration.histogram import Histogram, counts_of, folded
from keras_qat.training.calibration.methods import squared_error
from keras_qat.training.calibration.watch import Observed, shown_batches
from keras_qat.training.layers.scheduled_layer import QUANTIZED, ScheduledLayer
from keras_qat.training.quantizers import Quantizer, layer_quantizers, quantized_weight
from keras_qat.training.schedule import check_quantized, scheduled_layers


@dataclasses.dataclass(frozen=True)
class QuantizerStatistics:
    """A quantizer and statistics of the values that it quantizes.

    Args:
        quantizer: its name, tensors and range.
        histogram: the values in front of it, computed in float.
        is_weight: whether it quantizes a weight.
        below, above: share of the values beyond the lower and the upper end of the range.
        sqnr: signal to quantization noise ratio of this tensor alone, in dB; None without a range,
            or if the noise or the signal is zero.
    """

    quantizer: Quantizer
    histogram: Histogram
    is_weight: bool
    below: float
    above: float
    sqnr: float | None

    @property
    def saturation(self) -> float:
        """The share of the values that are clipped."""
        return self.below + self.above


def statistics(
    model: Any,
    data: Any,
    steps: int | None = None,
    batch_size: int | None = None,
    verbose: int = 0,
) -> list[QuantizerStatistics]:
    """Computes the statistics of all quantizers that the data reach, in the order of the layers.

    Arguments and errors are those of `calibrate`. The model does not change.
    """
    check_quantized(model)
    observed = Observed(model, counts=True, fixed=True)
    title = "Statistics of quantizers"
    for batch in shown_batches(model, data, steps, batch_size, title, verbose):
        observed.add(batch)
    histograms = {
        quantizer: tally.histogram() for (quantizer, _), tally in observed.tallies.items()
    }
    entries: list[QuantizerStatistics] = []
    for layer in scheduled_layers(model):
        weights, activations = layer_quantizers(layer)
        entries += map(_of_weight, weights, *_weights(layer))
        entries += [
            _of_activation(listed, histograms[quantizer])
            for listed, quantizer in zip(activations, layer.quantizers, strict=True)
            if quantizer in histograms
        ]
    return entries


def _of_activation(quantizer: Quantizer, histogram: Histogram) -> QuantizerStatistics:
    if not quantizer.calibrated:
        return QuantizerStatistics(quantizer, histogram, False, 0.0, 0.0, None)
    ends, spec = (float(quantizer.minimum), float(quantizer.maximum)), quantizer.spec
    below, not_above = histogram.below(np.array(ends)) / histogram.size
    if not isinstance(spec, QuantSpec):
        spec = QuantSpec(spec.bits, symmetric=spec.bits == 16)
    sqnr = _decibels(histogram.energy, squared_error(histogram, spec, ends))
    is_clipped = bool(histogram.high[-1] > ends[1])  # Else the maximum would count as above.
    above = 1 - float(not_above) if is_clipped else 0.0
    return QuantizerStatistics(quantizer, histogram, False, float(below), above, sqnr)


def _weights(layer: ScheduledLayer) -> tuple[Iterable[np.ndarray], Iterable[np.ndarray]]:
    """Returns the quantized weights of a layer, before and after quantization."""
    quantizers = layer.weight_quantizers
    before = [tf.convert_to_tensor(quantized_weight(layer, name)) for name in quantizers]
    after = [q(weight, QUANTIZED) for weight, q in zip(before, quantizers.values(), strict=True)]
    return [weight.numpy() for weight in before], [weight.numpy() for weight in after]


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
