"""Describes the inputs of a model or a file, and brings a batch of arrays into their order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_qat.graph.missing_values import find_nan_handling
from keras_qat.graph.read_model import read_model
from keras_qat.keras2.layers_and_models import get_nested_inputs


class Input(NamedTuple):
    """An input of a model or a file; `key` is its key if the model takes a dict."""

    name: str
    key: str
    shape: tuple[int | None, ...]
    holds_text: bool


class Inputs(NamedTuple):
    """The inputs of a model or a file.

    Args:
        model: name of the model or the file.
        all: its inputs.
        nested: the structure that it takes.
        with_nan: returns the names of the inputs that may hold NaN. Called only if one does.
        whole: the inputs of the model that this is a part of; data may be for that one.
    """

    model: str
    all: list[Input]
    nested: Any
    with_nan: Callable[[], Collection[str]] = tuple
    whole: Any = None

    @property
    def batch_size(self) -> int | None:
        """The batch size that the inputs have (`keras.Input(batch_size=8)`); None if it is open."""
        return next((one.shape[0] for one in self.all if one.shape), None)

    @property
    def takes_dict(self) -> bool:
        return isinstance(self.nested, dict)

    def where(self, one: Input) -> str:
        return f"Input '{one.name}' of '{self.model}'"


def get_inputs(model: Any) -> Inputs:
    """Returns what the verbs read of a model's inputs; `Inputs` stay as they are."""
    if isinstance(model, Inputs):
        return model
    nested = get_nested_inputs(model)
    is_flat = isinstance(nested, dict) and len(nested) == len(model.inputs)
    keys = sorted(nested) if is_flat else model.input_names
    inputs = [
        Input(name, key, tuple(tensor.shape), tensor.dtype == tf.string)
        for name, key, tensor in zip(model.input_names, keys, model.inputs, strict=True)
    ]

    def with_nan() -> set[str]:
        return {value.name for value in find_nan_handling(read_model(model))}

    whole = getattr(model, "part_of", None)
    return Inputs(model.name, inputs, nested, with_nan, whole and get_inputs(whole))


def pack_inputs(inputs: Inputs, arrays: list[Any]) -> Any:
    """Packs an array for each input into the structure that the model takes."""
    return tf.nest.pack_sequence_as(inputs.nested, arrays)


def is_array(data: Any) -> bool:
    """Returns whether data is an array, or a tensor that can be read as one."""
    return hasattr(data, "__array__")


def has_structure(inputs: Inputs, data: Any) -> bool:
    """Returns whether data has the structure of the model's inputs."""
    if isinstance(data, dict) and set(data) != set(inputs.nested if inputs.takes_dict else ()):
        return False
    try:
        tf.nest.assert_same_structure(inputs.nested, data, check_types=False)
    except (TypeError, ValueError):
        return False
    return True


def split_columns(inputs: Inputs, data: Any) -> list[np.ndarray]:
    """Returns an array for each input of a batch or an example, without labels."""
    if inputs.whole is not None:
        with contextlib.suppress(ValueError):
            columns = split_columns(inputs.whole, data)
            by_name = dict(zip((one.name for one in inputs.whole.all), columns, strict=True))
            return [by_name[one.name] for one in inputs.all]
    if isinstance(data, dict):
        for names in ([one.key for one in inputs.all], [one.name for one in inputs.all]):
            if set(names) <= set(data):
                return [
                    _array(inputs, one, data[name])
                    for one, name in zip(inputs.all, names, strict=True)
                ]
    if has_structure(inputs, data):
        flat = tf.nest.flatten(data)
        return [_array(inputs, one, leaf) for one, leaf in zip(inputs.all, flat, strict=True)]
    if isinstance(data, dict):
        raise ValueError(
            f"'{inputs.model}' has the inputs {_listed(one.name for one in inputs.all)}, but the "
            f"data has {_listed(data)}."
        )
    if isinstance(data, tuple):
        is_tflite = len(data) == 2 and isinstance(data[0], str)  # The signature's name, the inputs.
        if is_tflite or 1 <= len(data) <= 3:
            return split_columns(inputs, data[1 if is_tflite else 0])
        data = list(data)
    if len(inputs.all) == 1:
        (one,) = inputs.all
        is_wrapped = isinstance(data, list) and len(data) == 1 and is_array(data[0])
        if is_wrapped and not is_example(np.asarray(data[0]), one.shape):
            (data,) = data
        return [_array(inputs, one, data)]
    arrays = data if isinstance(data, list) else [data]
    if len(arrays) != len(inputs.all):
        raise ValueError(
            f"'{inputs.model}' has {len(inputs.all)} inputs, but the data has {len(arrays)}. Pass "
            f"a list or a dict of arrays for {_listed(one.name for one in inputs.all)}."
        )
    return [_array(inputs, one, array) for one, array in zip(inputs.all, arrays, strict=True)]


