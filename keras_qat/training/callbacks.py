"""Keras callbacks: when a model quantizes, when statistics and ranges freeze, what quantizers do.

Those that decide only set thresholds that the layers compare their own training step with. So they
are exact to the step with any `steps_per_execution`, and training that is saved and resumed goes on
in the middle of a delay: the layers' steps are saved with the model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.frontend.keras2.backend import keras, traced
from keras_qat.frontend.keras2.readability import is_graph_model
from keras_qat.training.distillation import Distiller
from keras_qat.training.oscillation import Oscillations
from keras_qat.training.quantizer_statistics import statistics
from keras_qat.training.quantizers import Quantizer, quantizers
from keras_qat.training.ranges.weight_limits import per_channel
from keras_qat.training.schedule import check_quantized, schedule

__all__ = ["FreezeBatchNorm", "FreezeOscillations", "FreezeRanges", "LogQuantization", "QuantDelay"]


class _Threshold(keras.callbacks.Callback):
    threshold: str

    def __init__(self, steps: int, *, model: Any = None) -> None:
        super().__init__()
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(f"steps={steps!r}: give a whole number of training steps, 0 or more.")
        self.steps, self.within = steps, model

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        schedule(_meant(self, self.steps), **{self.threshold: self.steps})


def _meant(callback: Any, given: Any) -> Any:
    """The model that a callback is for: that which is trained, unless it is told of another."""
    model = callback.model if callback.within is None else callback.within
    model = model.student if isinstance(model, Distiller) else model
    if isinstance(model, keras.Model) and not is_graph_model(model):
        name = type(callback).__name__
        raise ValueError(
            f"{type(model).__name__} '{model.name}' trains other models, and {name} does not "
            f"know which of them it is for. Say so: {name}({given!r}, model=qat), with the "
            f"model that quantize_model returned."
        )
    return model


class QuantDelay(_Threshold):
    """Trains in float first: fake quantization begins at step `steps`.

    Ranges are observed from the first step on. The model's steps count, over all calls of `fit`
    and across saving and loading, from 1: with 2_000, the 2 000th is the first quantized step.

    Args:
        steps: the first step that is quantized, in training steps (batches). 0 and 1 mean all.
        model: the quantization-aware model, where another one that calls it is trained: one with a
            `train_step` of its own, for distillation or adversarial training.

    Raises:
        ValueError: if `steps` is negative or not whole; at `fit` if the model is not quantized, or
            trains others and `model` is not given.

    Example:
        >>> qat.fit(x, y, callbacks=[keras_qat.callbacks.QuantDelay(2_000)])

    Source: `quant_delay` of `tf.contrib.quantize`.
    """

    threshold = "quantize_from"


class FreezeBatchNorm(_Threshold):
    """Freezes BatchNormalization at step `steps`: moving statistics from then on.

    They are used in place of the batch's and no longer change; gamma and beta go on training.
    Only BatchNormalization that is folded into a layer is meant: it is what inference folds.

    Args:
        steps: the first step that is frozen, in training steps (batches), counted from 1.
        model: as for `QuantDelay`.

    Raises:
        ValueError: as for `QuantDelay`.

    Example:
        >>> qat.fit(x, y, callbacks=[keras_qat.callbacks.FreezeBatchNorm(10_000)])

    Source: `freeze_bn_delay` of `tf.contrib.quantize`.
    """

    threshold = "freeze_from"


class FreezeRanges(_Threshold):
    """Keeps the ranges of activations from step `steps` on: nothing is observed any more.

    Weights then settle on ranges that stay, and a step takes less time. Ranges of weights go
    on following the weights.

    Args:
        steps: the first step that leaves ranges as they are, in training steps (batches), counted
            from 1. From 0 or 1 on the model needs ranges before training, as `calibrate` gives.

    Raises:
        ValueError: if `steps` is negative or not whole, or at `fit` if the model is not quantized.

    Example:
        >>> qat.fit(x, y, callbacks=[keras_qat.callbacks.FreezeRanges(5_000)])
    """

    threshold = "freeze_ranges_from"


class FreezeOscillations(keras.callbacks.Callback):
    """Lets weights of few bits rest that jump between two levels.

    A weight near the middle between two levels turns back and forth, and the statistics of
    BatchNormalization follow neither. Once it has done so in more than `threshold` of the steps, it
    is kept at the level where it was most of the time. For 4 bits and fewer; weights with more, or
    with one range for all, are left alone. What is frozen is forgotten when training is resumed.

    Args:
        threshold: share of the steps in which a weight turns: in the first epoch and in the last,
            with a cosine between them.
        momentum: of the average over steps: of some 1 / momentum steps.
        model: as for `QuantDelay`.

    Raises:
        ValueError: if thresholds or momentum are not between 0 and 1; at `fit` as `QuantDelay`.

    Example:
        >>> qat.fit(x, y, epochs=10, callbacks=[keras_qat.callbacks.FreezeOscillations()])

    Source: Nagel et al. 2022 (arXiv:2203.11086).
    """

    def __init__(
        self,
        threshold: tuple[float, float] = (0.1, 0.01),
        momentum: float = 0.01,
        *,
        model: Any = None,
    ) -> None:
        super().__init__()
        if not all(0 < each < 1 for each in (*threshold, momentum)):
            raise ValueError(
                f"threshold={threshold}, momentum={momentum}: give numbers between 0 and 1."
            )
        self.threshold, self.momentum, self.within = threshold, momentum, model
        self._limit = tf.Variable(threshold[0], trainable=False)
        self._watched: list[Oscillations] = []

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        model = _meant(self, self.threshold)
        check_quantized(model, ": call keras_qat.quantize_model(model) first.")
        self._watched = [
            Oscillations(weights, quantizer, self.momentum)
            for weights, quantizer in per_channel(model)
            if quantizer.spec.bits <= 4
        ]
        self._update = traced(self._update_all)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        first, last = self.threshold
        done = epoch / max(self.params["epochs"] - 1, 1)
        self._limit.assign(last + (first - last) * 0.5 * (1 + np.cos(np.pi * done)))

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._update()

    def _update_all(self) -> None:
        for each in self._watched:
            each.update(self._limit)

    @property
    def frozen(self) -> float:
        """The share of the watched weights that rest."""
        rest = [each.frozen.numpy() for each in self._watched]
        return float(sum(map(np.sum, rest)) / max(sum(map(np.size, rest)), 1))


class LogQuantization(keras.callbacks.Callback):
    """Logs the range of each quantizer to TensorBoard, and what it cuts off and costs.

    In TensorBoard's scalars are `range_min/` and `range_max/`, each with the name of the tensor
    behind it; with data also `saturation/`, the share of the numbers that lie beyond the range,
    and `sqnr/`, the signal to quantization noise of that tensor alone, in dB. They stand at the
    epoch, as the metrics of `keras.callbacks.TensorBoard` do.

    No callback is needed for the accuracy of the file: `evaluate`, and so `val_accuracy`, compute
    what the exported file gives, code for code.

    Args:
        log_dir: directory of the log, as that of `keras.callbacks.TensorBoard`; what is logged
            here is a run of its own in it, "quantization".
        data: inputs as for `calibrate`, some dozens of them; None for the ranges alone.
        every: how many epochs there are from one entry to the next.
        model: as for `QuantDelay`.

    Raises:
        ValueError: if `every` is not a whole number from 1 on; at `fit` if the model is not
            quantized, trains others and `model` is not given, or the data is not what it takes.

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
        model: Any = None,
    ) -> None:
        super().__init__()
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r}: give a whole number of epochs, 1 or more.")
        self.log_dir, self.data, self.every, self.within = os.fspath(log_dir), data, every, model
        self._writer: Any = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        check_quantized(_meant(self, self.log_dir), ": call keras_qat.quantize_model(model) first.")
        self._writer = tf.summary.create_file_writer(os.path.join(self.log_dir, "quantization"))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if (epoch + 1) % self.every:
            return
        # As tf.summary.scalar does, which TensorFlow has with TensorBoard alone.
        metadata = tf.compat.v1.SummaryMetadata(data_class=1)
        metadata.plugin_data.plugin_name = "scalars"
        with self._writer.as_default():
            for name, value in self._scalars(_meant(self, self.log_dir)):
                tf.summary.write(name, tf.constant(value, tf.float32), epoch, metadata)
        self._writer.flush()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._writer.close()

    def _scalars(self, model: Any) -> Iterator[tuple[str, float]]:
        if self.data is None:
            for each in quantizers(model):
                yield from _ends(each)
            return
        for found in statistics(model, self.data):
            name = _named(found.quantizer)
            yield from _ends(found.quantizer)
            yield f"saturation/{name}", found.saturation
            if found.sqnr is not None:
                yield f"sqnr/{name}", found.sqnr


def _ends(quantizer: Quantizer) -> Iterator[tuple[str, float]]:
    if quantizer.calibrated:
        yield f"range_min/{_named(quantizer)}", float(np.min(quantizer.minimum))
        yield f"range_max/{_named(quantizer)}", float(np.max(quantizer.maximum))


def _named(quantizer: Quantizer) -> str:
    return "+".join(quantizer.quantizes)
