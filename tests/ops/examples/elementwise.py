"""Examples of operators on one value, on two values, and along the last axis."""

import functools

import numpy as np
import tensorflow as tf

import keras_qat
from keras_qat.helper_layers.elementwise_functions import Formula, SoftmaxOfMany
from keras_qat.helper_layers.operations import HardSwish, MaskScores
from keras_qat.keras2.backend import keras
from tests.ops.examples.example import Example, chosen, of_any_shape, sizes, with_options

_layers = keras.layers


def _power(x, exponent):
    return tf.pow(x, exponent)


def _quotient(x, numerator):
    return numerator / x


def _of_two(layer, function, axes=4):
    """Two tensors, sometimes of different shapes; one tensor twice; or a tensor and a constant."""

    def example(numbers):
        shape = sizes(numbers, 1, 7, numbers.integers(1, axes + 1))
        other = tuple(1 if numbers.random() < 0.5 else size for size in shape)
        kind = numbers.choice(["layer", "broadcast", "itself", "number", "array", "in front"])
        if layer is None and kind == "layer":
            kind = "broadcast"
        if kind == "layer":
            return Example(lambda x, y: layer()([x, y]), (shape, shape))
        if kind == "broadcast":
            shapes = (shape, other) if numbers.random() < 0.5 else (other, shape)
            return Example(lambda x, y: function(x, y), shapes)
        if kind == "itself":
            return Example(lambda x: function(x, x), (shape,))
        number = float(numbers.normal() * 10.0 ** numbers.uniform(-2, 1))
        if kind == "number":
            return Example(lambda x: function(x, number), (shape,))
        constant = np.float32(numbers.normal(size=chosen(numbers, shape, other, shape[-1:])))
        if kind == "array":
            return Example(lambda x: function(x, constant), (shape,))
        given = constant if numbers.random() < 0.5 else number
        return Example(lambda x: function(given, x), (shape,))

    return example


def _activation(function):
    return lambda x: _layers.Activation(function)(x)


def _softmax(numbers):
    shape = sizes(numbers, 1, 20, numbers.integers(1, 4))
    axis = -1 if numbers.random() < 0.5 else int(numbers.integers(1, len(shape) + 1))
    build = chosen(
        numbers,
        _layers.Softmax(axis),
        _layers.Activation("softmax"),
        lambda x: tf.nn.softmax(x, axis),
        lambda x: keras.activations.softmax(x, axis=axis),
    )
    return Example(build, (shape,))


def _softmax_of_many(numbers):
    """Exponentials of 600 nearly equal values add up to more than 512."""
    shape = int(numbers.integers(1, 4)), int(numbers.choice([7, 300, 600]))
    return Example(SoftmaxOfMany(int(numbers.choice([-1, 1, 2]))), (shape,))


def _mask_scores(numbers):
    queries, keys, heads = sizes(numbers, 1, 9, 3)
    shape = chosen(numbers, (queries, keys), (heads, queries, keys))
    masks = [(queries, keys), (1, keys), (queries, 1), shape][: numbers.integers(3)]
    fixed = [(queries, keys), numbers.random(shape) < 0.7, numbers.random((1, keys)) < 0.7]
    causal = None if masks and numbers.random() < 0.4 else fixed[numbers.integers(3)]
    hidden, above = map(bool, numbers.integers(2, size=2))
    layer = MaskScores(causal, hidden=hidden, above=above)
    dtypes = [str(numbers.choice(["bool", "int32", "int64"])) for _ in masks]
    return Example(lambda *x: layer([*x]), (shape, *masks), ("float32", *dtypes))


@keras.utils.register_keras_serializable("tests")
class LayerNorm(_layers.LayerNormalization):
    """A LayerNormalization that computes in 16 bits."""


keras_qat.register_op(
    LayerNorm,
    "layer_norm",
    attributes=lambda layer: {"epsilon": layer.epsilon, "axes": np.size(layer.axis)},
)


