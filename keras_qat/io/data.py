"""Reads a user's data as batches of arrays, and shows the progress.

The data can be anything that `predict` accepts, or representative data of TFLite's converter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from keras_qat.io.counts import check_counts
from keras_qat.io.inputs import (
    Inputs,
    as_batch,
    check_batch,
    get_inputs,
    has_structure,
    is_array,
    is_example,
    split_columns,
)
from keras_qat.keras2.backend import keras
from keras_qat.messages import warn_caller

BATCH_SIZE = 32

MANY, MOST = 1_000, 100_000
"""Data without a length cause a warning after `MANY` batches, and an error after `MOST` batches."""

_Item = TypeVar("_Item")


def read_batches(
    model: keras.Model | Inputs,
    data: Any,
    batch_size: int | None = None,
    steps: int | None = None,
    *,
    finite: bool = False,
) -> Iterator[list[NDArray]]:
    """Yields batches: lists with one array for each input, in the order of `model.inputs`.

    The arrays keep the types of the data. Labels and sample weights are dropped.

    Args:
        model: the model, or its `Inputs`.
        data: arrays as for `model.predict`, or a tuple `(x, y)` or `(x, y, weights)`. Sources of
            batches or single examples are also accepted: a `tf.data.Dataset`, a
            `keras.utils.Sequence`, a list, a generator, or a function that returns any of these.
        batch_size: batch size for arrays and single examples. Data in batches keep their batch
            size. The default is the model's fixed batch size, or 32.
        steps: the maximum number of batches to read. By default, all are read. Data without a
            length cause a warning after 1,000 batches, and an error after 100,000.
        finite: True to refuse infinity. NaN is refused unless the model handles NaN.

    Raises:
        ValueError: if the data does not match the model, or seems to be endless.
    """
    check_counts(batch_size=batch_size, steps=steps)
    inputs = get_inputs(model)
    is_used_up = is_read_once(data)
    data = _open_source(inputs, data, is_limited=steps is not None)
    is_series = _is_series(inputs, data)
    read = _read_series if is_series else _read_arrays
    may_never_end = is_series and steps is None and not _has_length(data)
    count = 0
    size = batch_size or inputs.batch_size or BATCH_SIZE
    for batch in itertools.islice(read(inputs, data, size, finite), steps):
        if may_never_end and count in (MANY, MOST):
            message = (
                f"{count} batches of the data for '{inputs.model}' have been read, and there are "
                f"more. If the data never ends, limit it: pass steps=100, or "
                f"itertools.islice(data, 100)."
            )
            if count >= MOST:
                raise ValueError(message)
            warn_caller(message)
        count += 1
        yield batch
    if not count:
        hint = (
            " A generator yields its batches only once. Create a new one, or pass the function "
            "that creates it."
        )
        raise ValueError(f"The data for '{inputs.model}' is empty.{hint * is_used_up}")


def read_arrays(model: keras.Model | Inputs, data: Any) -> list[NDArray]:
    """Reads all examples. Returns one array for each input, in the order of `model.inputs`.

    `read_batches` describes the arguments and errors.
    """
    inputs = get_inputs(model)
    columns = list(zip(*read_batches(inputs, data, batch_size=1 << 20), strict=True))
    try:
        return [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in columns]
    except ValueError as error:
        sizes = dict.fromkeys(part.shape[1:] for parts in columns for part in parts)
        raise ValueError(
            f"The examples for '{inputs.model}' have different sizes, such as "
            f"{', '.join(map(str, itertools.islice(sizes, 4)))}. Resize them to one size."
        ) from error


def count_batches(
    model: keras.Model | Inputs, data: Any, batch_size: int | None, steps: int | None
) -> int | None:
    """Returns the number of batches that `read_batches` yields, or None if unknown."""
    check_counts(batch_size=batch_size, steps=steps)
    inputs, count = get_inputs(model), None
    if isinstance(data, tuple) and data:
        data = data[0]
    if isinstance(data, dict):
        data = next((data[one.name] for one in inputs.all if one.name in data), None)
    if isinstance(data, keras.utils.Sequence):
        count = len(data)
    elif isinstance(data, tf.data.Dataset):
        specs = tf.nest.flatten(data.element_spec)
        ranks = [len(spec.shape) for spec in specs if spec.shape.rank]
        is_batched = bool(ranks) and ranks[0] == len(inputs.all[0].shape)
        known = int(data.cardinality())
        count = known if is_batched and known >= 0 else None
    elif hasattr(data, "shape") and len(data.shape):
        count = -(-int(data.shape[0]) // (batch_size or inputs.batch_size or BATCH_SIZE))
    return min((limit for limit in (count, steps) if limit is not None), default=None)


def pad_batch(array: NDArray, size: int) -> NDArray:
    """Repeats the last example until the number of examples is a multiple of `size`."""
    missing = -len(array) % size
    return np.concatenate([array, *[array[-1:]] * missing]) if missing else array


def _open_source(inputs: Inputs, data: Any, is_limited: bool) -> Any:
    """Check the type of `data`. If `data` is a function, return its result."""
    if data is None:
        raise ValueError(f"The data for '{inputs.model}' is None. Pass examples of its inputs.")
    is_file = isinstance(data, (str, bytes)) or hasattr(data, "__fspath__")
    if is_file or isinstance(data, (keras.layers.Layer, type)):
        shown = "the contents of a file" if isinstance(data, bytes) else repr(data)
        raise ValueError(
            f"The data for '{inputs.model}' cannot be {shown}. Load files first, for example with "
            f"numpy.load. The arguments come in the order model, file, data."
        )
    if isinstance(data, tf.data.Dataset):
        if data.cardinality() == tf.data.INFINITE_CARDINALITY and not is_limited:
            raise ValueError(
                "The dataset never ends. Limit its batches, for example with dataset.take(100)."
            )
    elif callable(data) and not is_array(data):
        try:
            return data()
        except TypeError as error:
            raise ValueError(
                f"The function passed as data for '{inputs.model}' must return batches when called "
                f"without arguments, but failed: {error}."
            ) from error
    return data


def _is_structure(data: object) -> bool:
    """Return True for a dict or tuple, or if a list begins with an array or a structure."""
    if isinstance(data, list):
        return any(is_array(item) or _is_structure(item) for item in data[:1])
    return isinstance(data, (dict, tuple))


def _is_series(inputs: Inputs, data: object) -> bool:
    """Return True if `data` is a source of batches or examples, instead of one batch."""
    if is_array(data) or isinstance(data, (dict, tuple, tf.RaggedTensor, tf.SparseTensor)):
        return False
    if not isinstance(data, list):
        if hasattr(data, "__iter__") or hasattr(data, "__getitem__"):
            return True
        raise ValueError(
            f"The data for '{inputs.model}' cannot be {data!r}. Pass an array, a list or dict of "
            f"arrays, a tf.data.Dataset, or a generator of batches."
        )
    if inputs.parent is not None and len(data) == len(inputs.parent.all):
        inputs = inputs.parent
    if not data or any(map(_is_structure, data)):
        return not (len(inputs.all) > 1 and has_structure(inputs, data))
    if len(inputs.all) > 1 or not any(map(is_array, data)):
        return False
    return len(data) > 1 or is_example(np.asarray(data[0]), inputs.all[0].shape)


def is_read_once(data: object) -> bool:
    """Returns True for iterators, which yield their items only once."""
    return hasattr(data, "__next__") and not _has_indices(data)


def _has_indices(data: object) -> bool:
    """Return True if `data` supports `len(data)` and `data[index]`, like a `keras.utils.Sequence`.

    Indices are safer than iteration, because `ImageDataGenerator.flow` yields batches forever.
    """
    return hasattr(data, "__getitem__") and _has_length(data)


def _has_length(data: Any) -> bool:
    try:
        return len(data) >= 0
    except TypeError:  # Also raised by a `tf.data.Dataset` of unknown length.
        return False


def _read_arrays(
    inputs: Inputs, data: object, batch_size: int, finite: bool
) -> Iterator[list[NDArray]]:
    arrays = split_columns(inputs, data)
    shaped = [as_batch(array, one.shape) for array, one in zip(arrays, inputs.all, strict=True)]
    batch = check_batch(inputs, arrays, shaped, finite, "")
    for start in range(0, len(batch[0]), batch_size):
        yield [array[start : start + batch_size] for array in batch]


def _read_series(
    inputs: Inputs, data: Any, batch_size: int, finite: bool
) -> Iterator[list[NDArray]]:
    """Yield batches from a dataset or generator. Collect single examples into batches."""
    examples: list[list[NDArray]] = []

    def collect() -> list[NDArray]:
        batch = [np.concatenate(arrays) for arrays in zip(*examples, strict=True)]
        examples.clear()
        return batch

    items = (data[index] for index in range(len(data))) if _has_indices(data) else data
    for number, item in enumerate(items):
        arrays = split_columns(inputs, item)
        pairs = list(zip(arrays, inputs.all, strict=True))
        single = all(is_example(array, one.shape) for array, one in pairs)
        shaped = [as_batch(x[np.newaxis] if single else x, one.shape) for x, one in pairs]
        batch = check_batch(inputs, arrays, shaped, finite, f" in item {number} of the data")
        differs = examples and any(
            a.shape[1:] != b.shape[1:] for a, b in zip(batch, examples[0], strict=True)
        )
        if examples and (not single or differs or len(examples) == batch_size):
            yield collect()
        if single:
            examples.append(batch)
        elif len(batch[0]):
            yield batch
    if examples:
        yield collect()


def show_progress(
    items: Iterable[_Item], title: str, verbose: int, total: int | None = None, unit: str = "batch"
) -> Iterator[_Item]:
    """Yields the items, and shows a progress bar if `verbose`.

    `total` is the number of items if `items` has no length. `unit` is what an item is called.
    """
    if not verbose:
        yield from items
        return
    print(title)
    count = len(items) if isinstance(items, Sized) else total
    bar = keras.utils.Progbar(count, unit_name=unit)
    done = 0
    for done, item in enumerate(items, start=1):
        yield item
        bar.update(done, finalize=done == count)
    if done != count:
        bar.update(done, finalize=True)
