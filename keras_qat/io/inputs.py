"""Matches arrays to the inputs of a model or a file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike, DTypeLike, NDArray

from keras_qat.graph.missing_values import find_nan_handling
from keras_qat.graph.read_model import read_model
from keras_qat.keras2.backend import keras
from keras_qat.keras2.layers_and_models import get_nested_inputs

SLIGHT = 0.1
"""Values that exceed a range by less than this share of its width are ignored."""
BEYOND = 0.25
"""If more than this share of all values exceeds the range, the data has a wrong scale."""
FAR = 0.01
"""An example is wrong if more than this share of its values is far outside of the range. Far means
a distance of more than the range's width."""
FEW_VALUES = 1 << 20
"""Maximum number of values in a block of `split_rows`."""

Shape = tuple[int | None, ...]


class Input(NamedTuple):
    """An input of a model or a file. `key` is the key of the input in a dict of inputs."""

    name: str
    key: str
    shape: Shape
    holds_text: bool


class Inputs(NamedTuple):
    """The inputs of a model or a file.

    Args:
        model: name of the model or the file.
        all: one entry for each input, in order.
        nested: the structure of inputs that the model or file accepts, such as a dict.
        find_nan_inputs: function that returns the names of the inputs that may contain NaN. It is
            only called if any input contains NaN.
        parent: inputs of the complete model, if `model` is a part of it. Data for these inputs is
            accepted, too.
    """

    model: str
    all: list[Input]
    nested: Any
    find_nan_inputs: Callable[[], Collection[str]] = tuple
    parent: Any = None

    @property
    def batch_size(self) -> int | None:
        """The fixed batch size of the inputs (`keras.Input(batch_size=8)`), or None."""
        return next((one.shape[0] for one in self.all if one.shape), None)


def get_inputs(model: keras.Model | Inputs) -> Inputs:
    if isinstance(model, Inputs):
        return model
    nested = get_nested_inputs(model)
    is_flat = isinstance(nested, dict) and len(nested) == len(model.inputs)
    keys = sorted(nested) if is_flat else model.input_names
    inputs = [
        Input(name, key, tuple(tensor.shape), tensor.dtype == tf.string)
        for name, key, tensor in zip(model.input_names, keys, model.inputs, strict=True)
    ]

    def find_nan_inputs() -> set[str]:
        return {value.name for value in find_nan_handling(read_model(model))}

    parent = getattr(model, "part_of", None)
    return Inputs(model.name, inputs, nested, find_nan_inputs, parent and get_inputs(parent))


def pack_inputs(inputs: Inputs, arrays: Sequence[ArrayLike]) -> Any:
    """Packs a list with one array per input into the structure that the model accepts."""
    return tf.nest.pack_sequence_as(inputs.nested, arrays)


def is_array(data: object) -> bool:
    """Returns True for arrays, and for tensors that NumPy can convert to arrays."""
    return hasattr(data, "__array__")


def has_structure(inputs: Inputs, data: object) -> bool:
    if isinstance(data, dict) and not (
        isinstance(inputs.nested, dict) and set(data) == set(inputs.nested)
    ):
        return False
    try:
        tf.nest.assert_same_structure(inputs.nested, data, check_types=False)
    except (TypeError, ValueError):
        return False
    return True


def split_columns(inputs: Inputs, data: Any) -> list[NDArray]:
    """Splits a batch or an example into one array per input, and drops labels."""
    if inputs.parent is not None:
        with contextlib.suppress(ValueError):
            columns = split_columns(inputs.parent, data)
            by_name = dict(zip((one.name for one in inputs.parent.all), columns, strict=True))
            return [by_name[one.name] for one in inputs.all]
    names = [one.name for one in inputs.all]

    def to_arrays(columns: Iterable[object]) -> list[NDArray]:
        return [
            _to_array(inputs, one, column) for one, column in zip(inputs.all, columns, strict=True)
        ]

    if isinstance(data, dict):
        for keys in ([one.key for one in inputs.all], names):
            if set(keys) <= set(data):
                return to_arrays(data[key] for key in keys)
    if has_structure(inputs, data):
        return to_arrays(tf.nest.flatten(data))
    if isinstance(data, dict):
        raise ValueError(
            f"'{inputs.model}' has the inputs {_join(names)}, but the data has {_join(data)}. Use "
            f"the names of the inputs as keys."
        )
    if isinstance(data, tuple):
        is_tflite = len(data) == 2 and isinstance(data[0], str)  # (name of the signature, inputs)
        if is_tflite or 1 <= len(data) <= 3:
            return split_columns(inputs, data[1 if is_tflite else 0])
        data = list(data)
    if len(inputs.all) == 1:
        is_wrapped = isinstance(data, list) and len(data) == 1 and is_array(data[0])
        if is_wrapped and not is_example(np.asarray(data[0]), inputs.all[0].shape):
            (data,) = data
        return to_arrays([data])
    arrays = data if isinstance(data, list) else [data]
    if len(arrays) != len(inputs.all):
        raise ValueError(
            f"'{inputs.model}' has {len(inputs.all)} inputs, but the data has {len(arrays)}. Pass "
            f"a list or a dict of arrays for {_join(names)}."
        )
    return to_arrays(arrays)


