"""Functions of one number that TFLite has no integer kernels of: tables of 256 entries."""

from __future__ import annotations

import math

import tensorflow as tf

from keras_qat.graph.calls import Call, Value
from keras_qat.graph.operations import get_kind, get_operands, read_scalar
from keras_qat.helper_layers.finite_functions import Logarithm, Power, Reciprocal
from keras_qat.ops.lookup import accept_float, accept_option, lookup_row
from keras_qat.ops.op import Attributes, Op


def _power(x: tf.Tensor, exponent: float) -> tf.Tensor:
    """Computes x ** exponent; 0 of what is negative where the power is no real number."""
    return tf.pow(x if exponent == int(exponent) else tf.maximum(x, 0.0), exponent)


def _exponent(call: Call) -> float | None:
    """Returns the exponent of a power of a tensor; None if it is no number."""
    if isinstance(call.layer, Power):
        return call.layer.exponent
    x, exponent = get_operands(call, "x", "y")
    return read_scalar(exponent) if isinstance(x, Value) else None


def _accepts_power(call: Call, attributes: Attributes) -> str | None:
    if attributes["exponent"] is None:
        return "with an exponent that is no number"
    return accept_float(call)


def _accepts_quotient(call: Call, attributes: Attributes) -> str | None:
    if math.isnan(attributes["numerator"]):
        return ""
    return accept_float(call)


def _numerator(call: Call) -> float:
    """Returns the number that a call divides by a tensor; NaN for other divisions."""
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
            ("floor", tf.floor, "the next whole number below"),
            ("ceil", tf.math.ceil, "the next whole number above"),
            ("round", tf.round, "the nearest whole number, halves to even"),
        )
    ),
    lookup_row(
        "log1p",
        lambda x: tf.math.log1p(tf.maximum(x, -1.0)),
        "log(1 + x)",
        layers=(Logarithm,),
        kinds=("log1p",),
        accepts=accept_option("plus_one", True),
    ),
    lookup_row(
        "power",
        _power,
        "powers with any number as the exponent; 0 of what is negative if it is not whole",
        layers=(Power,),
        kinds=("pow",),
        attributes=lambda call: {"exponent": _exponent(call)},
        needs=("exponent",),
        accepts=_accepts_power,
    ),
    lookup_row(
        "reciprocal",
        lambda x, numerator: numerator / x,
        "a number divided by a tensor; the end of the range where that is 0",
        layers=(Reciprocal,),
        kinds=("reciprocal", "divide"),
        attributes=lambda call: {"numerator": _numerator(call)},
        defaults={"numerator": 1.0},
        accepts=_accepts_quotient,
    ),
)
