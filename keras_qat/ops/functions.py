"""Elementwise functions of one tensor, such as log and sqrt, computed by lookup tables."""

from __future__ import annotations

import json
import math
from functools import partial

import tensorflow as tf

from keras_qat.graph.calls import Call, Value
from keras_qat.graph.operations import get_kind, get_operands, read_scalar
from keras_qat.helper_layers.elementwise_functions import (
    Formula,
    Logarithm,
    Power,
    Reciprocal,
    SquareRoot,
    evaluate_formula,
)
from keras_qat.keras2.backend import keras, layers
from keras_qat.ops.lookup import Kernel, accept_float, compute_in_float32, lookup_row
from keras_qat.ops.op import Attributes, Op, OwnRange

_activations = keras.activations


def _log(x: tf.Tensor) -> tf.Tensor:
    return tf.math.log(tf.maximum(x, 0.0))


def _softplus(x: tf.Tensor) -> tf.Tensor:
    return tf.maximum(x, 0.0) + tf.math.log1p(tf.exp(-tf.abs(x)))


def _read_relu_options(call: Call) -> Attributes:
    layer = call.layer
    maximum = getattr(layer, "max_value", None)
    return {
        "slope": float(getattr(layer, "negative_slope", 0.0)),
        "maximum": math.inf if maximum is None else float(maximum),
        "threshold": float(getattr(layer, "theta", getattr(layer, "threshold", 0.0))),
    }


def _accept_option(name: str, value: object, call: Call, attributes: Attributes) -> str | None:
    """Accept a call if the option `name` of its layer is `value`, or does not exist.

    For example, the operator "log" requires `plus_one=False`. With True, a layer computes log1p.
    """
    is_other = getattr(call.layer, name, value) != value
    return "" if is_other else accept_float(call)


_NON_NEGATIVE = OwnRange(non_negative=True)

LOOKUPS: tuple[Op, ...] = (
    lookup_row(
        "selu",
        lambda x: 1.0507009873554805 * tf.where(x < 0, 1.6732632423543772 * tf.math.expm1(x), x),
        "scaled exponential linear unit",
        kinds=("selu",),
        functions=(_activations.selu, tf.nn.selu),
    ),
    lookup_row(
        "thresholded_relu",
        lambda x, slope, maximum, threshold: tf.where(
            x > threshold, tf.minimum(x, maximum), slope * (x - threshold)
        ),
        "ReLU with a threshold, or with both a slope and a maximum",
        layers=(layers.ThresholdedReLU, layers.ReLU),
        attributes=_read_relu_options,
        needs=("slope", "maximum", "threshold"),
    ),
    lookup_row(
        "softplus",
        _softplus,
        "log(1 + exp(x))",
        kinds=("softplus",),
        functions=(_activations.softplus, tf.nn.softplus),
        output=_NON_NEGATIVE,
    ),
    lookup_row(
        "mish",
        lambda x: x * tf.tanh(_softplus(x)),
        "x * tanh(softplus(x))",
        functions=(_activations.mish,),
    ),
    lookup_row(
        "softsign",
        lambda x: x / (1.0 + tf.abs(x)),
        "x / (1 + |x|)",
        kinds=("softsign",),
        functions=(_activations.softsign, tf.nn.softsign),
    ),
    lookup_row(
        "exp",
        tf.exp,
        "exponential function",
        kinds=("exp",),
        functions=(_activations.exponential, tf.exp),
        output=_NON_NEGATIVE,
        kernel=Kernel("EXP", compute_in_float32(tf.exp)),
    ),
    lookup_row(
        "log",
        _log,
        "natural logarithm; the lowest value for inputs that are not positive",
        layers=(Logarithm,),
        kinds=("log",),
        functions=(tf.math.log,),
        accepts=partial(_accept_option, "plus_one", False),
        kernel=Kernel("LOG", compute_in_float32(_log)),
    ),
    lookup_row(
        "sqrt",
        lambda x: tf.sqrt(tf.maximum(x, 0.0)),
        "square root; 0 for negative inputs",
        layers=(SquareRoot,),
        kinds=("sqrt",),
        functions=(tf.sqrt,),
        accepts=partial(_accept_option, "inverse", False),
        output=_NON_NEGATIVE,
    ),
    lookup_row(
        "rsqrt",
        lambda x: 1.0 / tf.sqrt(tf.maximum(x, 0.0)),
        "1 / square root; the highest value for inputs that are not positive",
        layers=(SquareRoot,),
        kinds=("rsqrt",),
        functions=(tf.math.rsqrt,),
        accepts=partial(_accept_option, "inverse", True),
        output=_NON_NEGATIVE,
    ),
    lookup_row(
        "formula",
        lambda x, formula: evaluate_formula(json.loads(formula), x),
        "a chain of elementwise operations, such as log(1 + exp(x))",
        layers=(Formula,),
        attributes=lambda call: {"formula": call.layer.formula},
        needs=("formula",),
    ),
)


