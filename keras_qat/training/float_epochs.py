"""Warnings of callbacks that compare float epochs with quantized ones."""

from __future__ import annotations

import math
from typing import Any

from keras_qat.keras2.backend import keras
from keras_qat.messages import show_once, warn_caller
from keras_qat.training.schedule import steps_done


def warn_of_float_epochs(delay: Any, model: Any, epoch: int) -> None:
    """Warns of callbacks for which an epoch before a delay ends may remain the best.

    Args:
        delay: a `QuantDelay`.
        model: its model.
        epoch: the index of the first epoch.
    """
    done = steps_done(model)
    left = delay.steps - done
    if left <= 1:
        return
    steps, epochs = ((delay.params or {}).get(name) for name in ("steps", "epochs"))
    quantized = None if not steps else epoch + math.ceil((left - 1) / steps)
    if steps and epochs and left > (epochs - epoch) * steps:
        show_once(
            f"'{model.name}' trains in float until fit ends, at step "
            f"{done + (epochs - epoch) * steps}: QuantDelay({delay.steps}) begins later. Train on, "
            f"or give a shorter delay."
        )
        return
    for callback in delay.beside:
        name, harm = type(callback).__name__, _harm(callback, quantized)
        if not harm:
            continue
        count = "for the epochs before" if quantized is None else f"up to epoch {quantized}"
        advice = f"Call fit without it {count}, and then again with it"
        if isinstance(callback, keras.callbacks.EarlyStopping):
            start = "the first epoch after that" if quantized is None else quantized
            advice = f"Pass start_from_epoch={start} to {name}"
        warn_caller(
            f"{name} compares the epochs before QuantDelay({delay.steps}) quantizes '{model.name}' "
            f"with those after it, and may {harm}. {advice}; or give a shorter delay."
        )


def _harm(callback: Any, quantized: int | None) -> str:
    """Returns what a callback does if a float epoch remains the best; "" for other callbacks.

    Args:
        callback: a callback of Keras or a class derived from it.
        quantized: the index of the first quantized epoch, if it is known.
    """
    kinds = keras.callbacks
    if isinstance(callback, kinds.EarlyStopping):
        is_late = quantized is not None and callback.start_from_epoch >= quantized - 1
        restores = "restore weights that were not trained for int8"
        harm = restores if callback.restore_best_weights else "stop training too early"
        return "" if is_late else harm
    if isinstance(callback, kinds.ModelCheckpoint) and callback.save_best_only:
        return "keep weights that were not trained for int8"
    if isinstance(callback, kinds.ReduceLROnPlateau):
        return "lower the learning rate too early"
    return ""
