"""Activation functions. All have int8 kernels in TFLite, and some also have int16 kernels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic import fixed_point, sigmoid_and_tanh
from keras_qat.arithmetic.control_flow import cond
from keras_qat.arithmetic.fixed_point import divide, high_product, saturate, shift, shift_back
from keras_qat.arithmetic.kernel_families import KernelFamily
from keras_qat.arithmetic.quant_params import QuantParams, single
from keras_qat.arithmetic.sigmoid_and_tanh import Curve
from keras_qat.graph.operations import get_argument
from keras_qat.helper_layers.operations import HardSwish
from keras_qat.keras2.backend import keras, layers
from keras_qat.ops import lookup
from keras_qat.ops.emission import Emission
from keras_qat.ops.lookup import Kernel, accept_float, compute_in_float32, lookup_row
from keras_qat.ops.op import Arguments, FixedRange, Op, Prepare, SharedRange
from keras_qat.ops.requantize import prepare_requantization, requantize

_activations = keras.activations


def _elu(x: tf.Tensor, alpha: float) -> tf.Tensor:
    return tf.where(x < 0, alpha * tf.math.expm1(x), x)


def _gelu(x: tf.Tensor, approximate: bool) -> tf.Tensor:
    if approximate:
        return 0.5 * x * (1.0 + tf.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * tf.math.erfc(-math.sqrt(0.5) * x)


def _gelu_in_float32(x: tf.Tensor, approximate: bool) -> tf.Tensor:
    """Compute GELU with the operations of TFLite's kernel, in the same order."""
    if approximate:
        cube = single(single(single(single(0.044715 * x) * x) * x))
        inner = single(math.sqrt(2 / math.pi) * single(x + cube))
        return single(0.5 * x) * single(1.0 + single(tf.tanh(inner)))
    scaled = single(x * np.float64(np.float32(-math.sqrt(0.5))))
    return single(0.5 * x) * single(tf.math.erfc(scaled))


def _supports_hard_swish(x: QuantParams, output: QuantParams) -> tf.Tensor:
    """Return True if TFLite's HARD_SWISH supports these scales.

    With other scales, the kernel would shift integers by too many bits.
    """
    to_output, to_gate = (single(x.scale / 128.0 / scale) for scale in (output.scale, 3 / 32768))
    return (to_output < 1) & (to_gate < 2.0**30) & (tf.minimum(to_output, to_gate) >= 2.0**-16)


def _hard_swish_table(a: Arguments, up: bool = False) -> tf.Tensor:
    """Tabulate x * relu6(x + 3) / 6 like TFLite's kernel.

    `up` is True for ARM's vector instructions, which round halves up.
    """

    def to_upper_bits(x: tf.Tensor) -> fixed_point.FixedPoint:
        return fixed_point.upper_bits(fixed_point.to_fixed_point(x))

    divide_rounded = fixed_point.divide_up if up else divide
    fine = a.params[0].scale / 128.0
    value = shift(tf.cast(a.q[0], tf.int64), 7)
    factor, exponent = to_upper_bits(single(fine / a.output.scale))
    scaled = high_product(value, factor, 15)
    # The gate relu6(x + 3) / 6, in 32768ths.
    gate_factor, gate_exponent = to_upper_bits(single(fine / np.float64(np.float32(3 / 32768))))
    gate = saturate(shift(value, tf.maximum(gate_exponent - 1, 0)), 15)
    gate = high_product(gate, gate_factor, 15)
    gate = tf.where(gate_exponent > 0, saturate(shift(gate, 1), 15), gate)
    gate = shift_back(divide_rounded(gate, tf.maximum(-gate_exponent, 0)) + 2**15, 1)
    product = gate * scaled
    shifted = tf.sign(product) * shift_back(tf.abs(product), 15)
    product = shift_back(product, 15) if up else shifted
    return tf.cast(divide_rounded(product, tf.maximum(-exponent, 0)), tf.float64)


def _prepare_bounded(
    function: Callable[[tf.Tensor], tf.Tensor],
    of_tflite: Callable[[tf.Tensor], tf.Tensor],
    of_micro: Callable[[tf.Tensor, int], tf.Tensor],
) -> Prepare:
    """Return an `Op.prepare` that tabulates a function with a fixed output range, such as tanh.

    Args:
        function: the float function, which computes XNNPACK's table.
        of_tflite: the same function with the operations that compute TFLite's table.
        of_micro: the same function in fixed point with 4 integer bits, as in TFLite Micro. For
            large inputs, TFLite Micro returns the lowest or the highest output without it.
    """
    float32 = compute_in_float32(of_tflite, xnnpack=function)

    def table(a: Arguments) -> tf.Tensor:
        if a.family.int8_curves == "float32":
            return float32(a)
        (q,), (x,), output = a.q, a.params, a.output
        scale = fixed_point.to_fixed_point(tf.cast(x.scale, tf.float64) * 2.0**27)
        values = of_micro(fixed_point.multiply(tf.cast(q, tf.int64), scale), 4)
        steps = fixed_point.get_exponent(tf.cast(1 / output.scale, tf.float64))
        results = tf.cast(divide(values, 31 - steps), tf.float64)
        exponent = tf.cast(fixed_point.get_exponent(tf.cast(x.scale, tf.float64)) + 1, tf.float64)
        reach = tf.floor(15.0 / tf.pow(tf.constant(2.0, tf.float64), exponent))
        lowest, highest = (end - output.zero_point for end in (output.lowest, output.highest))
        return tf.where(q <= -reach, lowest, tf.where(q >= reach, highest, results))

    return lookup.prepare_table(table)