def _read_exponent(call: Call) -> float | None:
    """Return the exponent of `tensor ** number`. Return None for powers such as `2 ** tensor`."""
    if isinstance(call.layer, Power):
        return call.layer.exponent
    x, exponent = get_operands(call, "x", "y")
    return read_scalar(exponent) if isinstance(x, Value) else None


def _read_numerator(call: Call) -> float:
    """Return the numerator of `number / tensor`. Return NaN for `tensor / tensor`."""
    if isinstance(call.layer, Reciprocal):
        return call.layer.numerator
    if get_kind(call) == "reciprocal":
        return 1.0
    x, y = get_operands(call, "x", "y")
    known = read_scalar(x) if isinstance(y, Value) else None
    return math.nan if known is None else known


MATH_FUNCTIONS: tuple[Op, ...] = (
    *(
        lookup_row(name, function, doc, kinds=(name,))
        for name, function, doc in (
            ("sin", tf.sin, "sine"),
            ("cos", tf.cos, "cosine"),
            ("tan", tf.tan, "tangent"),
            ("atan", tf.atan, "arc tangent"),
            ("sinh", tf.sinh, "hyperbolic sine"),
            ("cosh", tf.cosh, "hyperbolic cosine"),
            ("asinh", tf.asinh, "inverse hyperbolic sine"),
            ("erf", tf.math.erf, "error function"),
            ("expm1", tf.math.expm1, "exp(x) - 1"),
            ("sign", tf.sign, "-1, 0 or 1"),
            ("floor", tf.floor, "rounds down to an integer"),
            ("ceil", tf.math.ceil, "rounds up to an integer"),
            ("round", tf.round, "rounds to the nearest integer, halves to even"),
        )
    ),
    lookup_row(
        "log1p",
        lambda x: tf.math.log1p(tf.maximum(x, -1.0)),
        "log(1 + x)",
        layers=(Logarithm,),
        kinds=("log1p",),
        accepts=partial(_accept_option, "plus_one", True),
    ),
    lookup_row(
        "power",
        lambda x, exponent: tf.pow(
            x if exponent == int(exponent) else tf.maximum(x, 0.0), exponent
        ),
        "powers with a constant exponent; 0 for negative inputs if the exponent is not an integer",
        layers=(Power,),
        kinds=("pow",),
        attributes=lambda call: {"exponent": _read_exponent(call)},
        needs=("exponent",),
        accepts=lambda call, a: (
            accept_float(call) if a["exponent"] is not None else "its exponent is not a constant"
        ),
    ),
    lookup_row(
        "reciprocal",
        lambda x, numerator: numerator / x,
        "a constant divided by a tensor; division by 0 returns an end of the output range",
        layers=(Reciprocal,),
        kinds=("reciprocal", "divide"),
        attributes=lambda call: {"numerator": _read_numerator(call)},
        defaults={"numerator": 1.0},
        accepts=lambda call, a: "" if math.isnan(a["numerator"]) else accept_float(call),
    ),
)
