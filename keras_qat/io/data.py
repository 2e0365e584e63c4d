"""Reads a user's data as batches of arrays, for all functions that take data.

Data can be anything that `predict` takes, or TFLite's converter as representative data.
"""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_qat.frontend.keras2.backend import keras
from keras_qat.frontend.keras2.layers_and_models import nested_inputs

BATCH_SIZE = 32
"""Default batch size, as in Keras."""


def batches(
    model: Any,
    data: Any,
    batch_size: int | None = None,
    steps: int | None = None,
    *,
    finite: bool = False,
) -> Iterator[list[np.ndarray]]:
    """Yields batches of a functional model's inputs: an array for each, in the model's order.

    The arrays have the data's types. Labels and weights of examples are left out.

    Args:
        model: the model, or its `Inputs`.
        data: arrays, as `model.predict` takes them, or `(x, y)` or `(x, y, weights)`; or a source
            of batches or single examples: a `tf.data.Dataset`, a `keras.utils.Sequence`, a list,
            a generator, or a function that makes one.
        batch_size: batch size for arrays and single examples; by default that of the model's
            inputs, or 32 if they leave it open. Batches in the data stay as they are.
        steps: the most batches to read; all by default.
        finite: whether to refuse infinity. NaN is always refused.

    Raises:
        ValueError: if the data does not fit the model; the message names the input.
    """
    check_counts(batch_size=batch_size, steps=steps)
    inputs = inputs_of(model)
    is_used_up = hasattr(data, "__next__")
    data = _source_of(inputs, data, is_limited=steps is not None)
    read = _read_series if _is_series(inputs, data) else _read_whole
    count = 0
    size = batch_size or inputs.batch_size or BATCH_SIZE
    for batch in itertools.islice(read(inputs, data, size, finite), steps):
        count += 1
        yield batch
    if not count:
        hint = (
            " A generator yields its batches only once: make a new one, or pass the function that "
            "makes it."
        )
        raise ValueError(f"The data for '{inputs.model}' is empty.{hint * is_used_up}")


def arrays_of(model: Any, data: Any) -> list[np.ndarray]:
    """Returns all examples of the data: an array for each model input, in the model's order.

    Args and errors: as for `batches`.
    """
    inputs = inputs_of(model)
    columns = list(zip(*batches(inputs, data, batch_size=1 << 20), strict=True))
    try:
        return [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in columns]
    except ValueError as error:
        sizes = dict.fromkeys(part.shape[1:] for parts in columns for part in parts)
        raise ValueError(
            f"The examples for '{inputs.model}' have different sizes, among them "
            f"{', '.join(map(str, itertools.islice(sizes, 4)))}. Resize them to one size."
        ) from error


def check_counts(**counts: int | None) -> None:
    """Raises a `ValueError` if a named number of examples or batches is not a positive integer."""
    for name, count in counts.items():
        if count is not None and not (isinstance(count, numbers.Integral) and count > 0):
            advice = "pass a whole number of at least 1."
            if np.ndim(count):
                raise ValueError(f"{name}=an array: {advice} Labels are not needed.")
            raise ValueError(f"{name}={count!r}: {advice}")


