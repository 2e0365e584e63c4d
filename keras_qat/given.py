"""What users give as data and ranges, checked before any work is done."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_qat.keras2.graph import flat_arrays

__all__ = ["arrays_of", "range_of"]


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
    arrays = [_conformed(*each) for each in zip(arrays, model.inputs, strict=True)]
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
        if 0 in array.shape[1:]:
            raise ValueError(f"{where} holds no numbers: its shape is {array.shape}.")
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


def _conformed(array: np.ndarray, tensor: Any) -> np.ndarray:
    """An array with the last axis of size 1 that its input has, or without one: as Keras does."""
    rank = len(tensor.shape)
    if array.ndim == rank - 1 and tensor.shape[-1] == 1:
        return array[..., np.newaxis]
    return array[..., 0] if array.ndim == rank + 1 and array.shape[-1] == 1 else array


def range_of(input_range: Any) -> tuple[float, float] | None:
    """The minimum and maximum of inputs, with zero in between, as quantized values have to stand.

    Raises:
        ValueError: if they are none.
    """
    if input_range is None:
        return None
    ends = np.asarray(input_range)
    is_range = ends.shape == (2,) and ends.dtype.kind in "iuf" and np.isfinite(ends).all()
    if not is_range or not ends[0] < ends[1]:
        raise ValueError(
            f"input_range={input_range!r}: give the minimum and the maximum of the inputs, for "
            f"example (0.0, 1.0)."
        )
    return min(float(ends[0]), 0.0), max(float(ends[1]), 0.0)


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names))
