"""Helper layers for functions that are not defined everywhere: they train with finite numbers.

Quantization makes zeros of small numbers, whose logarithms, inverses and slopes are infinite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_qat.helper_layers.operations import SameShape
from keras_qat.keras2.backend import keras, register


def _largest(results: Any) -> Any:
    return tf.reduce_max(tf.abs(results))


def _finite(
    is_defined: Any, results: Any, rest: Callable[[Any], Any] = _largest, sign: float = 1.0
) -> Any:
    """Replaces what is not defined by a number made of the other results, without a gradient."""
    known = tf.where(is_defined, results, tf.zeros_like(results))
    return tf.where(is_defined, results, tf.stop_gradient(sign * rest(known)))


@register
class Logarithm(SameShape):
    """Computes natural logarithms; the lowest of the others where there is none.

    Args:
        plus_one: whether to compute log(1 + x).
    """

    def __init__(self, plus_one: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.plus_one = plus_one

    def call(self, inputs: Any) -> Any:
        is_defined = inputs > (-1.0 if self.plus_one else 0.0)
        x = tf.where(is_defined, inputs, tf.ones_like(inputs))
        results = tf.math.log1p(x) if self.plus_one else tf.math.log(x)
        return _finite(is_defined, results, tf.reduce_min)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "plus_one": self.plus_one}


@register
class Power(SameShape):
    """Computes x ** exponent with finite values and slopes.

    Where the power or its slope is no real number, it is 0 for a positive exponent, and the largest
    of the others for a negative one.

    Args:
        exponent: any number.
    """

    def __init__(self, exponent: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.exponent = exponent

    def call(self, inputs: Any) -> Any:
        is_whole = self.exponent == int(self.exponent)
        is_defined = tf.not_equal(inputs, 0) if is_whole else inputs > 0
        powers = tf.pow(tf.where(is_defined, inputs, tf.ones_like(inputs)), self.exponent)
        if self.exponent < 0:
            return _finite(is_defined, powers)
        return tf.where(is_defined, powers, tf.zeros_like(powers))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "exponent": self.exponent}


@register
class Reciprocal(SameShape):
    """Divides a number by a tensor; a quotient by zero is the largest of the others.

    Args:
        numerator: the number.
    """

    def __init__(self, numerator: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.numerator = numerator

    def call(self, inputs: Any) -> Any:
        is_defined = tf.not_equal(inputs, 0)
        quotients = self.numerator / tf.where(is_defined, inputs, tf.ones_like(inputs))
        return _finite(is_defined, quotients, sign=-1.0 if self.numerator < 0 else 1.0)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "numerator": self.numerator}


@register
class SquareRoot(SameShape):
    """Computes square roots, 0 of what is not positive, with finite slopes.

    Args:
        inverse: whether to compute 1 / sqrt(x), of what is not positive the largest of the others.
    """

    def __init__(self, inverse: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.inverse = inverse

    def call(self, inputs: Any) -> Any:
        is_positive = inputs > 0
        positive = tf.where(is_positive, inputs, tf.ones_like(inputs))
        if self.inverse:
            return _finite(is_positive, tf.math.rsqrt(positive))
        return tf.where(is_positive, tf.sqrt(positive), tf.zeros_like(inputs))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "inverse": self.inverse}


@register
class Quotient(keras.layers.Layer):
    """Divides two tensors; a quotient by zero is the largest of the others."""

    def call(self, inputs: Any) -> Any:
        x, y = inputs
        is_defined = tf.not_equal(y, 0)
        quotients = x / tf.where(is_defined, y, tf.ones_like(y))
        return _finite(tf.broadcast_to(is_defined, tf.shape(quotients)), quotients)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return tf.broadcast_static_shape(*map(tf.TensorShape, input_shape))


@register
class SoftmaxOfMany(keras.layers.Layer):
    """Softmax along one axis of so many numbers that most results are a few steps of 1/256 or less.

    Args:
        axis: the axis.
    """

    def __init__(self, axis: int = -1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.axis = axis

    def call(self, inputs: Any) -> Any:
        return tf.nn.softmax(inputs, self.axis)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return tf.TensorShape(input_shape)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "axis": self.axis}
