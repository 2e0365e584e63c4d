"""Keras callbacks: pruning, clustering, quantization delay, freezing, and logging."""

from typing import Any

from keras_qat.messages import suggestion
from keras_qat.training import callbacks, clustering, sparsity
from keras_qat.training.callbacks import *  # noqa: F403
from keras_qat.training.clustering import *  # noqa: F403
from keras_qat.training.sparsity import *  # noqa: F403

__all__ = [*callbacks.__all__, *clustering.__all__, *sparsity.__all__]


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"There is no callback {name!r}.{suggestion(name, __all__)} There are: "
        f"{', '.join(__all__)}.",
        name=name,
    )
