"""Functions of one number that code computes with several operations, in one layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.helper_layers.operations import SameShape
from keras_qat.keras2.backend import register


def _root(x: Any) -> Any:
    return _of_positive(tf.sqrt, x)


def _power(x: Any, exponent: Any) -> Any:
    known = tf.get_static_value(exponent)
    if known is None or known == int(known):
        return tf.pow(x, exponent)
    if known < 0:
        return tf.pow(tf.maximum(x, 0.0), exponent)
    return _of_positive(lambda positive: tf.pow(positive, exponent), x)


def _of_positive(function: Callable[[Any], Any], x: Any) -> Any:
    """Computes a function of positive numbers; 0 of others, where it would have no slope."""
    results = function(tf.where(x > 0, x, tf.ones_like(x)))
    return tf.where(x > 0, results, tf.zeros_like(x))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": tf.add,
    "subtract": tf.subtract,
    "multiply": tf.multiply,
    "divide": tf.divide,
    "pow": _power,
    "maximum": tf.maximum,
    "minimum": tf.minimum,
    "clip_by_value": tf.clip_by_value,
    "negative": tf.negative,
    "abs": tf.abs,
    "sign": tf.sign,
    "relu": tf.nn.relu,
    "elu": tf.nn.elu,
    "selu": tf.nn.selu,
    "softsign": tf.nn.softsign,
    "square": tf.square,
    "sqrt": _root,
    "rsqrt": lambda x: tf.math.rsqrt(tf.maximum(x, 0.0)),
    "reciprocal": tf.math.reciprocal,
    "exp": tf.exp,
    "expm1": tf.math.expm1,
    "log": lambda x: tf.math.log(tf.maximum(x, 0.0)),
    "log1p": lambda x: tf.math.log1p(tf.maximum(x, -1.0)),
    "cosh": tf.cosh,
    "sinh": tf.sinh,
    "tanh": tf.tanh,
    "sigmoid": tf.sigmoid,
    "softplus": tf.math.softplus,
    "erf": tf.math.erf,
    "sin": tf.sin,
    "cos": tf.cos,
    "tan": tf.tan,
    "atan": tf.atan,
    "asinh": tf.asinh,
    "where": tf.where,
    "greater": tf.greater,
    "greater_equal": tf.greater_equal,
    "less": tf.less,
    "less_equal": tf.less_equal,
}
"""Kind of an operation -> the function that computes it."""


def evaluate_formula(formula: Any, x: Any) -> Any:
    """Computes a formula of `x`: "x", a number, or [name of a function, operand, ...]."""
    if isinstance(formula, (list, tuple)):
        name, *operands = formula
        kind = name.rpartition(".")[2]  # Older files say "math.exp".
        return FUNCTIONS[kind](*(evaluate_formula(operand, x) for operand in operands))
    return x if formula == "x" else tf.cast(formula, x.dtype)


@register
class Formula(SameShape):
    """Computes a function of each number, with finite values.

    Where there is none, as of log(x * x) at 0, it is the lowest or the largest of the others,
    without a gradient.

    Args:
        formula: what `evaluate_formula` takes, as JSON: `'["log", ["add", ["exp", "x"], 1.0]]'`.
    """

    def __init__(self, formula: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.formula = formula

    def call(self, inputs: Any) -> Any:
        steps = json.loads(self.formula)
        anywhere = tf.stop_gradient(evaluate_formula(steps, inputs))
        is_defined = tf.math.is_finite(anywhere)
        results = evaluate_formula(steps, tf.where(is_defined, inputs, tf.ones_like(inputs)))
        known = tf.stop_gradient(tf.where(is_defined, results, tf.zeros_like(results)))
        ends = tf.reduce_min(known), tf.reduce_max(known)
        return tf.where(is_defined, results, tf.where(anywhere < 0, *ends))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "formula": self.formula}