def is_example(array: np.ndarray, shape: tuple[int | None, ...]) -> bool:
    """Returns whether an array is one example of an input, and cannot be a batch."""
    if as_batch(array[np.newaxis], shape) is None:
        return False
    return array.ndim == len(shape) - 1 or as_batch(array, shape) is None


def as_batch(array: np.ndarray, shape: tuple[int | None, ...]) -> np.ndarray | None:
    """Returns an array in an input's shape, or None. As in Keras, a last axis of 1 is optional."""
    if array.ndim == len(shape) - 1 and shape[-1] == 1:
        array = array[..., np.newaxis]
    elif array.ndim == len(shape) + 1 and array.shape[-1] == 1:
        array = array[..., 0]
    fits = array.ndim == len(shape) and all(
        expected in (None, size) for expected, size in zip(shape[1:], array.shape[1:], strict=True)
    )
    return array if fits else None


def check_batch(
    inputs: Inputs,
    arrays: list[np.ndarray],
    shaped: list[np.ndarray | None],
    finite: bool,
    item: str,
) -> list[np.ndarray]:
    """Checks that arrays fit the inputs and hold numbers, and returns the batch."""
    batch = []
    for one, original, array in zip(inputs.all, arrays, shaped, strict=True):
        where = inputs.where(one)
        if array is None:
            hint = ""
            if is_example(original, one.shape):
                hint = " That is one example: pass a batch, x[np.newaxis]."
            raise ValueError(
                f"{where} expects arrays of shape {one.shape}, not {original.shape}{item}.{hint}"
            )
        if 0 in array.shape[1:]:
            raise ValueError(f"{where} is empty: its shape is {array.shape}{item}.")
        if array.dtype.kind == "f":
            _check_finite(inputs, one, array, finite, item)
        batch.append(array)
    counts = [len(array) for array in batch]
    if len(set(counts)) > 1:
        listed = ", ".join(f"{one.name} {n}" for one, n in zip(inputs.all, counts, strict=True))
        raise ValueError(
            f"The inputs of '{inputs.model}' have different numbers of examples{item}: {listed}."
        )
    return batch


def _array(inputs: Inputs, one: Input, data: Any) -> np.ndarray:
    where = inputs.where(one)
    try:
        array = np.asarray(data)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{where} cannot be converted to an array: {str(error).splitlines()[0]}"
        ) from error
    if array.dtype == tf.bfloat16.as_numpy_dtype:
        array = array.astype(np.float32)
    if array.dtype.kind not in "biuf" and not one.holds_text:
        kind = "text" if array.dtype.kind in "SU" else type(data).__name__
        raise ValueError(f"{where} expects numbers, not {kind}.")
    return array


def _check_finite(inputs: Inputs, one: Input, array: np.ndarray, finite: bool, item: str) -> None:
    bad = np.isnan(array)
    kind = "NaN"
    if finite and not bad.any():
        bad, kind = np.isinf(array), "infinity"
    if bad.any() and one.name not in inputs.with_nan():
        example = int(np.argmax(bad.any(axis=tuple(range(1, array.ndim)))))
        where = f"first in example {example}{item or ' of the data'}"
        raise ValueError(
            f"{inputs.where(one)} contains {kind}, {where}, which cannot be quantized. Remove such "
            f"examples, or replace the values."
        )


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names))
