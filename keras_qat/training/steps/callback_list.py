"""Callbacks that know which other callbacks Keras runs beside them."""

from __future__ import annotations

import inspect
from typing import Any

from keras_qat.keras2.backend import keras


class KnowsOthers(keras.callbacks.Callback):
    """A callback that knows the others, in `fit` of any model and in training loops of one's own.

    Keras does not pass its `CallbackList` to callbacks, but that list is what calls `set_model`.
    """

    beside: list[Any]
    """The callbacks of the list, with this one."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = []

    def set_model(self, model: Any) -> None:
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
