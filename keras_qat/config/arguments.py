"""Checks users' arguments, and suggests replacements for unknown ones."""

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
    """Returns a decorator that improves the error of a function or class for unknown arguments.

    Args:
        hint: a sentence for missing or excess arguments.
        instead: argument that users may try -> what to pass instead. For other unknown arguments,
            the error suggests the nearest argument of the function, or lists all arguments.
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
                text = str(inspect.Signature(_remove_types(parameters, is_method)))
                text = re.sub(r"<function (\w+) at \w+>", r"\1", text)
                message = f"{name}: {error}. Call it as {name}{text}. {hint}".strip()
                raise TypeError(message) from None
            return function(*values, **named)

        return cast(Function, call)

    return decorate


def _remove_types(
    parameters: Mapping[str, inspect.Parameter], is_method: bool
) -> list[inspect.Parameter]:
    """Return the parameters without types and without `self`, for a message."""
    shown = list(parameters.values())[int(is_method) :]
    return [parameter.replace(annotation=inspect.Parameter.empty) for parameter in shown]


def read_input_range(input_range: Any) -> tuple[float, float] | None:
    """Returns the minimum and maximum of inputs, widened to include zero.

    Raises:
        ValueError: if `input_range` is not a finite minimum and maximum.
    """
    if input_range is None:
        return None
    ends = np.asarray(input_range)
    is_range = ends.shape == (2,) and ends.dtype.kind in "iuf" and np.isfinite(ends).all()
    if not is_range or not ends[0] < ends[1]:
        raise ValueError(
            f"input_range={input_range!r}: pass the minimum and the maximum of the inputs, for "
            f"example (0.0, 1.0)."
        )
    return min(float(ends[0]), 0.0), max(float(ends[1]), 0.0)


def switch(name: str, value: object) -> bool:
    """Returns an argument of a user that must be a bool.

    Raises:
        TypeError: if it is not a bool, such as the string "off", which Python treats as True.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r}: pass True or False.")
    return bool(value)


COUNTERPARTS = {
    "quantize_annotate_layer": "quantize_model(model, scope=['conv_1', 'head*'])",
    "quantize_annotate_model": "quantize_model(model)",
    "quantize_apply": "quantize_model(model)",
    "quantize_scope": "keras.models.load_model(path): all classes are registered with Keras",
    "QuantizeConfig": "recipes.int8().override(layer, weight_bits=4), or register_op",
    "QuantizeWrapper": "layers.QuantizeWrapper",
    "QuantizeLayer": "layers.Quantize",
    "prune_low_magnitude": "it of tfmot, then quantize_model(model, "
    "recipes.int8().preserve('zeros'))",
    "cluster_weights": "it of tfmot, then quantize_model(model, "
    "recipes.int8().preserve('clusters'))",
    "create_training_graph": "quantize_model(model, recipe='contrib'), and callbacks.QuantDelay",
    "create_eval_graph": "evaluate and predict of the quantized model",
    "experimental_create_training_graph": "quantize_model(model, recipes.contrib(weight_bits=4))",
    "experimental_create_eval_graph": "evaluate and predict of the quantized model",
    "convert": "export_tflite(qat, path)",
    "load_model": "keras.models.load_model(path), with keras_qat imported",
    "quantize": "quantize_model(model)",
    "register_rule": "register_op(MyDense, 'dense', weights={'kernel': (-1,)}), or nothing, "
    "because custom layers are traced",
}
"""Public names of tfmot, `tf.contrib.quantize` and earlier releases, and names that users may try.
The values are the calls to use instead."""

ARGUMENTS = {
    "bits": "recipe=keras_qat.recipes.low_bits(4, 4)",
    "num_bits": "recipe=keras_qat.recipes.low_bits(4, 4)",
    "weight_bits": "recipe=keras_qat.recipes.int8(weight_bits=4)",
    "activation_bits": "recipe=keras_qat.recipes.int8(activation_bits=4)",
    "per_channel": "recipe=keras_qat.recipes.int8(per_channel=False)",
    "quant_delay": "callbacks=[keras_qat.callbacks.QuantDelay(steps)] to fit",
    "freeze_bn_delay": "callbacks=[keras_qat.callbacks.FreezeBatchNorm(steps)] to fit",
    "layers": "scope=['conv_1', 'head*']",
    "quantize_config": "recipe=keras_qat.recipes.int8().override(layer, weight_bits=4)",
    "dtype": "recipe=keras_qat.recipes.int8(), int16x8(), int4_weights() or another",
    "scheme": "recipe=keras_qat.recipes.int8()",
}
"""Arguments of `quantize_model` in other libraries -> the argument to pass instead."""