FARTHEST = 4.0
"""The largest scale of 16-bit inputs. LOGISTIC and TANH overflow with a scale of 5.3 or more."""


def _make_bounded(
    name: str,
    code: str,
    prepare_int8: Prepare,
    prepare_curve: Callable[[KernelFamily, tf.Tensor], Curve],
    compute_int16: Callable[[tf.Tensor, Curve], tf.Tensor],
    **fields: Any,
) -> Op:
    def prepare(a: Arguments) -> object:
        if not a.wide:
            return prepare_int8(a)
        (x,) = a.params
        nearer = dataclasses.replace(x, scale=tf.minimum(x.scale, FARTHEST))
        conversion = prepare_requantization(a.family, x, nearer)
        return x.scale > FARTHEST, conversion, prepare_curve(a.family, nearer.scale)

    def compute(a: Arguments) -> tf.Tensor:
        (q,), highest = a.q, float(a.params[0].highest)
        if not a.wide:
            return lookup.look_up(q, a.prepared)
        is_far, conversion, curve = a.prepared

        def reduce_scale() -> tf.Tensor:
            return tf.clip_by_value(requantize(q, conversion), -highest - 1, highest)

        nearer = cond(is_far, reduce_scale, lambda: tf.identity(q))
        return tf.cast(compute_int16(nearer, curve), q.dtype)

    def emit(e: Emission) -> None:
        source, params = e.inputs[0], e.node.inputs[0].params
        if e.wide and params is not None and params.scale > FARTHEST:
            nearer = dataclasses.replace(params, scale=np.float32(FARTHEST))
            source = e.temporary("nearer", e.shape(source), nearer)
            e.add("QUANTIZE", outputs=[source])
        e.add(code, [source])

    return Op(
        name, compute, emit, prepare=prepare, accepts=accept_float, elementwise=True, **fields
    )


ACTIVATIONS: tuple[Op, ...] = (
    lookup_row(
        "elu",
        _elu,
        "ELU, with any alpha",
        layers=(layers.ELU,),
        kinds=("elu",),
        functions=(_activations.elu, tf.nn.elu),
        attributes=lambda call: {"alpha": float(getattr(call.layer, "alpha", 1.0))},
        needs=("alpha",),
        kernel=Kernel(
            "ELU",
            compute_in_float32(_elu, xnnpack=_elu),
            fits=lambda attributes: attributes["alpha"] == 1,
        ),
    ),
    lookup_row(
        "gelu",
        _gelu,
        "GELU, exact or approximated with a hyperbolic tangent",
        kinds=("gelu",),
        functions=(_activations.gelu, tf.nn.gelu),
        attributes=lambda call: {"approximate": bool(get_argument(call, "approximate"))},
        needs=("approximate",),
        kernel=Kernel(
            "GELU", compute_in_float32(_gelu_in_float32), fields=lambda attributes: dict(attributes)
        ),
    ),
    lookup_row(
        "hard_swish",
        lambda x: x * tf.clip_by_value(x + 3.0, 0.0, 6.0) / 6.0,
        "x * relu6(x + 3) / 6, also if written as operations",
        layers=(HardSwish,),
        kernel=Kernel(
            "HARD_SWISH",
            _hard_swish_table,
            partial(_hard_swish_table, up=True),
            supports=_supports_hard_swish,
        ),
    ),
    _make_bounded(
        "sigmoid",
        "LOGISTIC",
        _prepare_bounded(
            tf.sigmoid,
            lambda x: 1.0 / single(1.0 + single(tf.exp(-x))),
            sigmoid_and_tanh.compute_sigmoid,
        ),
        sigmoid_and_tanh.prepare_sigmoid,
        sigmoid_and_tanh.compute_int16_sigmoid,
        output=FixedRange(0.0, 255 / 256, is_bound=True),
        doc="sigmoid; its output has 256 steps from 0 to 1",
        kinds=("sigmoid",),
        functions=(_activations.sigmoid, tf.nn.sigmoid),
    ),
    _make_bounded(
        "tanh",
        "TANH",
        _prepare_bounded(tf.tanh, tf.tanh, sigmoid_and_tanh.compute_tanh),
        sigmoid_and_tanh.prepare_tanh,
        sigmoid_and_tanh.compute_int16_tanh,
        output=FixedRange(-1.0, 127 / 128, is_bound=True),
        doc="tanh; its output has 256 steps from -1 to 1",
        kinds=("tanh",),
        functions=(_activations.tanh, tf.nn.tanh),
    ),
    Op(
        "linear",
        lambda a: a.q[0],
        lambda e: e.reshape(e.inputs[0], e.outputs[0]),
        doc="the linear activation",
        functions=(_activations.linear,),
        accepts=accept_float,
        output=SharedRange(),
        elementwise=True,
        alias=True,
    ),
)
