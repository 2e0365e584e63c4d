"""Keras callbacks that delay quantization, freeze statistics, ranges and weights, and log ranges.

The delaying and freezing callbacks only set thresholds, which the layers compare with their own
count of training steps. So a change happens at the exact step with any `steps_per_execution`, and
training that is saved and resumed continues in the middle of a delay.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.config.arguments import answers_unknown
from keras_qat.io.counts import check_count
from keras_qat.keras2.backend import keras, make_tf_function
from keras_qat.keras2.readability import is_graph_model
from keras_qat.training.distillation import Distiller
from keras_qat.training.float_epochs import warn_of_float_epochs
from keras_qat.training.oscillation import Oscillations
from keras_qat.training.phase_graphs import check_frozen
from keras_qat.training.quantizer_statistics import statistics
from keras_qat.training.quantizers import Quantizer, quantizers
from keras_qat.training.ranges.weight_limits import per_channel
from keras_qat.training.schedule import check_quantized, is_quantized, schedule, share_layers
from keras_qat.training.steps.between_steps import StepCallback
from keras_qat.training.steps.callback_list import KnowsOthers

__all__ = ["FreezeBatchNorm", "FreezeOscillations", "FreezeRanges", "LogQuantization", "QuantDelay"]

NOISE, BEYOND = "1 signal to noise, dB", "2 share beyond the range"
MINIMUM, MAXIMUM = "3 range, minimum", "4 range, maximum"
"""Charts of `LogQuantization`. TensorBoard sorts them by name."""


class _Threshold(KnowsOthers):
    """A callback that sets one threshold of all layers when training begins."""

    threshold: str

    @answers_unknown(delay="steps=2_000", epochs="steps=epochs * len(x) // batch_size")
    def __init__(self, steps: int, *, model: Any = None) -> None:
        super().__init__()
        self.steps, self.within = check_count("steps", steps, least=0), model

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        model = _model_of(self, self.steps)
        others = [item for item in self.beside if getattr(item, "threshold", "") == self.threshold]
        for other in others:
            is_of_it = share_layers(model, _model_of(other, other.steps))
            if other.steps != self.steps and is_of_it:
                name = type(self).__name__
                raise ValueError(
                    f"The callbacks {name}({others[0].steps}) and {name}({others[1].steps}) of "
                    f"'{model.name}' contradict each other. Pass one of them."
                )
        schedule(model, **{self.threshold: self.steps})
        check_frozen(model)


def _model_of(callback: Any, argument: Any) -> Any:
    """Returns the model that a callback is for: the trained one, unless its `model` says another.

    Raises:
        ValueError: if that model is not quantization-aware, or trains others; the message repeats
            `argument`, the callback's first one.
    """
    model = callback.model if callback.within is None else callback.within
    model = model.student if isinstance(model, Distiller) else model
    if isinstance(model, keras.Model) and not is_graph_model(model):
        name = type(callback).__name__
        raise ValueError(
            f"{type(model).__name__} '{model.name}' trains other models, and {name} does not "
            f"know which of them it is for. Pass {name}({argument!r}, model=qat), with the "
            f"model that quantize_model returned."
        )
    check_quantized(model)
    if is_quantized(callback.model) and not share_layers(callback.model, model):
        raise ValueError(
            f"{type(callback).__name__}({argument!r}, model={model.name!r}) is for another model: "
            f"fit trains '{callback.model.name}', which has none of its layers. Leave model= out, "
            f"or pass the model that is trained."
        )
    return model


class QuantDelay(_Threshold):
    """Trains in float until training step `steps`, then with fake quantization.

    Ranges are observed from the first step on. Steps are counted from 1, over all calls of `fit`
    and across saving and loading: with 2_000, the 2 000th step is the first quantized one.

    Args:
        steps: the first quantized training step (batch). 0 and 1 quantize all steps.
        model: the quantization-aware model, if `fit` trains another model that calls it, such as
            one with its own `train_step` for distillation or adversarial training.

    Raises:
        ValueError: if `steps` is negative or no integer; at `fit` if the model is not quantized, or
            trains others and `model` is not given.

    Example:
        >>> qat.fit(x, y, callbacks=[keras_qat.callbacks.QuantDelay(2_000)])

    Source: `quant_delay` of `tf.contrib.quantize`.
    """

    threshold = "quantize_from"
    _looked = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._looked = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._looked:
            self._looked = True
            warn_of_float_epochs(self, _model_of(self, self.steps), epoch)


class FreezeBatchNorm(_Threshold):
    """Freezes the statistics of BatchNormalization at training step `steps`.

    From then on training uses the moving statistics, which no longer change, in place of the
    batch's; gamma and beta continue to train. This applies only to BatchNormalization that is
    folded into a layer.

    Args:
        steps: the first training step (batch) with frozen statistics, counted from 1.
        model: the quantization-aware model, if `fit` trains another model that calls it, such as
            one with its own `train_step` for distillation or adversarial training.

    Raises:
        ValueError: if `steps` is negative or no integer; at `fit` if the model is not quantized, or
            trains others and `model` is not given.

    Example:
        >>> qat.fit(x, y, callbacks=[keras_qat.callbacks.FreezeBatchNorm(10_000)])

    Source: `freeze_bn_delay` of `tf.contrib.quantize`.
    """

    threshold = "freeze_from"


class FreezeRanges(_Threshold):
    """Freezes the ranges of activations at training step `steps`.

    The weights then adapt to ranges that no longer change, and a step takes less time. The ranges
    of weights continue to follow the weights.

    Args:
        steps: the first training step (batch) with frozen ranges, counted from 1. With 0 or 1 the
            model needs ranges before training, as from `calibrate`.
        model: the quantization-aware model, if `fit` trains another model that calls it, such as
            one with its own `train_step` for distillation or adversarial training.

    Raises:
        ValueError: if `steps` is negative or no integer; at `fit` if the model is not quantized, or
            trains others and `model` is not given.

    Example:
        >>> qat.fit(x, y, callbacks=[keras_qat.callbacks.FreezeRanges(5_000)])
    """

    threshold = "freeze_ranges_from"


class FreezeOscillations(StepCallback):
    """Freezes low-bit weights that oscillate between two levels.

    A weight near the middle between two levels jumps back and forth, and the statistics of
    BatchNormalization fit neither level. Once a weight has turned back in more than `threshold` of
    the steps, it stays at the level where it was most of the time. This applies to weights of 4
    bits and fewer with a range per channel. A resumed training starts with no frozen weights.

    Args:
        threshold: the share of steps with a turn from which on a weight is frozen, for the first
            and the last epoch, with a cosine between them.
        momentum: of the moving average, which spans about 1 / momentum steps.
        model: the quantization-aware model, if `fit` trains another model that calls it, such as
            one with its own `train_step` for distillation or adversarial training.

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
        if not all(0 < share < 1 for share in (*threshold, momentum)):
            raise ValueError(
                f"threshold={threshold}, momentum={momentum}: give numbers between 0 and 1."
            )
        self.threshold, self.momentum, self.within = threshold, momentum, model
        self._limit = tf.Variable(threshold[0], trainable=False)
        self._watched: list[Oscillations] = []

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        model = _model_of(self, self.threshold)
        self._watched = [
            Oscillations(weights, quantizer, self.momentum)
            for weights, quantizer in per_channel(model, are_variables=True)
            if quantizer.spec.bits <= 4
        ]
        self._update = make_tf_function(self._update_all)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        first, last = self.threshold
        done = epoch / max(self.params["epochs"] - 1, 1)
        self._limit.assign(last + (first - last) * 0.5 * (1 + np.cos(np.pi * done)))

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._update()

    def _update_all(self) -> None:
        for oscillations in self._watched:
            oscillations.update(self._limit)

    @property
    def frozen(self) -> float:
        """The share of the watched weights that are frozen."""
        frozen = [weights.frozen.numpy() for weights in self._watched]
        return float(sum(map(np.sum, frozen)) / max(sum(map(np.size, frozen)), 1))


