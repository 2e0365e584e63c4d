"""Checks arguments before any work is done."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import numpy as np

from keras_qat.messages import suggest

Function = TypeVar("Function", bound=Callable[..., Any])


def answers_unknown(hint: str = "", /, **instead: str) -> Callable[[Function], Function]:
    """Decorates a function or a class so that arguments which do not fit get an answer.

    Args:
        hint: a sentence for arguments that are missing or too many.
        instead: argument that people try -> what to pass instead. Others are answered with the
            nearest argument of the function, or with all of them.
    """

    def decorate(function: Function) -> Function:
        if isinstance(function, type):
            setattr(function, "__init__", decorate(getattr(function, "__init__")))  # noqa: B009, B010
            return function
        signature = inspect.signature(function)
        parameters = signature.parameters

        @functools.wraps(function)
        def call(*values: Any, **named: Any) -> Any:
            try:
                signature.bind(*values, **named)
            except TypeError as error:
                is_class = function.__name__ == "__init__"
                is_method = "self" in parameters
                name = type(values[0]).__name__ if is_class else function.__qualname__
                for argument in named.keys() - parameters.keys():
                    answer = f": pass {instead[argument]}." if argument in instead else "."
                    near = "" if argument in instead else suggest(argument, parameters)
                    message = f"{name}() has no argument {argument!r}{answer}{near}"
                    raise TypeError(message) from None
                text = str(inspect.Signature(_without_types(parameters, is_method)))
                text = re.sub(r"<function (\w+) at \w+>", r"\1", text)
                message = f"{name}: {error}. Call it as {name}{text}. {hint}".strip()
                raise TypeError(message) from None
            return function(*values, **named)

        return cast(Function, call)

    return decorate


def _without_types(
    parameters: Mapping[str, inspect.Parameter], is_method: bool
) -> list[inspect.Parameter]:
    """Returns the parameters that callers give, as they are shown in a message."""
    shown = list(parameters.values())[int(is_method) :]
    return [parameter.replace(annotation=inspect.Parameter.empty) for parameter in shown]


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
