"""The check whether an optimizer knows the weights that it is to update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_qat.keras2.backend import keras


def check_optimizer(trained: Any, weights: Sequence[Any]) -> None:
    """Raises a `ValueError` if an optimizer has already been used with another model.

    Keras' optimizers make their variables for the first weights that they update, and cannot update
    others.

    Args:
        trained: the model that `fit` trains.
        weights: the weights that it trains.
    """
    optimizer = trained.optimizer
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    known = getattr(optimizer, "_index_dict", None)  # Legacy optimizers have none.
    if not known or not weights:
        return
    unknown = [weight for weight in weights if optimizer._var_key(weight) not in known]
    has_own_step = type(trained).train_step is not keras.Model.train_step
    if len(unknown) == len(weights) or (unknown and not has_own_step):
        name = type(optimizer).__name__
        raise ValueError(
            f"The {name} that '{trained.name}' was compiled with has updated other weights before, "
            f"such as those of the float model, and does not know '{unknown[0].name}'. Compile "
            f"with a new one: {name}(...), or {name}.from_config(optimizer.get_config())."
        )
