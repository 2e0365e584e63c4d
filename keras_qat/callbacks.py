"""Keras callbacks: quantization delay, and freezing."""

from typing import Any

from keras_qat.messages import suggest
from keras_qat.training import callbacks
from keras_qat.training.callbacks import *  # noqa: F403

__all__ = [*callbacks.__all__]


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"There is no callback {name!r}.{suggest(name, __all__)} The callbacks are: "
        f"{', '.join(__all__)}.",
        name=name,
    )