def batch_count(model: Any, data: Any, batch_size: int | None, steps: int | None) -> int | None:
    """Returns the number of batches that `batches` yields, or None if it is not known yet."""
    check_counts(batch_size=batch_size, steps=steps)
    all_inputs, count = inputs_of(model), None
    inputs = all_inputs.all
    if isinstance(data, tuple) and data:
        data = data[0]
    if isinstance(data, dict):
        data = next((data[one.name] for one in inputs if one.name in data), None)
    if isinstance(data, keras.utils.Sequence):
        count = len(data)
    elif isinstance(data, tf.data.Dataset):
        specs = tf.nest.flatten(data.element_spec)
        ranks = [len(spec.shape) for spec in specs if spec.shape.rank]
        is_batched = bool(ranks) and ranks[0] == len(inputs[0].shape)
        known = int(data.cardinality())
        count = known if is_batched and known >= 0 else None
    elif hasattr(data, "shape") and len(data.shape):
        count = -(-int(data.shape[0]) // (batch_size or all_inputs.batch_size or BATCH_SIZE))
    return min((limit for limit in (count, steps) if limit is not None), default=None)


def padded(array: np.ndarray, size: int) -> np.ndarray:
    """Repeats the last example until the number of examples is a multiple of `size`."""
    missing = -len(array) % size
    return np.concatenate([array, *[array[-1:]] * missing]) if missing else array


def packed(inputs: Inputs, arrays: list[Any]) -> Any:
    """Packs an array for each input into the structure that the model takes."""
    return tf.nest.pack_sequence_as(inputs.nested, arrays)


class Input(NamedTuple):
    """An input of a model or a file; `key` is its key if the model takes a dict."""

    name: str
    key: str
    shape: tuple[int | None, ...]
    holds_text: bool


class Inputs(NamedTuple):
    """The inputs of a model or a file: its name, its inputs, and the structure that it takes."""

    model: str
    all: list[Input]
    nested: Any

    @property
    def batch_size(self) -> int | None:
        """The batch size that the inputs have (`keras.Input(batch_size=8)`); None if it is open."""
        return next((one.shape[0] for one in self.all if one.shape), None)

    @property
    def takes_dict(self) -> bool:
        return isinstance(self.nested, dict)

    def where(self, one: Input) -> str:
        return f"Input '{one.name}' of '{self.model}'"


def inputs_of(model: Any) -> Inputs:
    """Returns what the verbs read of a model's inputs; `Inputs` stay as they are."""
    if isinstance(model, Inputs):
        return model
    nested = nested_inputs(model)
    is_flat = isinstance(nested, dict) and len(nested) == len(model.inputs)
    keys = sorted(nested) if is_flat else model.input_names
    inputs = [
        Input(name, key, tuple(tensor.shape), tensor.dtype == tf.string)
        for name, key, tensor in zip(model.input_names, keys, model.inputs, strict=True)
    ]
    return Inputs(model.name, inputs, nested)


def _source_of(inputs: Inputs, data: Any, is_limited: bool) -> Any:
    """Checks the type of data, and calls a function for its data."""
    if data is None:
        raise ValueError(f"The data for '{inputs.model}' is None: pass examples of its inputs.")
    is_file = isinstance(data, (str, bytes)) or hasattr(data, "__fspath__")
    if is_file or isinstance(data, (keras.layers.Layer, type)):
        shown = "the contents of a file" if isinstance(data, bytes) else repr(data)
        raise ValueError(
            f"The data for '{inputs.model}' cannot be {shown}. Load files first, for example with "
            f"numpy.load; arguments come in the order model, file, data."
        )
    if isinstance(data, tf.data.Dataset):
        if data.cardinality() == tf.data.INFINITE_CARDINALITY and not is_limited:
            raise ValueError(
                "The dataset never ends. Limit its batches, for example with dataset.take(100)."
            )
    elif callable(data) and not _is_array(data):
        try:
            return data()
        except TypeError as error:
            raise ValueError(
                f"The function passed as data for '{inputs.model}' has to return batches when it "
                f"is called without arguments: {error}."
            ) from error
    return data


def _is_array(data: Any) -> bool:
    return hasattr(data, "__array__")


def _is_structure(data: Any) -> bool:
    """Returns whether data is a dict, a tuple or a list of arrays."""
    if isinstance(data, list):
        return any(_is_array(item) or _is_structure(item) for item in data[:1])
    return isinstance(data, (dict, tuple))


def _has_structure(inputs: Inputs, data: Any) -> bool:
    """Returns whether data has the structure of the model's inputs."""
    if isinstance(data, dict) and set(data) != set(inputs.nested if inputs.takes_dict else ()):
        return False
    try:
        tf.nest.assert_same_structure(inputs.nested, data, check_types=False)
    except (TypeError, ValueError):
        return False
    return True


def _is_series(inputs: Inputs, data: Any) -> bool:
    """Returns whether data yields batches or examples, and is not one batch itself."""
    if _is_array(data) or isinstance(data, (dict, tuple, tf.RaggedTensor, tf.SparseTensor)):
        return False
    if not isinstance(data, list):
        if hasattr(data, "__iter__") or hasattr(data, "__getitem__"):
            return True
        raise ValueError(
            f"The data for '{inputs.model}' cannot be {data!r}. Pass an array, a list or dict of "
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
    """Yields batches of arrays that hold all examples."""
    arrays = _columns(inputs, data)
    shaped = [_as_batch(array, one.shape) for array, one in zip(arrays, inputs.all, strict=True)]
    batch = _checked(inputs, arrays, shaped, finite, "")
    for start in range(0, len(batch[0]), batch_size):
        yield [array[start : start + batch_size] for array in batch]


def _read_series(
    inputs: Inputs, data: Any, batch_size: int, finite: bool
) -> Iterator[list[np.ndarray]]:
    """Yields the batches in the data, and batches made of single examples in the data."""
    examples: list[list[np.ndarray]] = []

    def together() -> list[np.ndarray]:
        joined = [np.concatenate(parts) for parts in zip(*examples, strict=True)]
        examples.clear()
        return joined

    for number, item in enumerate(_items(data)):
        arrays = _columns(inputs, item)
        pairs = list(zip(arrays, inputs.all, strict=True))
        single = all(_is_example(array, one.shape) for array, one in pairs)
        shaped = [_as_batch(x[np.newaxis] if single else x, one.shape) for x, one in pairs]
        batch = _checked(inputs, arrays, shaped, finite, f" in item {number} of the data")
        differs = examples and any(
            a.shape[1:] != b.shape[1:] for a, b in zip(batch, examples[0], strict=True)
        )
        if examples and (not single or differs or len(examples) == batch_size):
            yield together()
        if single:
            examples.append(batch)
        elif len(batch[0]):
            yield batch
    if examples:
        yield together()


def _columns(inputs: Inputs, data: Any) -> list[np.ndarray]:
    """Returns an array for each input of a batch or an example, without labels."""
    if isinstance(data, dict):
        for names in ([one.key for one in inputs.all], [one.name for one in inputs.all]):
            if set(names) <= set(data):
                return [
                    _array(inputs, one, data[name])
                    for one, name in zip(inputs.all, names, strict=True)
                ]
    if _has_structure(inputs, data):
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
            return _columns(inputs, data[1 if is_tflite else 0])
        data = list(data)
    if len(inputs.all) == 1:
        (one,) = inputs.all
        is_wrapped = isinstance(data, list) and len(data) == 1 and _is_array(data[0])
        if is_wrapped and not _is_example(np.asarray(data[0]), one.shape):
            (data,) = data
        return [_array(inputs, one, data)]
    arrays = data if isinstance(data, list) else [data]
    if len(arrays) != len(inputs.all):
        raise ValueError(
            f"'{inputs.model}' has {len(inputs.all)} inputs, but the data has {len(arrays)}. Pass "
            f"a list or a dict of arrays for {_listed(one.name for one in inputs.all)}."
        )
    return [_array(inputs, one, array) for one, array in zip(inputs.all, arrays, strict=True)]


def _array(inputs: Inputs, one: Input, data: Any) -> np.ndarray:
    where = inputs.where(one)
    try:
        array = np.asarray(data)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{where} is not an array of numbers of one size: {str(error).splitlines()[0]}"
        ) from error
    if array.dtype == tf.bfloat16.as_numpy_dtype:
        array = array.astype(np.float32)
    if array.dtype.kind not in "biuf" and not one.holds_text:
        kind = "text" if array.dtype.kind in "SU" else type(data).__name__
        raise ValueError(f"{where} takes numbers, not {kind}.")
    return array


def _is_example(array: np.ndarray, shape: tuple[int | None, ...]) -> bool:
    """Returns whether an array is one example of an input, and cannot be a batch."""
    if _as_batch(array[np.newaxis], shape) is None:
        return False
    return array.ndim == len(shape) - 1 or _as_batch(array, shape) is None


def _as_batch(array: np.ndarray, shape: tuple[int | None, ...]) -> np.ndarray | None:
    """Returns an array in an input's shape, or None. As in Keras, a last axis of 1 is optional."""
    if array.ndim == len(shape) - 1 and shape[-1] == 1:
        array = array[..., np.newaxis]
    elif array.ndim == len(shape) + 1 and array.shape[-1] == 1:
        array = array[..., 0]
    fits = array.ndim == len(shape) and all(
        expected in (None, size) for expected, size in zip(shape[1:], array.shape[1:], strict=True)
    )
    return array if fits else None


def _checked(
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
            if _is_example(original, one.shape):
                hint = " It is one example: pass a batch, x[np.newaxis]."
            raise ValueError(
                f"{where} takes arrays of shape {one.shape}, not {original.shape}{item}.{hint}"
            )
        if 0 in array.shape[1:]:
            raise ValueError(f"{where} is empty: its shape is {array.shape}{item}.")
        if array.dtype.kind == "f":
            _check_finite(array, where, finite, item)
        batch.append(array)
    counts = [len(array) for array in batch]
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
            f"{where} holds {kind}, first in example {example}{item or ' of the data'}. It cannot "
            f"be quantized: remove such examples, or replace the values."
        )


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names))
