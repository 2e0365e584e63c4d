"""ReLU and its kin: what treats positive and negative numbers differently."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.fixed_point import fixed_point, multiply
from keras_qat.arithmetic.kernel_families import KernelFamily
from keras_qat.arithmetic.quant_params import QuantParams, ratio, round_half_away, single
from keras_qat.frontend.graph import Call
from keras_qat.frontend.keras2.backend import keras
from keras_qat.frontend.tf_operations import is_operation, number, operands
from keras_qat.ops.emission import Emission
from keras_qat.ops.lookup import by_table, looked_up, of_reals
from keras_qat.ops.op import Arguments, Attributes, Op, OwnRange

__all__ = ["LEAKY_RELU", "PRELU", "RELU"]

_layers, _activations = keras.layers, keras.activations


def _relu_attributes(call: Call) -> Attributes:
    layer = call.layer
    if is_operation(layer):
        return {"maximum": 6.0 if layer.symbol == "nn.relu6" else math.inf}
    if isinstance(layer, _layers.ReLU):
        return {"maximum": math.inf if layer.max_value is None else float(layer.max_value)}
    return {"maximum": 6.0 if layer.activation is tf.nn.relu6 else math.inf}


def _relu_accepts(call: Call, attributes: Attributes) -> str | None:
    if getattr(call.layer, "threshold", 0):
        return "threshold"
    if getattr(call.layer, "negative_slope", 0):
        return "both negative_slope and max_value"
    return of_reals(call)


def _relu_numbers(
    family: KernelFamily, x: QuantParams, output: QuantParams, attributes: Attributes
) -> tuple[Any, Any]:
    """Returns the multiplier of values, and their maximum; None without a maximum."""
    end = round_half_away(single(6.0 / output.scale)) if attributes["maximum"] == 6 else None
    return fixed_point(ratio(family, x.scale, by=output.scale)), end


def _relu_of(q: Any, number: Any, end: Any) -> Any:
    result = tf.maximum(tf.cast(multiply(tf.cast(q, tf.int64), number), tf.float64), 0.0)
    return result if end is None else tf.minimum(result, end)


_relu_table = by_table(
    lambda family, q, x, output, attributes: _relu_of(
        q, *_relu_numbers(family, x, output, attributes)
    )
)


def _prepare_relu(a: Arguments) -> Any:
    """Prepares a table, or multipliers for 16 bits.

    A maximum other than 6 is left to the end of the output's range.
    """
    if not a.wide:
        return _relu_table(a)
    return _relu_numbers(a.family, a.params[0], a.output, a.attributes)


def _relu(a: Arguments) -> Any:
    """A ReLU by itself. XNNPACK leaves it to TFLite."""
    (q,) = a.q
    return _relu_of(q, *a.numbers) if a.wide else looked_up(q, a.numbers)


def _emit_relu(e: Emission) -> None:
    """RELU, and MINIMUM where it ends inside of the range: TFLite Micro's RELU6 has no scales."""
    if not e.ends_at_6(e.attributes["maximum"]):
        e.add("RELU")
        return
    output = e.node.output.params
    assert output is not None
    unclipped = e.temporary("unclipped", e.shape(e.outputs[0]), output)
    e.add("RELU", outputs=[unclipped])
    six = output.quantize(np.array(6.0))
    e.add("MINIMUM", [unclipped, e.constant("six", six, output)])


