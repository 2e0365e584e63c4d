"""Keras callbacks that delay quantization, and freeze statistics, ranges and weights.

A callback such as `QuantDelay(2_000)` only stores the step in all layers when training begins. The
layers count training steps, and change at exactly this step, even with `steps_per_execution`. The
count is saved with the model. A loaded model therefore continues the delay.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.io.counts import check_count
from keras_qat.keras2.backend import keras, make_tf_function
from keras_qat.keras2.readability import is_graph_model
from keras_qat.messages import show_once, warn_caller
from keras_qat.training.fake_quantization.weight_quantizer import WeightQuantizer
from keras_qat.training.phase_graphs import check_frozen_ranges
from keras_qat.training.schedule import (
    check_quantized,
    is_quantized,
    schedule,
    share_layers,
    steps_done,
)
from keras_qat.training.weight_limits import list_channel_weights

__all__ = ["FreezeBatchNorm", "FreezeOscillations", "FreezeRanges", "QuantDelay"]


class StepCallback(keras.callbacks.Callback):
    """A callback that does not read `logs`. Keras then need not copy losses from the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._supports_tf_logs = True


class ListedCallback(keras.callbacks.Callback):
    """A callback that knows the other callbacks of the same `fit` or custom training loop.

    Keras does not pass its `CallbackList` to callbacks. `set_model` is called by a method of the
    list, and therefore finds the list on the call stack.
    """

    def __init__(self) -> None:
        super().__init__()
        self.listed: list[keras.callbacks.Callback] = []
        """All callbacks of the list, including this callback."""

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        frame, self.listed = inspect.currentframe(), []
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, keras.callbacks.CallbackList):
                is_mine = any(callback is self for callback in caller.callbacks)
                self.listed = caller.callbacks if is_mine else []
                return
            frame = frame.f_back


class _Threshold(ListedCallback):
    """Base class of callbacks such as `QuantDelay`, which change the layers at step `steps`."""

    threshold: str

    def __init__(self, steps: int, *, model: keras.Model = None) -> None:
        super().__init__()
        self.steps, self.within = check_count("steps", steps, least=0), model

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        model = find_model(self, self.steps)
        others = [item for item in self.listed if getattr(item, "threshold", "") == self.threshold]
        for other in others:
            is_of_it = share_layers(model, find_model(other, other.steps))
            if other.steps != self.steps and is_of_it:
                name = type(self).__name__
                raise ValueError(
                    f"The callbacks {name}({others[0].steps}) and {name}({others[1].steps}) of "
                    f"'{model.name}' contradict each other. Pass one of them."
                )
        schedule(model, **{self.threshold: self.steps})
        check_frozen_ranges(model)


def find_model(callback: keras.callbacks.Callback, argument: Any) -> Any:
    """Returns the model that a callback changes: its argument `model`, or the trained model.

    Raises:
        ValueError: if this model is not quantization-aware, or `fit` does not train it. Also if
            the trained model is subclassed, such as a GAN, and the callback has no `model`. The
            message shows `argument`, the first argument of the callback.
    """
    model = callback.model if callback.within is None else callback.within
    if isinstance(model, keras.Model) and not is_graph_model(model):
        name = type(callback).__name__
        raise ValueError(
            f"{type(model).__name__} '{model.name}' trains other models, and {name} does not know "
            f"which of them to change. Pass {name}({argument!r}, model=qat), with the "
            f"model that quantize_model returned."
        )
    check_quantized(model)
    if is_quantized(callback.model) and not share_layers(callback.model, model):
        raise ValueError(
            f"{type(callback).__name__}({argument!r}, model={model.name!r}) is for another model: "
            f"fit trains '{callback.model.name}', and the two models share no layer. Remove "
            f"model=, or pass the model that fit trains."
        )
    return model


