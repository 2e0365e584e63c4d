"""Keras callbacks that decide when a model quantizes, and when it freezes statistics and ranges.

They only set thresholds that the layers compare their own training step with. So they are exact
to the step with any `steps_per_execution`, and training that is saved and resumed goes on in the
middle of a delay: the layers' steps are saved with the model.
"""

from __future__ import annotations

from typing import Any

from keras_qat.keras2.backend import keras
from keras_qat.keras2.readable import is_graph_model
from keras_qat.schedule import schedule

__all__ = ["FreezeBatchNorm", "FreezeRanges", "QuantDelay"]


class _Threshold(keras.callbacks.Callback):
    threshold: str

    def __init__(self, steps: int, *, model: Any = None) -> None:
        super().__init__()
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(f"steps={steps!r}: give a whole number of training steps, 0 or more.")
        self.steps, self.within = steps, model

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        model = self.model if self.within is None else self.within
        if isinstance(model, keras.Model) and not is_graph_model(model):
            name = type(self).__name__
            raise ValueError(
                f"{type(model).__name__} '{model.name}' trains other models, and {name} does not "
                f"know which of them it is for. Say so: {name}({self.steps}, model=qat), with the "
                f"model that quantize_model returned."
            )
        schedule(model, **{self.threshold: self.steps})


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
