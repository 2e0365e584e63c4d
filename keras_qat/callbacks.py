"""Keras callbacks: pruning, clustering, quantization delay, freezing, and logging."""

from typing import Any

from keras_qat.messages import suggest
from keras_qat.training import callbacks, compression
from keras_qat.training.callbacks import *  # noqa: F403
from keras_qat.training.compression import *  # noqa: F403

__all__ = [*callbacks.__all__, *compression.__all__]


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"There is no callback {name!r}.{suggest(name, __all__)} The callbacks are: "
        f"{', '.join(__all__)}.",
        name=name,
    )
