"""A random call of an operator, and what makes one."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_qat.keras2.backend import keras

BATCH = 3
"""Of all examples."""


@dataclasses.dataclass(frozen=True)
class Example:
    """One call to test an operator with.

    Args:
        build: from a Keras tensor for each input to the result.
        shapes: of the inputs, without the batch.
        dtypes: of the inputs, float32 by default. Integers are small ones.
    """

    build: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...] = ((4, 5, 6),)
    dtypes: tuple[str, ...] = ()


def sizes(numbers: np.random.Generator, low: int, high: int, count: Any) -> tuple[int, ...]:
    """`count` whole numbers from `low` to below `high`."""
    return tuple(int(number) for number in numbers.integers(low, high, count))


def chosen(numbers: np.random.Generator, *given: Any) -> Any:
    """One of several."""
    return given[numbers.integers(len(given))]


def anew(build: Callable[..., Any]) -> Callable[..., Any]:
    """The same; of a layer another one, with a name of its own: a model may have two of them."""
    if not isinstance(build, keras.layers.Layer):
        return build
    config = {name: option for name, option in build.get_config().items() if name != "name"}
    return type(build).from_config(config)


def one_of(*builds: Callable[..., Any], shape: tuple[int, ...] = (4, 5, 6)) -> Any:
    """Examples with one of several calls."""
    return lambda numbers: Example(anew(chosen(numbers, *builds)), (shape,))


def of_any_shape(*builds: Callable[..., Any]) -> Any:
    """Examples with one of several calls, of a random shape."""
    return with_options(*(lambda numbers, build=item: anew(build) for item in builds))


def with_options(*makes: Callable[[np.random.Generator], Callable[..., Any]]) -> Any:
    """The same of calls whose options are random too."""

    def example(numbers: np.random.Generator) -> Example:
        shape = sizes(numbers, 1, 7, numbers.integers(1, 5))
        return Example(chosen(numbers, *makes)(numbers), (shape,))

    return example
