"""Checks arguments before any work is done."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np

from keras_qat.frontend.messages import suggestion

Function = TypeVar("Function", bound=Callable[..., Any])


def answers_unknown(**instead: str) -> Callable[[Function], Function]:
    """Decorates a function so that arguments which it does not have get an answer.

    Args:
        instead: argument that people try -> what to pass instead. Others are answered with the
            nearest argument of the function.
    """

    def decorate(function: Function) -> Function:
        parameters = inspect.signature(function).parameters

        @functools.wraps(function)
        def call(*values: Any, **named: Any) -> Any:
            for argument in named.keys() - parameters.keys():
                answer = f": pass {instead[argument]}." if argument in instead else "."
                near = "" if argument in instead else suggestion(argument, parameters)
                is_class = function.__name__ == "__init__"
                name = type(values[0]).__name__ if is_class else function.__qualname__
                raise TypeError(f"{name}() has no argument {argument!r}{answer}{near}")
            return function(*values, **named)

        return cast(Function, call)

    return decorate


def range_of(input_range: Any) -> tuple[float, float] | None:
    """Returns the minimum and maximum of inputs, widened to include zero as quantization needs.

    Raises:
        ValueError: if `input_range` is not a finite minimum and maximum.
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


def switch(name: str, value: Any) -> bool:
    """Returns a bool argument.

    Raises:
        TypeError: if it is not a bool. Otherwise "off" would count as True.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r}: give True or False.")
    return bool(value)
