"""ReLU, LeakyReLU and PReLU."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.fixed_point import multiply, to_fixed_point
from keras_qat.arithmetic.quant_params import QuantParams, ratio, round_half_away, single
from keras_qat.graph.calls import Call
from keras_qat.graph.operations import get_argument, get_kind, is_operation, read_scalar
from keras_qat.keras2.backend import keras, layers
from keras_qat.ops.emission import Emission
from keras_qat.ops.lookup import accept_float, compute_by_table, prepare_table
from keras_qat.ops.op import Arguments, Attributes, Op, OwnRange

_activations = keras.activations


def _relu_attributes(call: Call) -> Attributes:
    layer = call.layer
    if is_operation(layer):
        return {"maximum": 6.0 if get_kind(layer) == "relu6" else math.inf}
    if isinstance(layer, layers.ReLU):
        return {"maximum": math.inf if layer.max_value is None else float(layer.max_value)}
    return {"maximum": 6.0 if layer.activation is tf.nn.relu6 else math.inf}


def _relu_accepts(call: Call, attributes: Attributes) -> str | None:
    layer = call.layer
    # The operator `thresholded_relu` computes layers with these options.
    is_other = getattr(layer, "threshold", 0) or getattr(layer, "negative_slope", 0)
    return "" if is_other else accept_float(call)


def _tabulate_relu(a: Arguments) -> tf.Tensor:
    """Compute the table of TFLite's kernel for a ReLU that is not fused.

    The table clips at a maximum of 6. The output's range clips at any other maximum.
    """
    factor = to_fixed_point(ratio(a.family, a.params[0].scale, by=a.output.scale))
    result = tf.maximum(tf.cast(multiply(tf.cast(a.q[0], tf.int64), factor), tf.float64), 0.0)
    if a.attributes["maximum"] != 6:
        return result
    return tf.minimum(result, round_half_away(single(6.0 / a.output.scale)))


def _emit_relu(e: Emission) -> None:
    """Add a RELU. If the maximum is 6 and inside the output's range, add a MINIMUM.

    RELU6 is not used. In TFLite Micro, its input and output must have the same scale.
    """
    if not e.ends_at_6(e.attributes["maximum"]):
        e.add("RELU")
        return
    unclipped = e.temporary("unclipped", e.shape(e.outputs[0]), e.params)
    e.add("RELU", outputs=[unclipped])
    six = e.params.quantize(np.array(6.0))
    e.add("MINIMUM", [unclipped, e.constant("six", six, e.params)])


RELU = Op(
    "relu",
    compute_by_table,
    _emit_relu,
    prepare=prepare_table(_tabulate_relu),
    doc="ReLU, also with a maximum",
    layers=(layers.ReLU,),
    kinds=("relu", "relu6"),
    functions=(_activations.relu, tf.nn.relu, tf.nn.relu6),
    attributes=_relu_attributes,
    needs=("maximum",),
    accepts=_relu_accepts,
    output=OwnRange(non_negative=True),
    clips=True,
    elementwise=True,
)


def _leaky_attributes(call: Call) -> Attributes:
    slope = getattr(call.layer, "negative_slope", getattr(call.layer, "alpha", None))
    if is_operation(call.layer):
        slope = get_argument(call, "alpha")
    # The default slope of tf.nn.leaky_relu.
    return {"slope": float(np.float32(0.2 if slope is None else read_scalar(slope) or 0.0))}


def _leaky_accepts(call: Call, attributes: Attributes) -> str | None:
    layer = call.layer
    if isinstance(layer, layers.ReLU) and (layer.threshold or layer.max_value is not None):
        return ""
    return accept_float(call)


def _tabulate_leaky_relu(a: Arguments) -> tf.Tensor:
    """Compute the table of a leaky ReLU: x above zero, slope * x below zero.

    XNNPACK's 8-bit kernel multiplies by n / 256 for an integer n, and rounds halves up. If a slope
    is too steep or too flat for XNNPACK, TFLite's kernel runs instead.
    """
    exact = _tabulate_exact_leaky_relu(a)
    if a.wide or a.family.leaky_relu != "256ths":
        return exact
    (q,), (x,), slope = a.q, a.params, a.attributes["slope"]
    above = single(x.scale / a.output.scale)
    below = single(above * slope)
    is_supported = (above >= 2**-8) & (above <= 2**7) & (tf.abs(below) >= 2**-8)
    is_supported &= (below >= 2**-8 - 2**7) & (below <= 2**7)
    if abs(slope) < np.finfo(np.float32).tiny:
        is_supported = tf.constant(False)
    factor = tf.round(256.0 * tf.where(q >= 0, above, below))
    return tf.where(is_supported, tf.floor((q * factor + 128) / 256), exact)


def _tabulate_exact_leaky_relu(a: Arguments) -> tf.Tensor:
    """Compute the table of TFLite's own kernel, which multiplies in fixed point."""
    steps, scale, slope = tf.cast(a.q[0], tf.int64), a.params[0].scale, a.attributes["slope"]
    above = to_fixed_point(ratio(a.family, scale, by=a.output.scale))
    below = to_fixed_point(ratio(a.family, scale, abs(slope), by=a.output.scale))
    sign = -1 if slope < 0 else 1
    # The optimized int16 kernel multiplies by a negative factor, so halves round up.
    negates_first = a.family.optimized and a.wide
    falling = multiply(sign * steps, below) if negates_first else sign * multiply(steps, below)
    return tf.cast(tf.where(steps >= 0, multiply(steps, above), falling), tf.float64)


LEAKY_RELU = Op(
    "leaky_relu",
    compute_by_table,
    lambda e: e.add("LEAKY_RELU", alpha=e.attributes["slope"]),
    prepare=prepare_table(_tabulate_leaky_relu),
    doc="LeakyReLU with any slope, such as -1 for |x|",
    layers=(layers.LeakyReLU, layers.ReLU),
    kinds=("leaky_relu",),
    functions=(tf.nn.leaky_relu,),
    attributes=_leaky_attributes,
    needs=("slope",),
    accepts=_leaky_accepts,
    elementwise=True,
)


def _prepare_prelu(a: Arguments) -> object:
    """Return the multipliers for values above and below zero, and the integer slopes."""
    scale = tf.reshape(tf.cast(a.weights.scale, tf.float64), [])
    before, after = a.params[0].scale, a.output.scale
    above = to_fixed_point(ratio(a.family, before, by=after))
    below = to_fixed_point(ratio(a.family, before, scale, by=after))
    return above, below, tf.cast(a.weights.q, tf.int64)


def _compute_prelu(a: Arguments) -> tf.Tensor:
    x, (above, below, slopes) = tf.cast(a.q[0], tf.int64), a.prepared
    result = tf.where(x >= 0, multiply(x, above), multiply(x * slopes, below))
    return tf.cast(result, a.q[0].dtype)


def _emit_prelu(e: Emission) -> None:
    params = QuantParams(np.float32(np.asarray(e.weights.scale).item()), 0)
    e.add("PRELU", [*e.inputs, e.constant("alpha", e.weights.q.astype(np.int8), params)])


PRELU = Op(
    "prelu",
    _compute_prelu,
    _emit_prelu,
    prepare=_prepare_prelu,
    doc="PReLU",
    layers=(layers.PReLU,),
    accepts=accept_float,
    bits=(8,),
    integers=(),
    weights={"alpha": ()},
    trains_weights=False,
)
