"""Answers objects of Keras 3 that are given to a model of Keras 2 to train it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_qat.imports.keras3.backend import loaded_keras_3

TWINS = {"PyDataset": "Sequence"}
"""Class of Keras 3 -> its name in Keras 2, where that is another one."""


class RefusesKeras3:
    """A model of Keras 2 that says what to do with objects of Keras 3. Losses of it work."""

    def _validate_compile(self, optimizer: Any, metrics: Any, **kwargs: Any) -> None:
        """Checks the arguments of `compile`. Keras does not compile a loaded model with its own."""
        refuse_parts("optimizer", "optimizers", optimizer)
        refuse_parts("metrics", "metrics", metrics)
        super()._validate_compile(optimizer, metrics, **kwargs)  # type: ignore[misc]

    def fit(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as Keras documents it."""
        return super().fit(x, *args, **_checked(x, kwargs))  # type: ignore[misc]

    def evaluate(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Returns losses and metrics as Keras documents it."""
        return super().evaluate(x, *args, **_checked(x, kwargs))  # type: ignore[misc]

    def predict(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns outputs as Keras documents it."""
        return super().predict(x, *args, **_checked(x, kwargs))  # type: ignore[misc]


def _checked(x: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    refuse_parts("x", "utils", x)
    refuse_parts("callbacks", "callbacks", kwargs.get("callbacks"))
    return kwargs


def refuse_parts(argument: str, room: str, values: Any) -> None:
    """Checks that no object of an argument is of Keras 3.

    Args:
        argument: the argument's name.
        room: the module of Keras that has such objects.
        values: the argument: an object, or a structure of several.

    Raises:
        TypeError: if one is; the message names what to use instead.
    """
    if loaded_keras_3() is None:
        return
    for value in tf.nest.flatten(values):
        kind = type(value)
        bases = [base for base in kind.__mro__ if base.__module__.split(".")[0] == "keras"]
        if bases:
            twin = f"keras_qat.keras.{room}.{TWINS.get(bases[0].__name__, bases[0].__name__)}"
            advice = f"Use {twin}" if kind is bases[0] else f"Derive it from {twin}"
            raise TypeError(
                f"{argument}: {kind.__name__} is of Keras 3, and the model of Keras 2. {advice}."
            )
