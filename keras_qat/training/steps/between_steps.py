"""What runs between two steps of `fit`: whether it may change weights, or waits for numbers."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.keras2.backend import keras
from keras_qat.messages import LIBRARIES, get_package
from keras_qat.training.steps.custom_training import METHODS

HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
"""Methods of a callback that run between steps."""

ASYNCHRONOUS = (
    tf.distribute.experimental.ParameterServerStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
)
"""Strategies of several workers, of which others may count steps, or take a lost one's place."""

DATA = (np.ndarray, tf.Tensor, tf.data.Dataset, tf.distribute.DistributedDataset)
"""Kinds of data that no function of a user computes at the very step."""


class StepCallback(keras.callbacks.Callback):
    """A callback between steps that looks at no logs: Keras would read them on the host for it."""

    def __init__(self) -> None:
        super().__init__()
        self._supports_tf_logs = True


def is_undisturbed(model: keras.Model, x: Any, callbacks: Iterable[Any]) -> bool:
    """Returns whether no code of a user runs between the steps of an epoch of `fit`.

    If in doubt, it does. What `tf.data` computes beforehand does not know the step.

    Args:
        model: the model that is trained.
        x: the data that `fit` was given.
        callbacks: its callbacks.
    """
    hooks = [getattr(item, hook, item) for item in callbacks for hook in HOOKS]
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else (x,)
    return (
        all(get_package(base) in LIBRARIES for base in type(model).__mro__)
        and not vars(model).keys() & {*METHODS, "reset_metrics"}
        and not model.run_eagerly
        and not model.autotune_steps_per_execution
        and not isinstance(model.distribute_strategy, ASYNCHRONOUS)
        and all(get_package(hook) in LIBRARIES for hook in hooks)
        and all(isinstance(part, DATA) for part in parts)
    )


class KnowsOthers(keras.callbacks.Callback):
    """A callback that knows the others, in `fit` of any model and in training loops of one's own.

    Keras does not pass its `CallbackList` to callbacks, but that list is what calls `set_model`.
    """

    beside: list[Any]
    """The callbacks of the list, with this one."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = []

    def set_model(self, model: keras.Model) -> None:
        """Sets the model, as Keras documents it."""
        super().set_model(model)
        frame, self.beside = inspect.currentframe(), []
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, keras.callbacks.CallbackList):
                is_mine = any(callback is self for callback in caller.callbacks)
                self.beside = caller.callbacks if is_mine else []
                return
            frame = frame.f_back