@keras.utils.register_keras_serializable("tests")
class GroupNorm(_layers.GroupNormalization):
    """A GroupNormalization that computes in 16 bits."""


keras_qat.register_op(
    GroupNorm,
    "group_norm",
    attributes=lambda layer: {"epsilon": layer.epsilon, "groups": layer.groups},
)


def _norm_options(numbers):
    noise = keras.initializers.RandomNormal(stddev=10.0 ** numbers.uniform(-2, 1), seed=1)
    options = {"epsilon": 10.0 ** numbers.uniform(-8, 0), "center": numbers.random() < 0.7}
    options.update(scale=numbers.random() < 0.7, beta_initializer=noise, gamma_initializer=noise)
    return options


def _layer_norm(numbers):
    shape = sizes(numbers, 1, 20, numbers.integers(1, 5))
    options = _norm_options(numbers)
    if len(shape) > 1 and numbers.random() < 0.3:
        shape = sizes(numbers, 1, 7, len(shape))
        options["axis"] = list(range(-int(numbers.integers(2, len(shape) + 1)), 0))
    return Example(LayerNorm(**options), (shape,))


def _group_norm(numbers):
    groups = int(numbers.integers(1, 5))
    shape = sizes(numbers, 1, 7, numbers.integers(0, 4))
    shape = (*shape, groups * int(numbers.integers(1, 7)))
    return Example(GroupNorm(groups, **_norm_options(numbers)), (shape,))


def _unit_norm(numbers):
    shape = sizes(numbers, 1, 20, numbers.integers(1, 4))
    build = chosen(
        numbers,
        _layers.UnitNormalization(),
        _layers.UnitNormalization(axis=len(shape)),
        lambda x: tf.math.l2_normalize(x, -1),
        lambda x: tf.nn.l2_normalize(x, axis=[len(shape)], epsilon=1e-9),
    )
    return Example(build, (shape,))


def _choice(numbers):
    shape = sizes(numbers, 1, 7, numbers.integers(1, 4))
    mask = chosen(numbers, shape, tuple(1 if numbers.random() < 0.5 else n for n in shape))
    number = float(numbers.normal() * 10.0 ** numbers.uniform(-2, 1))
    constant = np.float32(numbers.normal(size=shape[-1:]))
    return chosen(
        numbers,
        Example(tf.where, (mask, shape, shape), ("bool", "float32", "float32")),
        Example(lambda m, x: tf.where(m, x, number), (mask, shape), ("bool", "float32")),
        Example(lambda m, x: tf.where(m, constant, x), (mask, shape), ("bool", "float32")),
    )


def _from_integers(numbers):
    shape, dtype = sizes(numbers, 1, 7, numbers.integers(1, 5)), chosen(numbers, *_INTEGERS)
    return Example(lambda x: tf.cast(x, tf.float32), (shape,), (dtype,))


def _one_hot(numbers):
    shape, dtype = sizes(numbers, 1, 7, numbers.integers(1, 4)), chosen(numbers, *_INTEGERS[1:3])
    options = chosen(numbers, {}, {"axis": 1}, {"on_value": 2.5, "off_value": -1.0})
    return Example(lambda x: tf.one_hot(x, 2, **options), (shape,), (dtype,))


_INTEGERS = ("bool", "int32", "int64", "uint8", "int8", "int16")

