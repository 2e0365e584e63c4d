"""Data as users have it, read as batches of arrays: the one reader of all verbs.

It takes what `predict` takes, and what TFLite's converter takes as representative data.
"""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_qat.frontend.graph import nested_inputs
from keras_qat.frontend.keras2.backend import keras

__all__ = ["Input", "Inputs", "arrays_of", "batch_count", "batches", "check_counts", "packed"]

BATCH_SIZE = 32
"""Of arrays and of single examples, as Keras has it."""


def batches(
    model: Any,
    data: Any,
    batch_size: int | None = None,
    steps: int | None = None,
    *,
    finite: bool = False,
) -> Iterator[list[np.ndarray]]:
    """Batches of a functional model's inputs: an array for each of them, in the model's order.

    The arrays have the data's types. Labels and weights of examples are left out.

    Args:
        model: the model, or `Inputs`: all that is read of it.
        data: arrays, as `model.predict` takes them, or `(x, y)` or `(x, y, weights)` of them; or
            what gives batches or single examples: a `tf.data.Dataset`, a `keras.utils.Sequence`,
            a list, a generator, or the function that makes one.
        batch_size: examples per batch of arrays, and of examples that come one by one; 32 by
            default. Batches that the data gives stay as they are.
        steps: how many batches there are at most; all by default.
        finite: whether infinity is refused, as NaN is always.

    Raises:
        ValueError: if the data is not what the model takes; the message names the input.
    """
    check_counts(batch_size=batch_size, steps=steps)
    inputs = _inputs_of(model)
    data = _opened(inputs, data, is_limited=steps is not None)
    read = _read_series if _is_series(inputs, data) else _read_whole
    count = 0
    for batch in itertools.islice(read(inputs, data, batch_size or BATCH_SIZE, finite), steps):
        count += 1
        yield batch
    if not count:
        raise ValueError(
            f"No examples are given for '{inputs.model}': the data is empty. A generator gives its "
            f"batches once; make it anew, or give the function that makes it."
        )


def arrays_of(model: Any, data: Any) -> list[np.ndarray]:
    """All examples of the data: an array for each input of the model, in its order.

    Args and errors: as for `batches`.
    """
    columns = list(zip(*batches(model, data, batch_size=1 << 20), strict=True))
    try:
        return [each[0] if len(each) == 1 else np.concatenate(each) for each in columns]
    except ValueError as error:
        sizes = dict.fromkeys(part.shape[1:] for each in columns for part in each)
        raise ValueError(
            f"The examples for '{model.name}' have different sizes, among them "
            f"{', '.join(map(str, itertools.islice(sizes, 4)))}. Bring them to one size."
        ) from error


def check_counts(**given: int | None) -> None:
    """Raises a `ValueError` on a number of examples or batches, by its name, that is none."""
    for name, count in given.items():
        if count is not None and not (isinstance(count, numbers.Integral) and count > 0):
            raise ValueError(f"{name}={count!r}: give a whole number, at least 1.")