def is_example(array: NDArray, shape: Shape) -> bool:
    """Returns True if an array is a single example of an input instead of a batch."""
    if as_batch(array[np.newaxis], shape) is None:
        return False
    return array.ndim == len(shape) - 1 or as_batch(array, shape) is None


def as_batch(array: NDArray, shape: Shape) -> NDArray | None:
    """Adds or removes a last axis of size 1 to match `shape`. Returns None if sizes differ."""
    if array.ndim == len(shape) - 1 and shape[-1] == 1:
        array = array[..., np.newaxis]
    elif array.ndim == len(shape) + 1 and array.shape[-1] == 1:
        array = array[..., 0]
    fits = array.ndim == len(shape) and all(
        expected in (None, size) for expected, size in zip(shape[1:], array.shape[1:], strict=True)
    )
    return array if fits else None


def check_batch(
    inputs: Inputs, arrays: list[NDArray], shaped: list[NDArray | None], finite: bool, item: str
) -> list[NDArray]:
    """Raises an error if arrays do not match the inputs. Returns the reshaped arrays.

    `shaped` contains the results of `as_batch` for `arrays`. `finite` means to refuse infinity.
    `item` is a position for messages, such as " in item 3 of the data".
    """
    batch = []
    for one, original, array in zip(inputs.all, arrays, shaped, strict=True):
        where = _describe_input(inputs, one)
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


def _describe_input(inputs: Inputs, one: Input) -> str:
    return f"Input '{one.name}' of '{inputs.model}'"


def _to_array(inputs: Inputs, one: Input, data: object) -> NDArray:
    where = _describe_input(inputs, one)
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


def _check_finite(inputs: Inputs, one: Input, array: NDArray, finite: bool, item: str) -> None:
    ends = np.array([array.min(initial=0), array.max(initial=0)])
    kind, is_bad = ("NaN", np.isnan) if np.isnan(ends).any() else ("infinity", np.isinf)
    if (
        (finite or kind == "NaN")
        and is_bad(ends).any()
        and one.name not in inputs.find_nan_inputs()
    ):
        bad = is_bad(array)
        example = int(np.argmax(bad.any(axis=tuple(range(1, array.ndim)))))
        raise ValueError(
            f"{_describe_input(inputs, one)} contains {kind}, first in example "
            f"{example}{item or ' of the data'}, which cannot be quantized. Remove such examples, "
            f"or replace the values."
        )


def _join(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


@contextlib.contextmanager
def explain_batch_size(model: str, fixed: int | None, count: int) -> Iterator[None]:
    """Explains errors in a `with` block that computes a batch of `count` examples.

    `fixed` is the batch size that the model requires, or None.
    """
    try:
        yield
    except (TypeError, ValueError, tf.errors.OpError) as error:
        if fixed in (None, count):
            raise
        raise ValueError(
            f"'{model}' computes {fixed} examples together, so it needs batches of {fixed} "
            f"examples, not {count}."
        ) from error


def split_rows(array: NDArray) -> Iterator[slice]:
    """Yields slices of rows with at most `FEW_VALUES` values, to keep temporary arrays small."""
    rows = max(1, FEW_VALUES * len(array) // max(array.size, 1))
    for start in range(0, len(array), rows):
        yield slice(start, start + rows)


def describe_excess(name: str, x: NDArray, low: float, high: float) -> str:
    """Returns a sentence if data does not match the range of an input. Returns "" if it matches.

    For example, pixels from 0 to 255 do not match a range from 0 to 1. Data with a few outliers
    matches. There are two cases in which data does not match:

    - More than `BEYOND` of all values exceed the range by more than `SLIGHT` of its width.
    - In most examples, more than `FAR` of the values exceed the range by more than its width.
    """
    width = high - low
    if not width > 0 or not x.size:
        return ""
    lowest, highest = float(np.nanmin(x)), float(np.nanmax(x))
    slight = SLIGHT * width
    if low - slight <= lowest and highest <= high + slight:
        return ""
    shares = [
        ((y < low - beyond) | (y > high + beyond)).reshape(len(y), -1).mean(1)
        for beyond in (slight, width)
        for y in map(x.__getitem__, split_rows(x))
    ]
    of_slight, of_far = np.concatenate(shares).reshape(2, -1)
    share, in_most = of_slight.mean(), np.median(of_far) > FAR
    if share <= BEYOND and not in_most:
        return ""
    return (
        f"{share:.0%} of the values of input '{name}' are outside its range of {low:.3g} to "
        f"{high:.3g} and are clipped: the data is {lowest:.4g} to {highest:.4g}. Scale it as in "
        f"training, or calibrate on more data."
    )


def get_range(dtype: DTypeLike, scale: float, zero_point: int) -> tuple[float, float]:
    """Returns the smallest and the largest float value that a quantized type represents."""
    limits = np.iinfo(dtype)
    return (limits.min - zero_point) * scale, (limits.max - zero_point) * scale


def get_pixel_range(scale: ArrayLike, offset: ArrayLike) -> tuple[float, float]:
    """Returns the minimum and the maximum of `scale * pixel + offset` for pixels from 0 to 255."""
    ends = np.asarray(offset) + np.multiply.outer([0.0, 255.0], scale)
    return float(ends.min()), float(ends.max())
