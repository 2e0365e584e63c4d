"""Functions written with several operations, which become one layer."""

import numpy as np
import tensorflow as tf

from tests.helpers import images, keras, layers
from tests.networks.forms.form import Form, forms

SHAPE = (4, 6)


def shifted(x, axis=-1):
    return tf.exp(x - tf.reduce_max(x, axis, keepdims=True))


def total(e, axis=-1):
    return tf.reduce_sum(e, axis, keepdims=True)


def shares(e, axis=-1):
    return e / total(e, axis)


def of_backend(x):
    """Computes attention like keras-self-attention."""
    backend = keras.backend
    e = backend.exp(x - backend.max(x, axis=-1, keepdims=True))
    return e / (backend.sum(e, axis=-1, keepdims=True) + backend.epsilon())


ONE = {
    "the largest subtracted": lambda x: shares(shifted(x)),
    "nothing subtracted": lambda x: shares(tf.exp(x)),
    "computed twice": lambda x: tf.exp(x) / total(tf.exp(x)),
    "along another axis": lambda x: shares(shifted(x, 1), 1),
    "a number added": of_backend,
    "a number added to": lambda x: shifted(x) / (1e-9 + total(shifted(x))),
    "at least a number": lambda x: shifted(x) / tf.maximum(total(shifted(x)), 1e-9),
    "axes added": lambda x: shifted(x) / tf.expand_dims(tf.reduce_sum(shifted(x), 2), 2),
    "axes added by a slice": lambda x: shifted(x) / tf.reduce_sum(shifted(x), -1)[..., None],
    "no gradient": lambda x: shares(tf.exp(x - tf.stop_gradient(tf.reduce_max(x, 2, True)))),
}
SOFTMAX = forms(ONE, 6 * images(16, SHAPE))
backend, log = keras.backend, tf.math.log


def tanh(x):
    return (tf.exp(x) - tf.exp(-x)) / (tf.exp(x) + tf.exp(-x))


def value_transform(x):
    """Inverts the transform of MuZero's values."""
    roots = tf.sqrt(1 + 0.004 * (tf.abs(x) + 1.001)) - 1
    return tf.sign(x) * (tf.square(roots / 0.002) - 1)


FUNCTIONS = {
    "GELU": lambda x: 0.5 * x * (1.0 + tf.tanh(0.79788 * (x + 0.044715 * x * x * x))),
    "softplus": lambda x: log(1.0 + tf.exp(x)),
    "softplus of log1p": lambda x: tf.math.log1p(tf.exp(x)),
    "mish": lambda x: x * tf.tanh(backend.log(1 + backend.exp(x))),
    "sigmoid": lambda x: 1.0 / (1.0 + tf.exp(-x)),
    "sigmoid, multiplied": lambda x: tf.math.reciprocal(tf.exp(x * -2.0) + 1.0) * 3.0 - 1.0,
    "swish": lambda x: x / (1.0 + tf.exp(-x)),
    "tanh": tanh,
    "log of the sigmoid": lambda x: log(tf.sigmoid(x) + 1e-7),
    "log of squares": lambda x: log(tf.square(x) + 1e-2),
    "log of products": lambda x: log(x * x + 1e-2),
    "Charbonnier": lambda x: tf.sqrt(x**2 + 1e-6),
    "a root of powers": lambda x: tf.pow(1.0 + tf.pow(x, 2), -0.5),
    "log cosh": lambda x: log(tf.cosh(x)),
    "ELU": lambda x: tf.where(x > 0.0, x, tf.exp(x) - 1.0),
    "ELU of a minimum": lambda x: tf.maximum(x, 0.0) + tf.minimum(0.0, 2.0 * (tf.exp(x) - 1.0)),
    "a clipped power": lambda x: tf.clip_by_value(tf.exp(x), 1e-3, 2.0),
    "limits in another order": lambda x: tf.clip_by_value(
        tf.exp(x), clip_value_max=2.0, clip_value_min=1e-3
    ),
    "a choice in another order": lambda x: tf.where(x > 0.0, y=tf.exp(x) - 1.0, x=x),
    "a quotient": lambda x: tf.sin(x) / (1.0 + tf.abs(x)),
    "signs and powers": value_transform,
    "a root of shares": lambda x: tf.sqrt(tf.sigmoid(2.0 * x) + 1e-6),
    "an arc": lambda x: tf.atan(tf.exp(x)),
    "Gauss": lambda x: tf.exp(-0.5 * tf.square(x - 0.5)),
}
OF_SHARES = {
    "alone": lambda x: log(tf.nn.softmax(x)),
    "of a layer, along another axis": lambda x: log(layers.Softmax(1)(x)),
    "a number added": lambda x: log(tf.nn.softmax(x) + 1e-8),
    "clipped": lambda x: backend.log(backend.clip(backend.softmax(x), 1e-7, 1 - 1e-7)),
    "a root": lambda x: tf.pow(tf.nn.softmax(x), 0.2),
    "exponentials added up": lambda x: log(tf.reduce_sum(tf.exp(x), 1)),
    "kept axes": lambda x: x - log(tf.reduce_sum(tf.exp(x), -1, keepdims=True)),
}
FORMULAS = {
    **forms(FUNCTIONS, 6 * images(16, SHAPE) - 3.0, sqnr={"": 30, "a quotient": 25}),
    **forms({f"of shares, {name}": f for name, f in OF_SHARES.items()}, 6 * images(16, SHAPE)),
    **forms(
        {
            f"behind {name}": lambda x, name=name: log(layers.Dense(5, name)(x) + 1e-7)
            for name in ("softmax", "sigmoid")
        },
        6 * images(16, SHAPE),
    ),
}


class HardSwish(layers.Layer):
    def call(self, x):
        return x * tf.nn.relu6(x + 3.0) / 6.0


class Softmax(layers.Layer):
    def call(self, x):
        shares = tf.exp(x - tf.reduce_max(x, axis=-1, keepdims=True))
        return shares / tf.reduce_sum(shares, axis=-1, keepdims=True)


class Causal(layers.Layer):
    def call(self, x):
        steps = x.shape[1]
        return tf.nn.softmax(x + (1 - np.tri(steps, 4, dtype=np.float32)) * -1e9)


def called_thrice(kind, steps):
    def build(inputs):
        shared, hidden = kind(), inputs
        for index, count in enumerate(steps):
            hidden = layers.Dense(4)(hidden)[:, :count]
            hidden = shared(hidden)
            hidden = layers.Concatenate(1)([hidden, inputs]) if index else hidden
        return hidden

    return build


SHARED_PATTERNS = {
    f"{kind.__name__} of {steps}": Form(called_thrice(kind, steps), (images(8, (4, 4)),), sqnr=38)
    for kind in (HardSwish, Softmax, Causal)
    for steps in ((4, 4, 4), (4, 2, 4))
}
FORMS = {"softmax": SOFTMAX, "formulas": FORMULAS, "shared patterns": SHARED_PATTERNS}