class LogQuantization(keras.callbacks.Callback):
    """Logs the range, saturation and quantization noise of each quantizer to TensorBoard.

    There is a chart for each of four figures, and a run for each tensor in it: the run selector of
    TensorBoard filters by name. With data they are "1 signal to noise, dB", of that tensor alone,
    and "2 share beyond the range"; "3 range, minimum" and "4 range, maximum" need none. The step of
    an entry is the epoch, as for the metrics of `keras.callbacks.TensorBoard`.

    The accuracy of the exported file needs no callback: `evaluate`, and so `val_accuracy`, compute
    the same codes as the file.

    Args:
        log_dir: directory of the log, which may be that of `keras.callbacks.TensorBoard`: the
            runs are directories of `quantization` in it.
        data: a few dozen inputs as for `calibrate`; None logs the ranges alone.
        every: the number of epochs between entries.
        model: the quantization-aware model, if `fit` trains another model that calls it, such as
            one with its own `train_step` for distillation or adversarial training.

    Raises:
        ValueError: if `every` is not an integer of at least 1; at `fit` if the model is not
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
        self.every = check_count("every", every)
        self.log_dir, self.data, self.within = os.fspath(log_dir), data, model
        self._writers: dict[str, Any] = {}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        listed = quantizers(_model_of(self, self.log_dir))  # Raises before the first epoch.
        runs = (_run(quantizer) for quantizer in listed)
        self._writers = {
            run: tf.summary.create_file_writer(os.path.join(self.log_dir, "quantization", run))
            for run in runs
        }

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if (epoch + 1) % self.every:
            return
        # As tf.summary.scalar writes them, which needs TensorBoard to be installed.
        metadata = tf.compat.v1.SummaryMetadata(data_class=1)
        metadata.plugin_data.plugin_name = "scalars"
        for run, chart, value in self._scalars(_model_of(self, self.log_dir)):
            with self._writers[run].as_default():
                tf.summary.write(chart, tf.constant(value, tf.float32), epoch, metadata)
        for writer in self._writers.values():
            writer.flush()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        for writer in self._writers.values():
            writer.close()

    def _scalars(self, model: Any) -> Iterator[tuple[str, str, float]]:
        """Yields the run, the chart and the value of each entry."""
        entries = [] if self.data is None else statistics(model, self.data)
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
    """Returns the name of a quantizer's run: the tensors that it quantizes."""
    return "+".join(quantizer.quantizes)
