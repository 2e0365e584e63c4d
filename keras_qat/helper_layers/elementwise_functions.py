"""Helper layers for elementwise functions. All values and gradients are finite.

Quantization rounds small values to zero. The logarithm and the reciprocal of zero are infinite.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.helper_layers.operations import HelperLayer, SameShape
from keras_qat.keras2.backend import register


def _compute_power(x: tf.Tensor, exponent: Any) -> tf.Tensor:
    known = tf.get_static_value(exponent)
    if known is None or known == int(known):
        return tf.pow(x, exponent)
    if known < 0:
        return tf.pow(tf.maximum(x, 0.0), exponent)
    return _apply_to_positive(lambda positive: tf.pow(positive, exponent), x)


def _apply_to_positive(function: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor) -> tf.Tensor:
    """Apply `function` to positive values. Results and gradients of other values are 0."""
    results = function(tf.where(x > 0, x, tf.ones_like(x)))
    return tf.where(x > 0, results, tf.zeros_like(x))


FUNCTIONS: dict[str, Callable[..., tf.Tensor]] = {
    "add": tf.add,
    "subtract": tf.subtract,
    "multiply": tf.multiply,
    "divide": tf.divide,
    "pow": _compute_power,
    "maximum": tf.maximum,
    "minimum": tf.minimum,
    "clip_by_value": tf.clip_by_value,
    "negative": tf.negative,
    "abs": tf.abs,
    "sign": tf.sign,
    "square": tf.square,
    "sqrt": lambda x: _apply_to_positive(tf.sqrt, x),
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
    "relu": tf.nn.relu,
    "elu": tf.nn.elu,
    "selu": tf.nn.selu,
    "softsign": tf.nn.softsign,
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
"""Maps the kind of an operation to a function."""


def evaluate_formula(formula: Any, x: tf.Tensor) -> tf.Tensor:
    """Evaluates a formula: "x", a constant, or a list [function name, formula, ...]."""
    if isinstance(formula, (list, tuple)):
        name, *operands = formula
        kind = name.rpartition(".")[2]  # Older files contain "math.exp".
        return FUNCTIONS[kind](*(evaluate_formula(operand, x) for operand in operands))
    return x if formula == "x" else tf.cast(formula, x.dtype)


@register
class Formula(SameShape):
    """Computes a chain of elementwise operations on one tensor. Results are always finite.

    An infinite result, such as log(x * x) at 0, becomes the lowest or the largest finite result.
    Its gradient is 0.

    Args:
        formula: the formula for `evaluate_formula`, as JSON:
            `'["log", ["add", ["exp", "x"], 1.0]]'`.
    """

    options = ("formula",)

    def __init__(self, formula: str, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.formula = formula

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        steps = json.loads(self.formula)
        anywhere = tf.stop_gradient(evaluate_formula(steps, inputs))
        is_defined = tf.math.is_finite(anywhere)
        results = evaluate_formula(steps, tf.where(is_defined, inputs, tf.ones_like(inputs)))
        known = tf.stop_gradient(tf.where(is_defined, results, tf.zeros_like(results)))
        ends = tf.reduce_min(known), tf.reduce_max(known)
        return tf.where(is_defined, results, tf.where(anywhere < 0, *ends))


def _find_largest(results: tf.Tensor) -> tf.Tensor:
    return tf.reduce_max(tf.abs(results))


def _replace_undefined(
    is_defined: tf.Tensor,
    results: tf.Tensor,
    reduce: Callable[[tf.Tensor], tf.Tensor] = _find_largest,
    sign: float = 1.0,
) -> tf.Tensor:
    """Replace undefined results, such as log(0), by a number computed from the other results."""
    known = tf.where(is_defined, results, tf.zeros_like(results))
    return tf.where(is_defined, results, tf.stop_gradient(sign * reduce(known)))


@register
class Logarithm(SameShape):
    """Computes natural logarithms. Undefined results become the tensor's lowest defined result.

    Args:
        plus_one: True to compute log(1 + x).
    """

    options = ("plus_one",)

    def __init__(self, plus_one: bool = False, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.plus_one = plus_one

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        is_defined = inputs > (-1.0 if self.plus_one else 0.0)
        x = tf.where(is_defined, inputs, tf.ones_like(inputs))
        results = tf.math.log1p(x) if self.plus_one else tf.math.log(x)
        return _replace_undefined(is_defined, results, tf.reduce_min)


@register
class Power(SameShape):
    """Computes x ** exponent with finite values and gradients.

    If the exponent is negative, undefined powers, such as 0 ** -1, become the largest magnitude of
    the defined powers. Otherwise, undefined powers, such as (-1) ** 0.5, become 0.
    """

    options = ("exponent",)

    def __init__(self, exponent: float, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.exponent = exponent

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        is_integer = self.exponent == int(self.exponent)
        is_defined = tf.not_equal(inputs, 0) if is_integer else inputs > 0
        powers = tf.pow(tf.where(is_defined, inputs, tf.ones_like(inputs)), self.exponent)
        if self.exponent < 0:
            return _replace_undefined(is_defined, powers)
        return tf.where(is_defined, powers, tf.zeros_like(powers))


@register
class Reciprocal(SameShape):
    """Computes `numerator / x`. At x = 0, the result has the largest magnitude of all results."""

    options = ("numerator",)

    def __init__(self, numerator: float = 1.0, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.numerator = numerator

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        is_defined = tf.not_equal(inputs, 0)
        quotients = self.numerator / tf.where(is_defined, inputs, tf.ones_like(inputs))
        return _replace_undefined(is_defined, quotients, sign=-1.0 if self.numerator < 0 else 1.0)


@register
class SquareRoot(SameShape):
    """Computes square roots with finite gradients. The result is 0 if the input is not positive.

    Args:
        inverse: True to compute 1 / sqrt(x). If x is not positive, the result is the largest
            defined result.
    """

    options = ("inverse",)

    def __init__(self, inverse: bool = False, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.inverse = inverse

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        is_positive = inputs > 0
        positive = tf.where(is_positive, inputs, tf.ones_like(inputs))
        if self.inverse:
            return _replace_undefined(is_positive, tf.math.rsqrt(positive))
        return tf.where(is_positive, tf.sqrt(positive), tf.zeros_like(inputs))


@register
class Quotient(HelperLayer):
    """Divides two tensors. A division by 0 returns the largest magnitude of all quotients."""

    def call(self, inputs: Any) -> tf.Tensor:
        x, y = inputs
        is_defined = tf.not_equal(y, 0)
        quotients = x / tf.where(is_defined, y, tf.ones_like(y))
        return _replace_undefined(tf.broadcast_to(is_defined, tf.shape(quotients)), quotients)

    def compute_output_shape(self, input_shape: Any) -> tf.TensorShape:
        return tf.broadcast_static_shape(*map(tf.TensorShape, input_shape))


@register
class SoftmaxOfMany(SameShape):
    """Softmax over many values. TFLite files compute it with 16 bits.

    For 1,000 values, the mean result is 0.001. With 8 bits, it would be rounded to 0.
    """

    options = ("axis",)

    def __init__(self, axis: int = -1, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.axis = axis

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return tf.nn.softmax(inputs, self.axis)
