"""A random call of an operator, and functions that create one."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_qat.keras2.backend import keras

BATCH = 3
"""Batch size of all examples."""


@dataclasses.dataclass(frozen=True)
class Example:
    """A call for testing an operator.

    Args:
        build: a function of a Keras tensor for each input that returns the result.
        shapes: shapes of the inputs, without the batch.
        dtypes: types of the inputs, float32 by default. Integers are small.
    """

    build: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...] = ((4, 5, 6),)
    dtypes: tuple[str, ...] = ()


def sizes(numbers: np.random.Generator, low: int, high: int, count: Any) -> tuple[int, ...]:
    """Returns `count` integers from `low` to below `high`."""
    return tuple(int(number) for number in numbers.integers(low, high, count))


def chosen(numbers: np.random.Generator, *given: Any) -> Any:
    """Returns one of several values."""
    return given[numbers.integers(len(given))]


def anew(build: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `build`, or a new layer like it with a new name: a model may have two of them."""
    if not isinstance(build, keras.layers.Layer):
        return build
    config = {name: option for name, option in build.get_config().items() if name != "name"}
    return type(build).from_config(config)


def one_of(*builds: Callable[..., Any], shape: tuple[int, ...] = (4, 5, 6)) -> Any:
    """Returns a function that creates examples with one of several calls."""
    return lambda numbers: Example(anew(chosen(numbers, *builds)), (shape,))


def of_any_shape(*builds: Callable[..., Any]) -> Any:
    """Returns a function that creates examples with one of several calls, of a random shape."""
    return with_options(*(lambda numbers, build=item: anew(build) for item in builds))


def with_options(*makes: Callable[[np.random.Generator], Callable[..., Any]]) -> Any:
    """Like `of_any_shape`, for calls with random options."""

    def example(numbers: np.random.Generator) -> Example:
        shape = sizes(numbers, 1, 7, numbers.integers(1, 5))
        return Example(chosen(numbers, *makes)(numbers), (shape,))

    return example