def batch_count(model: Any, data: Any, batch_size: int | None, steps: int | None) -> int | None:
    """How many batches `batches` gives, if that is known before they are read: for progress."""
    check_counts(batch_size=batch_size, steps=steps)
    inputs, count = _inputs_of(model).all, None
    if isinstance(data, tuple) and data:
        data = data[0]
    if isinstance(data, dict):
        data = next((data[each.name] for each in inputs if each.name in data), None)
    if isinstance(data, keras.utils.Sequence):
        count = len(data)
    elif isinstance(data, tf.data.Dataset):
        ranks = [len(each.shape) for each in tf.nest.flatten(data.element_spec) if each.shape.rank]
        is_batched = bool(ranks) and ranks[0] == len(inputs[0].shape)
        known = int(data.cardinality())
        count = known if is_batched and known >= 0 else None
    elif hasattr(data, "shape") and len(data.shape):
        count = -(-int(data.shape[0]) // (batch_size or BATCH_SIZE))
    return min((each for each in (count, steps) if each is not None), default=None)


def packed(model: Any, arrays: list[Any]) -> Any:
    """What is given for each input, in the structure that the model takes."""
    return tf.nest.pack_sequence_as(nested_inputs(model), arrays)


class Input(NamedTuple):
    """An input of a model or a file. `key` is its place in the dict that it takes, if it does."""

    name: str
    key: str
    shape: tuple[int | None, ...]
    holds_text: bool


class Inputs(NamedTuple):
    """The inputs of a model or a file: its name, each of them, and the structure that it takes."""

    model: str
    all: list[Input]
    nested: Any

    @property
    def takes_dict(self) -> bool:
        return isinstance(self.nested, dict)

    def where(self, one: Input) -> str:
        return f"Input '{one.name}' of '{self.model}'"


def _inputs_of(model: Any) -> Inputs:
    if isinstance(model, Inputs):
        return model
    nested = nested_inputs(model)
    is_flat = isinstance(nested, dict) and len(nested) == len(model.inputs)
    keys = sorted(nested) if is_flat else model.input_names
    found = [
        Input(name, key, tuple(tensor.shape), tensor.dtype == tf.string)
        for name, key, tensor in zip(model.input_names, keys, model.inputs, strict=True)
    ]
    return Inputs(model.name, found, nested)


def _opened(inputs: Inputs, data: Any, is_limited: bool) -> Any:
    """The data; of a function, what it gives. Refuses what can be no data."""
    if data is None:
        raise ValueError(f"No data is given for '{inputs.model}': give examples of its inputs.")
    is_file = isinstance(data, (str, bytes)) or hasattr(data, "__fspath__")
    if is_file or isinstance(data, (keras.layers.Layer, type)):
        what = "The contents of a file" if isinstance(data, bytes) else repr(data)
        raise ValueError(
            f"{what} is given as data for '{inputs.model}'. Load files first, for example with "
            f"numpy.load; arguments come in the order model, file, data."
        )
    if isinstance(data, tf.data.Dataset):
        if data.cardinality() == tf.data.INFINITE_CARDINALITY and not is_limited:
            raise ValueError(
                "The dataset never ends. Take as many batches as are wanted: dataset.take(100)."
            )
    elif callable(data) and not _is_array(data):
        try:
            return data()
        except TypeError as error:
            raise ValueError(
                f"The function given as data for '{inputs.model}' has to give batches when it is "
                f"called without arguments: {error}."
            ) from error
    return data


def _is_array(data: Any) -> bool:
    return hasattr(data, "__array__")


def _is_structure(data: Any) -> bool:
    """Whether it holds arrays, as a dict, a tuple or a list."""
    if isinstance(data, list):
        return any(_is_array(each) or _is_structure(each) for each in data[:1])
    return isinstance(data, (dict, tuple))


def _has_structure(inputs: Inputs, data: Any) -> bool:
    """Whether arrays stand as in what the model takes."""
    if isinstance(data, dict) and set(data) != set(inputs.nested if inputs.takes_dict else ()):
        return False
    try:
        tf.nest.assert_same_structure(inputs.nested, data, check_types=False)
    except (TypeError, ValueError):
        return False
    return True


def _is_series(inputs: Inputs, data: Any) -> bool:
    """Whether the data gives batches or examples one after the other, and is no batch itself."""
    if _is_array(data) or isinstance(data, (dict, tuple, tf.RaggedTensor, tf.SparseTensor)):
        return False
    if not isinstance(data, list):
        if hasattr(data, "__iter__") or hasattr(data, "__getitem__"):
            return True
        raise ValueError(
            f"{data!r} is given as data for '{inputs.model}'. Give an array, a list or dict of "
            f"arrays, a tf.data.Dataset, or a generator of batches."
        )
    if not data or any(map(_is_structure, data)):
        return not (len(inputs.all) > 1 and _has_structure(inputs, data))
    if len(inputs.all) > 1 or not any(map(_is_array, data)):
        return False
    return len(data) > 1 or _is_example(np.asarray(data[0]), inputs.all[0].shape)


def _items(data: Any) -> Any:
    if hasattr(data, "__iter__"):
        return data
    return (data[number] for number in range(len(data)))


def _read_whole(
    inputs: Inputs, data: Any, batch_size: int, finite: bool
) -> Iterator[list[np.ndarray]]:
    """Batches of arrays that hold all examples."""
    arrays = _columns(inputs, data)
    shaped = [_as_batch(each, one.shape) for each, one in zip(arrays, inputs.all, strict=True)]
    batch = _checked(inputs, arrays, shaped, finite, "")
    for start in range(0, len(batch[0]), batch_size):
        yield [each[start : start + batch_size] for each in batch]


def _read_series(
    inputs: Inputs, data: Any, batch_size: int, finite: bool
) -> Iterator[list[np.ndarray]]:
    """Batches that the data gives, and batches of the single examples that it gives."""
    examples: list[list[np.ndarray]] = []

    def together() -> list[np.ndarray]:
        joined = [np.concatenate(each) for each in zip(*examples, strict=True)]
        examples.clear()
        return joined

    for number, item in enumerate(_items(data)):
        arrays = _columns(inputs, item)
        pairs = list(zip(arrays, inputs.all, strict=True))
        single = all(_is_example(each, one.shape) for each, one in pairs)
        shaped = [_as_batch(each[np.newaxis] if single else each, one.shape) for each, one in pairs]
        batch = _checked(inputs, arrays, shaped, finite, f" in item {number} of the data")
        others = examples and any(
            a.shape[1:] != b.shape[1:] for a, b in zip(batch, examples[0], strict=True)
        )
        if examples and (not single or others or len(examples) == batch_size):
            yield together()
        if single:
            examples.append(batch)
        elif len(batch[0]):
            yield batch
    if examples:
        yield together()


def _columns(inputs: Inputs, data: Any) -> list[np.ndarray]:
    """An array for each input of a batch or an example; its labels are left out."""
    if isinstance(data, dict):
        for names in ([each.name for each in inputs.all], [each.key for each in inputs.all]):
            if set(names) <= set(data):
                return [
                    _array(inputs, one, data[name])
                    for one, name in zip(inputs.all, names, strict=True)
                ]
    if _has_structure(inputs, data):
        flat = tf.nest.flatten(data)
        return [_array(inputs, one, each) for one, each in zip(inputs.all, flat, strict=True)]
    if isinstance(data, dict):
        raise ValueError(
            f"'{inputs.model}' has the inputs {_listed(each.name for each in inputs.all)}; given: "
            f"{_listed(data)}."
        )
    if isinstance(data, tuple):
        is_tflite = len(data) == 2 and isinstance(data[0], str)  # The signature's name, the inputs.
        if is_tflite or 1 <= len(data) <= 3:
            return _columns(inputs, data[1 if is_tflite else 0])
        data = list(data)
    if len(inputs.all) == 1:
        (one,) = inputs.all
        is_wrapped = isinstance(data, list) and len(data) == 1 and _is_array(data[0])
        if is_wrapped and not _is_example(np.asarray(data[0]), one.shape):
            (data,) = data
        return [_array(inputs, one, data)]
    given = data if isinstance(data, list) else [data]
    if len(given) != len(inputs.all):
        raise ValueError(
            f"'{inputs.model}' has {len(inputs.all)} inputs, {len(given)} are given. Give a list "
            f"or a dict of arrays for {_listed(each.name for each in inputs.all)}."
        )
    return [_array(inputs, one, each) for one, each in zip(inputs.all, given, strict=True)]


def _array(inputs: Inputs, one: Input, data: Any) -> np.ndarray:
    where = inputs.where(one)
    try:
        array = np.asarray(data)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{where} holds no array of numbers, as all of one size: {str(error).splitlines()[0]}"
        ) from error
    if array.dtype == tf.bfloat16.as_numpy_dtype:
        array = array.astype(np.float32)
    if array.dtype.kind not in "biuf" and not one.holds_text:
        raise ValueError(
            f"{where} holds {type(data).__name__} of {array.dtype}, which are no numbers."
        )
    return array


