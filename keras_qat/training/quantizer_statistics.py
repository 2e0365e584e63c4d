"""Statistics of quantizers: the share of clipped values, and the quantization noise."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.config.specs import QuantSpec
from keras_qat.io.counts import check_count
from keras_qat.keras2.backend import keras
from keras_qat.training.calibration.histogram import (
    Histogram,
    compute_squared_error,
    count_bins,
    sort_bins,
)
from keras_qat.training.calibration.watch import Observed, show_batches
from keras_qat.training.callbacks import find_model
from keras_qat.training.fake_quantization.phase import QUANTIZED
from keras_qat.training.quantizers import (
    Quantizer,
    get_quantized_weight,
    list_layer_quantizers,
    quantizers,
)
from keras_qat.training.schedule import check_quantized, list_scheduled_layers


@dataclasses.dataclass(frozen=True)
class QuantizerStatistics:
    """A quantizer and statistics of the values that it quantizes.

    Args:
        quantizer: its name, tensors and range.
        histogram: the values before quantization, computed in float.
        is_weight: whether it quantizes a weight.
        below, above: share of the values below the lower and above the upper end of the range.
        sqnr: signal to quantization noise ratio in dB if only this tensor is quantized; None
            without a range, or if the noise or the signal is zero.
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


def compute_statistics(
    model: keras.Model,
    data: Any,
    steps: int | None = None,
    batch_size: int | None = None,
    verbose: int = 0,
) -> list[QuantizerStatistics]:
    """Computes the statistics of all quantizers that the data reach, in the order of the layers.

    The arguments and errors are the same as in `calibrate`. The model does not change.
    """
    check_quantized(model)
    observed = Observed(model, counts=True, fixed=True)
    title = "Statistics of quantizers"
    for batch in show_batches(model, data, steps, batch_size, title, verbose):
        observed.add(batch)
    histograms = {
        quantizer: tally.histogram() for (quantizer, _), tally in observed.tallies.items()
    }
    entries: list[QuantizerStatistics] = []
    for layer in list_scheduled_layers(model):
        weights, activations = list_layer_quantizers(layer)
        quantizers_of_weights = layer.weight_quantizers.items()
        for listed, (name, quantizer) in zip(weights, quantizers_of_weights, strict=True):
            weight = tf.convert_to_tensor(get_quantized_weight(layer, name))
            quantized = quantizer(weight, QUANTIZED)
            entries.append(_measure_weight(listed, weight.numpy(), quantized.numpy()))
        entries += [
            _measure_activation(listed, histograms[quantizer])
            for listed, quantizer in zip(activations, layer.quantizers, strict=True)
            if quantizer in histograms
        ]
    return entries


def _measure_activation(quantizer: Quantizer, histogram: Histogram) -> QuantizerStatistics:
    if not quantizer.calibrated:
        return QuantizerStatistics(quantizer, histogram, False, 0.0, 0.0, None)
    ends, spec = (float(quantizer.minimum), float(quantizer.maximum)), quantizer.spec
    below, not_above = histogram.below(np.array(ends)) / histogram.size
    if not isinstance(spec, QuantSpec):
        spec = QuantSpec(spec.bits, symmetric=spec.bits == 16)
    sqnr = _decibels(histogram.energy, compute_squared_error(histogram, spec, ends))
    is_clipped = bool(histogram.high[-1] > ends[1])  # Else the maximum would count.
    above = 1 - float(not_above) if is_clipped else 0.0
    return QuantizerStatistics(quantizer, histogram, False, float(below), above, sqnr)


def _measure_weight(
    quantizer: Quantizer, before: np.ndarray, after: np.ndarray
) -> QuantizerStatistics:
    counts = sort_bins(count_bins(tf.reshape(before, [1, -1])).numpy())
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


__all__ = ["LogQuantization"]

NOISE, BEYOND = "1 signal to noise, dB", "2 share beyond the range"
MINIMUM, MAXIMUM = "3 range, minimum", "4 range, maximum"
"""Charts of `LogQuantization`. TensorBoard sorts them by name."""


class LogQuantization(keras.callbacks.Callback):
    """Logs the range, saturation and quantization noise of each quantizer to TensorBoard.

    There are four charts. "1 signal to noise, dB" and "2 share beyond the range" need `data`, but
    "3 range, minimum" and "4 range, maximum" do not. Each tensor is a run, so TensorBoard's run
    selector filters tensors by name. The step of an entry is the epoch, as for metrics.

    The accuracy of the exported file needs no callback, because `val_accuracy` already is the
    accuracy of the file.

    Args:
        log_dir: directory of the log, for example the same as for `keras.callbacks.TensorBoard`.
            The runs are in its subdirectory `quantization`.
        data: a few dozen inputs as for `calibrate`; None logs only the ranges.
        every: the number of epochs between entries.
        model: the quantization-aware model, if `fit` trains another model that calls it, such as
            one with its own `train_step` for distillation or adversarial training.

    Raises:
        ValueError: if `every` is not an integer of at least 1; at `fit` if the model is not
            quantized, if it trains other models and `model` is not given, or if the data does not
            fit it.

    Example:
        >>> log = keras_qat.callbacks.LogQuantization("logs", x_train[:64])
        >>> qat.fit(x, y, callbacks=[log, keras.callbacks.TensorBoard("logs")])
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        data: Any = None,
        *,
        every: int = 1,
        model: keras.Model = None,
    ) -> None:
        super().__init__()
        self.every = check_count("every", every)
        self.log_dir, self.data, self.within = os.fspath(log_dir), data, model
        self._writers: dict[str, Any] = {}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        listed = quantizers(find_model(self, self.log_dir))  # Raises before the first epoch.
        runs = (_run(quantizer) for quantizer in listed)
        self._writers = {
            run: tf.summary.create_file_writer(os.path.join(self.log_dir, "quantization", run))
            for run in runs
        }

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if (epoch + 1) % self.every:
            return
        # The same entries as tf.summary.scalar writes, but without importing TensorBoard.
        metadata = tf.compat.v1.SummaryMetadata(data_class=1)
        metadata.plugin_data.plugin_name = "scalars"
        for run, chart, value in self._scalars(find_model(self, self.log_dir)):
            with self._writers[run].as_default():
                tf.summary.write(chart, tf.constant(value, tf.float32), epoch, metadata)
        for writer in self._writers.values():
            writer.flush()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        for writer in self._writers.values():
            writer.close()

    def _scalars(self, model: keras.Model) -> Iterator[tuple[str, str, float]]:
        """Yield the run, the chart and the value of each entry."""
        entries = [] if self.data is None else compute_statistics(model, self.data)
        listed = [entry.quantizer for entry in entries] if entries else quantizers(model)
        for quantizer in listed:
            if quantizer.calibrated:
                yield _run(quantizer), MINIMUM, float(np.min(quantizer.minimum))
                yield _run(quantizer), MAXIMUM, float(np.max(quantizer.maximum))
        for entry in entries:
            yield _run(entry.quantizer), BEYOND, entry.saturation
            if entry.sqnr is not None:
                yield _run(entry.quantizer), NOISE, entry.sqnr


def _run(quantizer: Quantizer) -> str:
    """Return the name of a quantizer's run, which contains the tensors that it quantizes."""
    return "+".join(quantizer.quantizes)
