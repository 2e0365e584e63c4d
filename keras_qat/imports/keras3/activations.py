"""Activation functions of Keras 3 that Keras 2 lacks or defines differently."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_qat.keras2.backend import keras, register


@register
def relu6(x: Any) -> Any:
    """Clips `x` to 0..6."""
    return tf.nn.relu6(x)


@register
def leaky_relu(x: Any) -> Any:
    """Multiplies negative values by 0.2."""
    return tf.nn.leaky_relu(x, 0.2)


@register
def hard_sigmoid(x: Any) -> Any:
    """Computes relu6(x + 3) / 6. Keras 2's function of this name clips 0.2 x + 0.5."""
    return tf.nn.relu6(x + 3.0) * (1.0 / 6.0)


@register
def hard_silu(x: Any) -> Any:
    """Computes x * hard_sigmoid(x), also called hard swish."""
    return x * hard_sigmoid(x)


@register
def hard_tanh(x: Any) -> Any:
    """Clips `x` to -1..1."""
    return tf.clip_by_value(x, -1.0, 1.0)


@register
def log_sigmoid(x: Any) -> Any:
    """Computes log(sigmoid(x))."""
    return tf.math.log_sigmoid(x)


@register
def log_softmax(x: Any) -> Any:
    """Computes log(softmax(x)) along the last axis."""
    return tf.nn.log_softmax(x)


@register
def celu(x: Any) -> Any:
    """Computes exp(x) - 1 for negative values, and returns others as they are."""
    return tf.nn.elu(x)


@register
def glu(x: Any) -> Any:
    """Multiplies one half of the channels by the sigmoid of the other."""
    values, gates = tf.split(x, 2, axis=-1)
    return values * tf.sigmoid(gates)


@register
def squareplus(x: Any) -> Any:
    """Computes (x + sqrt(x^2 + 4)) / 2."""
    return (x + tf.sqrt(tf.square(x) + 4.0)) / 2.0


@register
def soft_shrink(x: Any) -> Any:
    """Moves `x` towards 0 by 0.5."""
    return tf.sign(x) * tf.nn.relu(tf.abs(x) - 0.5)


@register
def hard_shrink(x: Any) -> Any:
    """Sets values within 0.5 of 0 to 0."""
    return tf.where(tf.abs(x) > 0.5, x, tf.zeros_like(x))


@register
def tanh_shrink(x: Any) -> Any:
    """Computes x - tanh(x)."""
    return x - tf.tanh(x)


_DEFINED_HERE: list[Any] = [celu, glu, hard_shrink, hard_sigmoid, hard_silu, hard_tanh, leaky_relu]
_DEFINED_HERE += [log_sigmoid, log_softmax, relu6, soft_shrink, squareplus, tanh_shrink]
_SAME = ["elu", "exponential", "gelu", "linear", "mish", "relu", "selu", "sigmoid", "softmax"]
_SAME += ["softplus", "softsign", "tanh"]

ACTIVATIONS: dict[str, Any] = {
    **{name: getattr(keras.activations, name) for name in _SAME},
    **{function.__name__: function for function in _DEFINED_HERE},
    "silu": keras.activations.swish,
}
"""Name of a function in Keras 3's `keras.activations` -> the function for Keras 2."""


def to_keras_2(activation: Any, keras_3: Any) -> Any:
    """Returns the Keras 2 function for an activation function of Keras 3; None if there is none.

    Args:
        activation: the function. A user's own function works as it is.
        keras_3: the module `keras` of Keras 3.
    """
    name = getattr(activation, "__name__", "")
    if getattr(keras_3.activations, name, None) is activation:
        return ACTIVATIONS.get(name)
    return activation
