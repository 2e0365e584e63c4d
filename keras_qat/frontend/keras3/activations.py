"""Activation functions of Keras 3 that Keras 2 does not have, or defines otherwise."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_qat.frontend.keras2.backend import keras, register

__all__ = ["hard_sigmoid", "hard_silu", "leaky_relu", "relu6", "to_keras_2"]


@register
def relu6(x: Any) -> Any:
    """min(max(x, 0), 6)."""
    return tf.nn.relu6(x)


@register
def leaky_relu(x: Any) -> Any:
    """`x`, times 0.2 where it is negative."""
    return tf.nn.leaky_relu(x, 0.2)


@register
def hard_sigmoid(x: Any) -> Any:
    """relu6(x + 3) / 6. That of Keras 2 is 0.2 x + 0.5, clipped."""
    return tf.nn.relu6(x + 3.0) * (1.0 / 6.0)


@register
def hard_silu(x: Any) -> Any:
    """x * hard_sigmoid(x), which is also called hard swish."""
    return x * hard_sigmoid(x)


@register
def hard_tanh(x: Any) -> Any:
    """`x`, clipped to -1..1."""
    return tf.clip_by_value(x, -1.0, 1.0)


@register
def log_sigmoid(x: Any) -> Any:
    """log(sigmoid(x))."""
    return tf.math.log_sigmoid(x)


@register
def log_softmax(x: Any) -> Any:
    """log(softmax(x)) along the last axis."""
    return tf.nn.log_softmax(x)


@register
def celu(x: Any) -> Any:
    """`x` where it is positive, exp(x) - 1 elsewhere."""
    return tf.nn.elu(x)


@register
def glu(x: Any) -> Any:
    """One half of the channels times the sigmoid of the other."""
    values, gates = tf.split(x, 2, axis=-1)
    return values * tf.sigmoid(gates)


@register
def squareplus(x: Any) -> Any:
    """(x + sqrt(x^2 + 4)) / 2."""
    return (x + tf.sqrt(tf.square(x) + 4.0)) / 2.0


@register
def soft_shrink(x: Any) -> Any:
    """`x` brought closer to 0 by 0.5."""
    return tf.sign(x) * tf.nn.relu(tf.abs(x) - 0.5)


@register
def hard_shrink(x: Any) -> Any:
    """`x` where it is further than 0.5 from 0, else 0."""
    return tf.where(tf.abs(x) > 0.5, x, tf.zeros_like(x))


@register
def tanh_shrink(x: Any) -> Any:
    """`x` - tanh(x)."""
    return x - tf.tanh(x)


_OURS: list[Any] = [celu, glu, hard_shrink, hard_sigmoid, hard_silu, hard_tanh, leaky_relu]
_OURS += [log_sigmoid, log_softmax, relu6, soft_shrink, squareplus, tanh_shrink]
_SAME = ["elu", "exponential", "gelu", "linear", "mish", "relu", "selu", "sigmoid", "softmax"]
_SAME += ["softplus", "softsign", "tanh"]

ACTIVATIONS: dict[str, Any] = {
    **{name: getattr(keras.activations, name) for name in _SAME},
    **{function.__name__: function for function in _OURS},
    "silu": keras.activations.swish,
}
"""Keras 3's name of a function in `keras.activations` -> the function for Keras 2."""


def to_keras_2(activation: Any, theirs: Any) -> Any:
    """The function for Keras 2 that computes what one of Keras 3 does; None if there is none.

    Args:
        activation: the function. One of the user's computes with TensorFlow, as it stands.
        theirs: the module `keras`.
    """
    name = getattr(activation, "__name__", "")
    if getattr(theirs.activations, name, None) is activation:
        return ACTIVATIONS.get(name)
    return activation
