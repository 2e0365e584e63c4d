"""Callbacks, and whether user code runs between two steps of `fit`."""

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
"""Strategies with several workers: another one may count steps, or replace a lost one."""

DATA = (np.ndarray, tf.Tensor, tf.data.Dataset, tf.distribute.DistributedDataset)
"""Kinds of data that are loaded without running user code during a step."""


class StepCallback(keras.callbacks.Callback):
    """A callback between steps that reads no logs, so Keras need not copy them to the host."""

    def __init__(self) -> None:
        super().__init__()
        self._supports_tf_logs = True


def is_undisturbed(model: keras.Model, x: Any, callbacks: Iterable[Any]) -> bool:
    """Returns whether surely no user code runs between the steps of an epoch of `fit`.

    Code in a `tf.data` pipeline runs ahead of the steps, and does not count.
    """
    hooks = [getattr(item, hook, item) for item in callbacks for hook in HOOKS]
    arrays = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else (x,)
    return (
        all(get_package(base) in LIBRARIES for base in type(model).__mro__)
        and not vars(model).keys() & {*METHODS, "reset_metrics"}
        and not model.run_eagerly
        and not model.autotune_steps_per_execution
        and not isinstance(model.distribute_strategy, ASYNCHRONOUS)
        and all(get_package(hook) in LIBRARIES for hook in hooks)
        and all(isinstance(array, DATA) for array in arrays)
    )


class ListedCallback(keras.callbacks.Callback):
    """A callback that knows all callbacks of `fit`, or of a custom training loop.

    Keras does not pass its `CallbackList` to callbacks, but the list calls `set_model`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.listed: list[keras.callbacks.Callback] = []
        """The callbacks of the list, including this one."""

    def set_model(self, model: keras.Model) -> None:
        """Sets the model, as Keras documents it."""
        super().set_model(model)
        frame, self.listed = inspect.currentframe(), []
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, keras.callbacks.CallbackList):
                is_mine = any(callback is self for callback in caller.callbacks)
                self.listed = caller.callbacks if is_mine else []
                return
            frame = frame.f_back