class QuantDelay(_Threshold):
    """Trains in float before training step `steps`, and with fake quantization from then on.

    Ranges are observed from the first step on. Steps are counted from 1 over all calls of `fit`,
    even if the model is saved and loaded in between. With 2_000, the 2,000th step is the first
    quantized step.

    Args:
        steps: the first quantized training step (batch). With 0 or 1, all steps are quantized.
        model: the quantization-aware model. Only needed if `fit` trains another model that calls
            the quantization-aware model, for example for distillation or adversarial training.

    Raises:
        ValueError: if `steps` is negative or not an integer. In `fit`, if the model is not
            quantized, or if `fit` trains another model and `model` is missing.

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
            warn_of_float_epochs(self, find_model(self, self.steps), epoch)


class FreezeBatchNorm(_Threshold):
    """Freezes the statistics of BatchNormalization at training step `steps`.

    From that step on, training uses the moving statistics instead of the batch's statistics. The
    moving statistics no longer change. Gamma and beta continue to train. A BatchNormalization
    that stays in float is not frozen.

    Args:
        steps: the first training step (batch) with frozen statistics, counted from 1.
        model: the quantization-aware model. Only needed if `fit` trains another model that calls
            the quantization-aware model, for example for distillation or adversarial training.

    Raises:
        ValueError: if `steps` is negative or not an integer. In `fit`, if the model is not
            quantized, or if `fit` trains another model and `model` is missing.

    Example:
        >>> qat.fit(x, y, callbacks=[keras_qat.callbacks.FreezeBatchNorm(10_000)])

    Source: `freeze_bn_delay` of `tf.contrib.quantize`.
    """

    threshold = "freeze_from"


class FreezeRanges(_Threshold):
    """Freezes the ranges of activations at training step `steps`.

    The weights then adapt to constant ranges, and training steps are faster. The ranges of weights
    continue to follow the weights.

    Args:
        steps: the first training step (batch) with frozen ranges, counted from 1. With 0 or 1, the
            model needs ranges before training, for example from `calibrate`.
        model: the quantization-aware model. Only needed if `fit` trains another model that calls
            the quantization-aware model, for example for distillation or adversarial training.

    Raises:
        ValueError: if `steps` is negative or not an integer. In `fit`, if the model is not
            quantized, or if `fit` trains another model and `model` is missing.

    Example:
        >>> qat.fit(x, y, callbacks=[keras_qat.callbacks.FreezeRanges(5_000)])
    """

    threshold = "freeze_ranges_from"


class FreezeOscillations(StepCallback):
    """Freezes low-bit weights that oscillate between two levels.

    Levels are the values that quantized weights can have. A weight near the middle between two
    levels is often rounded up in one step, and down in the next step. The statistics of
    BatchNormalization then fit neither level. Such a weight is frozen at the level closest to its
    average. Only weights with at most 4 bits and one range per channel are frozen. Each call of
    `fit` starts without frozen weights.

    Args:
        threshold: a weight is frozen if its level reverses direction (up, then down, or down, then
            up) in more than this share of steps. The two values are for the first and the last
            epoch, with a cosine schedule in between.
        momentum: momentum of the moving averages. They cover about the last 1 / momentum steps.
        model: the quantization-aware model. Only needed if `fit` trains another model that calls
            the quantization-aware model, for example for distillation or adversarial training.

    Raises:
        ValueError: if thresholds or momentum are outside 0 to 1. `fit` raises the same errors as
            for `QuantDelay`.

    Example:
        >>> qat.fit(x, y, epochs=10, callbacks=[keras_qat.callbacks.FreezeOscillations()])

    Source: Nagel et al. 2022 (arXiv:2203.11086).
    """

    def __init__(
        self,
        threshold: tuple[float, float] = (0.1, 0.01),
        momentum: float = 0.01,
        *,
        model: keras.Model = None,
    ) -> None:
        super().__init__()
        if not all(0 < share < 1 for share in (*threshold, momentum)):
            raise ValueError(
                f"threshold={threshold}, momentum={momentum}: use values between 0 and 1."
            )
        self.threshold, self.momentum, self.within = threshold, momentum, model
        self._limit = tf.Variable(threshold[0], trainable=False)
        self._watched: list[Oscillations] = []

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        model = find_model(self, self.threshold)
        self._watched = [
            Oscillations(weights, quantizer, self.momentum)
            for weights, quantizer in list_channel_weights(model, are_variables=True)
            if quantizer.spec.bits <= 4
        ]

        def update_all() -> None:
            for oscillations in self._watched:
                oscillations.update(self._limit)

        self._update = make_tf_function(update_all)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        first, last = self.threshold
        done = epoch / max(self.params["epochs"] - 1, 1)
        self._limit.assign(last + (first - last) * 0.5 * (1 + np.cos(np.pi * done)))

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._update()

    @property
    def frozen(self) -> float:
        """The share of frozen weights among the weights that can be frozen."""
        frozen = [weights.frozen.numpy() for weights in self._watched]
        return float(sum(map(np.sum, frozen)) / max(sum(map(np.size, frozen)), 1))


def warn_of_float_epochs(delay: Any, model: keras.Model, epoch: int) -> None:
    """Warns if a callback such as EarlyStopping may prefer the float epochs before quantization."""
    done = steps_done(model)
    left = delay.steps - done
    if left <= 1:
        return
    steps, epochs = ((delay.params or {}).get(name) for name in ("steps", "epochs"))
    ends = epoch + (left - 1) // steps if steps else None
    quantized = epoch + math.ceil((left - 1) / steps) if steps else None
    if steps and epochs and left > (epochs - epoch) * steps:
        show_once(
            f"'{model.name}' trains in float until fit ends, at step "
            f"{done + (epochs - epoch) * steps}: QuantDelay({delay.steps}) begins later. Train "
            f"longer, or use a shorter delay."
        )
        return
    for callback in delay.listed:
        name, harm = type(callback).__name__, _describe_harm(callback, ends)
        if not harm or (ends is not None and ends <= epoch):
            continue
        count = "for the epochs before" if quantized is None else f"up to epoch {quantized}"
        advice = f"Call fit without it {count}, and then again with it"
        if isinstance(callback, keras.callbacks.EarlyStopping):
            start = "the first epoch after that" if quantized is None else quantized
            advice = f"Pass start_from_epoch={start} to {name}"
        warn_caller(
            f"{name} compares float epochs of '{model.name}', before QuantDelay({delay.steps}), "
            f"with quantized epochs, and may {harm}. {advice}. Or use a shorter delay."
        )


def _describe_harm(callback: keras.callbacks.Callback, ends: int | None) -> str:
    """Return the harm if the best epoch is one before `ends`, and so in float, or ""."""
    kinds = keras.callbacks
    if isinstance(callback, kinds.EarlyStopping):
        is_late = ends is not None and callback.start_from_epoch >= ends
        restores = "restore weights that were not trained for int8"
        harm = restores if callback.restore_best_weights else "stop training too early"
        return "" if is_late else harm
    if isinstance(callback, kinds.ModelCheckpoint) and callback.save_best_only:
        return "keep weights that were not trained for int8"
    if isinstance(callback, kinds.ReduceLROnPlateau):
        return "lower the learning rate too early"
    return ""


class Oscillations:
    """Freezes the weights of a layer that oscillate, as `FreezeOscillations` describes."""

    def __init__(self, weights: Any, quantizer: WeightQuantizer, momentum: float) -> None:
        self.weights, self.quantizer, self.momentum = weights, quantizer, momentum
        levels = quantizer.quantize(tf.convert_to_tensor(weights))
        zeros = tf.zeros_like(levels)
        self.levels, self.direction, self.mean = map(tf.Variable, (levels, zeros, levels))
        self.frequency, self.frozen = tf.Variable(zeros), tf.Variable(zeros)
        """`frequency` is the share of recent steps that reversed the direction of a weight's level.
        `frozen` is 1 for frozen weights, otherwise 0."""

    def update(self, threshold: Any) -> None:
        weights, rate = tf.convert_to_tensor(self.weights), self.momentum
        levels = self.quantizer.quantize(weights)
        change = tf.sign(levels - self.levels)
        turned = tf.cast(change * self.direction < 0, tf.float32)
        self.levels.assign(levels)
        self.direction.assign(tf.where(change == 0, self.direction, change))
        self.frequency.assign_add(rate * (turned - self.frequency))
        is_free = self.frozen == 0
        self.mean.assign_add(tf.where(is_free, rate * (levels - self.mean), 0.0))
        stops = tf.logical_and(is_free, self.frequency > threshold)
        self.mean.assign(tf.where(stops, tf.round(self.mean), self.mean))
        self.frozen.assign(tf.where(stops, 1.0, self.frozen))
        scale = self.quantizer.limits(weights) / float(2 ** (self.quantizer.spec.bits - 1) - 1)
        self.weights.assign(tf.where(self.frozen > 0, self.mean * scale, weights))