def _is_example(array: np.ndarray, shape: tuple[int | None, ...]) -> bool:
    """Whether an array is one example of an input, and cannot be a batch of them."""
    if _as_batch(array[np.newaxis], shape) is None:
        return False
    return array.ndim == len(shape) - 1 or _as_batch(array, shape) is None


def _as_batch(array: np.ndarray, shape: tuple[int | None, ...]) -> np.ndarray | None:
    """An array in the shape of an input, as Keras makes it: a last axis of 1 comes or goes."""
    if array.ndim == len(shape) - 1 and shape[-1] == 1:
        array = array[..., np.newaxis]
    elif array.ndim == len(shape) + 1 and array.shape[-1] == 1:
        array = array[..., 0]
    fits = array.ndim == len(shape) and all(
        wanted in (None, size) for wanted, size in zip(shape[1:], array.shape[1:], strict=True)
    )
    return array if fits else None


def _checked(
    inputs: Inputs,
    arrays: list[np.ndarray],
    shaped: list[np.ndarray | None],
    finite: bool,
    item: str,
) -> list[np.ndarray]:
    """A batch, if it is one of the model's inputs, and of numbers."""
    batch = []
    for one, given, array in zip(inputs.all, arrays, shaped, strict=True):
        where = inputs.where(one)
        if array is None:
            hint = ""
            if _is_example(given, one.shape):
                hint = " It is one example: give a batch, x[np.newaxis]."
            raise ValueError(
                f"{where} takes arrays of the shape {one.shape}, not {given.shape}{item}.{hint}"
            )
        if 0 in array.shape[1:]:
            raise ValueError(f"{where} holds no numbers: its shape is {array.shape}{item}.")
        if array.dtype.kind == "f":
            _check_finite(array, where, finite, item)
        batch.append(array)
    counts = [len(each) for each in batch]
    if len(set(counts)) > 1:
        listed = ", ".join(f"{one.name} {n}" for one, n in zip(inputs.all, counts, strict=True))
        raise ValueError(
            f"The inputs of '{inputs.model}' have different numbers of examples{item}: {listed}."
        )
    return batch


def _check_finite(array: np.ndarray, where: str, finite: bool, item: str) -> None:
    bad = np.isnan(array)
    kind = "NaN"
    if finite and not bad.any():
        bad, kind = np.isinf(array), "infinity"
    if bad.any():
        example = int(np.argmax(bad.any(axis=tuple(range(1, array.ndim)))))
        raise ValueError(
            f"{where} holds {kind}, first in example {example}{item or ' of the data'}. No "
            f"quantized value stands for that: take such examples out, or replace the values."
        )


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names))
