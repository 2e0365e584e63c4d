"""What users give as data, checked before any work is done."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_qat.keras2.graph import flat_arrays

__all__ = ["arrays_of"]


def arrays_of(model: Any, x: Any) -> list[np.ndarray]:
    """Inputs of a functional model, as `predict` takes them, as arrays in its order.

    Raises:
        ValueError: if they are not what the model takes; the message names the input.
    """
    names = list(model.input_names)
    if isinstance(x, dict) and not set(names) <= set(x):
        raise ValueError(f"'{model.name}' has the inputs {_listed(names)}; given: {_listed(x)}.")
    arrays = flat_arrays(model, x)
    if len(arrays) != len(names):
        raise ValueError(f"'{model.name}' has {len(names)} inputs, {len(arrays)} are given.")
    for name, array, tensor in zip(names, arrays, model.inputs, strict=True):
        where = f"Input '{name}' of '{model.name}'"
        if array.dtype.kind not in "biuf":
            raise ValueError(f"{where} holds {array.dtype}, which are no numbers.")
        shape = tuple(tensor.shape)
        fits = array.ndim == len(shape) and all(
            wanted in (None, size) for wanted, size in zip(shape[1:], array.shape[1:], strict=True)
        )
        if not fits:
            raise ValueError(f"{where} takes arrays of the shape {shape}, not {array.shape}.")
        if array.dtype.kind == "f" and np.isnan(array).any():
            raise ValueError(f"{where} holds NaN, which no quantized value stands for.")
    counts = {len(array) for array in arrays}
    if counts == {0}:
        raise ValueError(f"No examples are given for '{model.name}'.")
    if len(counts) > 1:
        raise ValueError(
            f"The inputs of '{model.name}' have different numbers of examples: "
            f"{', '.join(f'{name} {len(each)}' for name, each in zip(names, arrays, strict=True))}."
        )
    return arrays


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names))