EXAMPLES = {
    "add": _of_two(_layers.Add, tf.add),
    "subtract": _of_two(_layers.Subtract, tf.subtract),
    "multiply": _of_two(_layers.Multiply, tf.multiply),
    "maximum": _of_two(_layers.Maximum, tf.maximum),
    "minimum": _of_two(_layers.Minimum, tf.minimum),
    "relu": with_options(
        lambda numbers: _layers.ReLU(),
        lambda numbers: _layers.ReLU(6),
        lambda numbers: _layers.ReLU(float(numbers.uniform(0.5, 8))),
        lambda numbers: _layers.Activation("relu"),
        lambda numbers: _layers.Activation(tf.nn.relu6),
        lambda numbers: tf.nn.relu,
        lambda numbers: tf.nn.relu6,
    ),
    "leaky_relu": with_options(
        lambda numbers: _layers.LeakyReLU(float(10.0 ** numbers.uniform(-3, 0.5))),
        lambda numbers: _layers.LeakyReLU(float(numbers.choice([-1.0, -0.5, 0.0, 1.0]))),
        lambda numbers: _layers.ReLU(negative_slope=float(numbers.uniform(0.01, 1))),
        lambda numbers: _layers.Activation(tf.nn.leaky_relu),
        lambda numbers: tf.nn.leaky_relu,
        lambda numbers: functools.partial(tf.nn.leaky_relu, alpha=float(numbers.uniform(0, 1))),
    ),
    "elu": of_any_shape(
        *(_layers.ELU(), _layers.ELU(0.3), _layers.ELU(1.7), _layers.Activation("elu"), tf.nn.elu)
    ),
    "gelu": of_any_shape(
        _layers.Activation("gelu"), tf.nn.gelu, functools.partial(tf.nn.gelu, approximate=True)
    ),
    "hard_swish": of_any_shape(HardSwish()),
    "sigmoid": of_any_shape(_activation(tf.sigmoid), tf.sigmoid),
    "tanh": of_any_shape(_activation(tf.tanh), tf.tanh),
    "linear": of_any_shape(_activation("linear")),
    "selu": of_any_shape(_activation("selu"), tf.nn.selu),
    "thresholded_relu": with_options(
        lambda numbers: _layers.ThresholdedReLU(float(numbers.uniform(0.1, 2))),
        lambda numbers: _layers.ReLU(threshold=float(numbers.uniform(0.1, 2))),
        lambda numbers: _layers.ReLU(float(numbers.uniform(1, 8)), negative_slope=0.3),
    ),
    "softplus": of_any_shape(_activation("softplus"), tf.nn.softplus),
    "mish": of_any_shape(_activation("mish")),
    "softsign": of_any_shape(_activation("softsign"), tf.nn.softsign),
    "exp": of_any_shape(_activation("exponential"), tf.exp),
    "log": of_any_shape(tf.math.log),
    "sqrt": of_any_shape(tf.sqrt),
    "rsqrt": of_any_shape(tf.math.rsqrt),
    **{
        name: of_any_shape(getattr(tf.math, name))
        for name in (
            *("sin", "cos", "tan", "atan", "sinh", "cosh", "asinh"),
            *("erf", "expm1", "log1p", "sign", "floor", "ceil", "round"),
        )
    },
    "power": with_options(
        lambda numbers: functools.partial(_power, exponent=float(numbers.uniform(-2, 3))),
        lambda numbers: functools.partial(_power, exponent=int(numbers.integers(4, 6))),
    ),
    "formula": of_any_shape(
        Formula('["math.log", ["add", 1.0, ["math.exp", "x"]]]'),
        Formula('["divide", "x", ["math.exp", ["math.negative", "x"]]]'),
        Formula('["math.log", ["math.square", "x"]]'),
    ),
    "reciprocal": with_options(
        lambda numbers: tf.math.reciprocal,
        lambda numbers: functools.partial(_quotient, numerator=float(numbers.normal())),
    ),
    "divide": _of_two(None, tf.divide),
    **{
        name: _of_two(None, getattr(tf.math, name), axes=3)
        for name in ("greater", "greater_equal", "less", "less_equal", "equal", "not_equal")
    },
    "select": _choice,
    "from_integers": _from_integers,
    "one_hot": _one_hot,
    "softmax": _softmax,
    "softmax_of_many": _softmax_of_many,
    "mask_scores": _mask_scores,
    "group_norm": _group_norm,
    "layer_norm": _layer_norm,
    "unit_norm": _unit_norm,
}