RELU = Op(
    "relu",
    _relu,
    _emit_relu,
    prepare=_prepare_relu,
    doc="ReLU, also with a maximum",
    layers=(_layers.ReLU,),
    symbols=("nn.relu", "nn.relu6"),
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
        slope = operands(call, "features", "alpha")[1]
    # The default is that of tf.nn.leaky_relu.
    return {"slope": float(np.float32(0.2 if slope is None else number(slope) or 0.0))}


def _leaky_accepts(call: Call, attributes: Attributes) -> str | None:
    layer = call.layer
    if isinstance(layer, _layers.ReLU) and (layer.threshold or layer.max_value is not None):
        return "both negative_slope and max_value" if layer.negative_slope else "threshold"
    return of_reals(call)


def _leaky_table(
    family: KernelFamily, q: Any, x: QuantParams, output: QuantParams, attributes: Attributes
) -> Any:
    """TFLite's: two products; one below zero with the slope in its scale."""
    numbers = _leaky_numbers(family, x, output, attributes)
    return _leaky_of(family, q, numbers, attributes, x.bits == 16)


def _leaky_numbers(
    family: KernelFamily, x: QuantParams, output: QuantParams, attributes: Attributes
) -> tuple[Any, Any]:
    """Returns the multipliers of values above zero and below."""
    below = ratio(family, x.scale, abs(attributes["slope"]), by=output.scale)
    return fixed_point(ratio(family, x.scale, by=output.scale)), fixed_point(below)


def _leaky_of(
    family: KernelFamily, q: Any, numbers: tuple[Any, Any], attributes: Attributes, wide: bool
) -> Any:
    whole, (above, below) = tf.cast(q, tf.int64), numbers
    sign = -1 if attributes["slope"] < 0 else 1
    # The optimized int16 kernel has a negative multiplier: halves go up.
    negates_first = family.optimized and wide
    falling = multiply(sign * whole, below) if negates_first else sign * multiply(whole, below)
    return tf.cast(tf.where(whole >= 0, multiply(whole, above), falling), tf.float64)


def _int8_leaky_table(
    family: KernelFamily, q: Any, x: QuantParams, output: QuantParams, attributes: Attributes
) -> Any:
    """XNNPACK's: both slopes are whole numbers of 256ths; halves go up.

    It leaves the steepest and the flattest slopes to TFLite.
    """
    exact = _leaky_table(family, q, x, output, attributes)
    if family.leaky_relu != "256ths":
        return exact
    slope = attributes["slope"]
    above = single(x.scale / output.scale)
    below = single(above * slope)
    taken = (above >= 2**-8) & (above <= 2**7) & (tf.abs(below) >= 2**-8)
    taken &= (below >= 2**-8 - 2**7) & (below <= 2**7)
    if abs(slope) < np.finfo(np.float32).tiny:
        taken = tf.constant(False)
    ratio = tf.where(q >= 0, above, below)
    coarse = tf.floor((q * tf.round(256.0 * ratio) + 128) / 256)
    return tf.where(taken, coarse, exact)


_leaky_entries = by_table(_int8_leaky_table)


def _prepare_leaky(a: Arguments) -> Any:
    if not a.wide:
        return _leaky_entries(a)
    return _leaky_numbers(a.family, a.params[0], a.output, a.attributes)


def _leaky_relu(a: Arguments) -> Any:
    """x above zero, slope * x below."""
    (q,) = a.q
    if not a.wide:
        return looked_up(q, a.numbers)
    return _leaky_of(a.family, q, a.numbers, a.attributes, a.wide)


LEAKY_RELU = Op(
    "leaky_relu",
    _leaky_relu,
    lambda e: e.add("LEAKY_RELU", alpha=e.attributes["slope"]),
    prepare=_prepare_leaky,
    doc="LeakyReLU, with any slope; |x| is one with the slope -1",
    layers=(_layers.LeakyReLU, _layers.ReLU),
    symbols=("nn.leaky_relu",),
    functions=(tf.nn.leaky_relu,),
    attributes=_leaky_attributes,
    needs=("slope",),
    accepts=_leaky_accepts,
    elementwise=True,
)


def _prepare_prelu(a: Arguments) -> Any:
    """Returns the multipliers of values above zero and below, and the slopes."""
    scale = tf.reshape(tf.cast(a.weights.scale, tf.float64), [])
    before, after = a.params[0].scale, a.output.scale
    above = fixed_point(ratio(a.family, before, by=after))
    below = fixed_point(ratio(a.family, before, scale, by=after))
    return above, below, tf.cast(a.weights.q, tf.int64)


def _prelu(a: Arguments) -> Any:
    """x above zero, slopes that are weights times x below. XNNPACK leaves it to TFLite."""
    x, (above, below, slopes) = tf.cast(a.q[0], tf.int64), a.numbers
    result = tf.where(x >= 0, multiply(x, above), multiply(x * slopes, below))
    return tf.cast(result, a.q[0].dtype)


def _emit_prelu(e: Emission) -> None:
    params = QuantParams(np.float32(np.asarray(e.weights.scale).item()), 0)
    e.add("PRELU", [*e.inputs, e.constant("alpha", e.weights.q.astype(np.int8), params)])


PRELU = Op(
    "prelu",
    _prelu,
    _emit_prelu,
    prepare=_prepare_prelu,
    doc="PReLU",
    layers=(_layers.PReLU,),
    accepts=of_reals,
    bits=(8,),
    integers=(),
    weights={"alpha": ()},
    trains_weights=False,
)
