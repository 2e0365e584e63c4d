"""Curves that TFLite has int8 kernels of, and some int16 ones: sigmoid, tanh, GELU and others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.control_flow import cond, traced_once
from keras_qat.arithmetic.fixed_point import (
    divide,
    exponent_of,
    fixed_point,
    high_product,
    saturate,
    shift,
    shift_back,
    upper_bits,
)
from keras_qat.arithmetic.int16_sigmoid import sigmoid_of_int16, tanh_of_int16
from keras_qat.arithmetic.kernel_families import KernelFamily
from keras_qat.arithmetic.partial_evaluation import of_numbers
from keras_qat.arithmetic.quant_params import QuantParams, single
from keras_qat.frontend.helper_layers import HardSwish
from keras_qat.frontend.keras2.backend import keras
from keras_qat.frontend.tf_operations import operands
from keras_qat.ops.emission import Emission
from keras_qat.ops.lookup import (
    Kernel,
    by_table,
    in_float32,
    lookup_row,
    of_reals,
)
from keras_qat.ops.op import Arguments, Attributes, Compute, FixedRange, Op, SharedRange
from keras_qat.ops.requantize import requantized

__all__ = ["ACTIVATIONS"]

_layers, _activations = keras.layers, keras.activations


def _elu(x: Any, alpha: float) -> Any:
    return tf.where(x < 0, alpha * tf.math.expm1(x), x)


def _gelu(x: Any, approximate: bool) -> Any:
    if approximate:
        return 0.5 * x * (1.0 + tf.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * tf.math.erfc(-math.sqrt(0.5) * x)


def _gelu_in_float32(x: Any, approximate: bool) -> Any:
    """In the order of operations of TFLite's kernel."""
    if approximate:
        cube = single(single(single(single(0.044715 * x) * x) * x))
        inner = single(math.sqrt(2 / math.pi) * single(x + cube))
        return single(0.5 * x) * single(1.0 + single(tf.tanh(inner)))
    scaled = single(x * np.float64(np.float32(-math.sqrt(0.5))))
    return single(0.5 * x) * single(tf.math.erfc(scaled))


def _takes_hard_swish(x: QuantParams, output: QuantParams) -> Any:
    """Kernels check the output's scale, and shift by no more than 31 bits, unchecked."""
    fine = x.scale / 128.0
    return (single(fine / output.scale) < 1) & (fine / (3 / 32768) < 2.0**30)


def _hard_swish_table(
    family: KernelFamily, q: Any, x: QuantParams, output: QuantParams, attributes: Attributes
) -> Any:
    """x * relu6(x + 3) / 6 in 16 bits."""
    fine = x.scale / 128.0
    value = shift(tf.cast(q, tf.int64), 7)
    factor, exponent = upper_bits(fixed_point(single(fine / output.scale)))
    scaled = high_product(value, factor, 15)
    # The gate relu6(x + 3) / 6: from -1 to 1 at first, in 32768ths.
    gate_ratio = single(fine / np.float64(np.float32(3 / 32768)))
    gate_factor, gate_exponent = upper_bits(fixed_point(gate_ratio))
    gate = saturate(shift(value, tf.maximum(gate_exponent - 1, 0)), 15)
    gate = high_product(gate, gate_factor, 15)
    gate = tf.where(gate_exponent > 0, saturate(shift(gate, 1), 15), gate)
    gate = shift_back(divide(gate, tf.maximum(-gate_exponent, 0)) + 2**15, 1)
    product = gate * scaled
    product = tf.sign(product) * shift_back(tf.abs(product), 15)
    return tf.cast(divide(product, tf.maximum(-exponent, 0)), tf.float64)


def _directly(
    function: Callable[[Any], Any], of_tflite: Callable[[Any], Any], scaled: Callable[..., Any]
) -> Compute:
    """A real function with a fixed output range, as `in_float32`, in a third of the time.

    Computed for each number instead of looked up, if no entry of the table lies so near a half
    that the last bits of float32 count.

    Args:
        function: the function.
        of_tflite: the same in the operations of TFLite's table.
        scaled: the same in few and fast operations: from x, and by what to multiply x before and
            the function behind, to whole numbers.
    """
    looked_up = by_table(in_float32(of_tflite, xnnpack=function))

    @traced_once
    def is_clear(lowest: Any, scale: Any, output: Any) -> Any:
        numbers = (tf.range(256, dtype=tf.float64) + lowest) * scale
        scaled = function(numbers) / output
        return tf.reduce_all(tf.abs(scaled - tf.floor(scaled) - 0.5) > 1e-4)

    @of_numbers
    def factors(x: QuantParams, output: QuantParams) -> tuple[Any, Any, Any]:
        clear = is_clear(x.lowest - x.zero_point, x.scale, output.scale)
        return clear, tf.cast(x.scale, tf.float32), tf.cast(1 / output.scale, tf.float32)

    def compute(a: Arguments) -> Any:
        clear, before, after = factors(a.params[0], a.output)
        # Training changes every second table's: not a branch to trace for good.
        found = tf.cond(clear, lambda: scaled(a.q[0], before, after), lambda: looked_up(a))
        return _ended(a, found) if a.family.curves_saturate else found

    return compute


def _ended(a: Arguments, found: Any) -> Any:
    """What TFLite Micro makes of numbers of 15 and more in steps of 4 and more: the end itself.

    It compares with 15 divided by the power of two above a step, without a remainder: 0 for steps
    of 8 and more, with which 0 is at the lower end too.
    """
    reach, lowest, highest = _reach(a.params[0], a.output)
    q = tf.cast(a.q[0], found.dtype)
    ended = tf.where(q >= tf.cast(reach, q.dtype), tf.cast(highest, q.dtype), found)
    return tf.where(q <= tf.cast(-reach, q.dtype), tf.cast(lowest, q.dtype), ended)


@of_numbers
def _reach(x: QuantParams, output: QuantParams) -> tuple[Any, Any, Any]:
    """How far an input counts, and the ends of the output."""
    exponent = tf.cast(exponent_of(tf.cast(x.scale, tf.float64)) + 1, tf.float64)
    reach = tf.floor(15.0 / tf.pow(tf.constant(2.0, tf.float64), exponent))
    return reach, output.lowest - output.zero_point, output.highest - output.zero_point


def _scaled_tanh(q: Any, before: Any, after: Any) -> Any:
    return tf.round(tf.tanh(q * before) * after)


def _scaled_sigmoid(q: Any, before: Any, after: Any) -> Any:
    """TensorFlow's sigmoid takes twice as long as its tanh."""
    return _scaled_tanh(q, before * 0.5, after * 0.5) + after * 0.5


FARTHEST = 4.0
"""The largest scale of 16 bits: from 5.3 on, products overflow in TFLite's kernels."""


@of_numbers
def _nearer(scale: Any) -> Any:
    return tf.minimum(scale, FARTHEST)


@of_numbers
def _is_far(scale: Any) -> Any:
    return scale > FARTHEST


def _bounded(
    name: str,
    code: str,
    function: Any,
    of_tflite: Any,
    of_int16: Any,
    scaled: Any,
    **how: Any,
) -> Op:
    """The row of a function with a fixed output range."""
    direct = _directly(function, of_tflite, scaled)

    def compute(a: Arguments) -> Any:
        if not a.wide:
            return direct(a)
        (q,), (x,) = a.q, a.params
        nearer = dataclasses.replace(x, scale=_nearer(x.scale))

        def brought() -> Any:
            highest = float(nearer.highest)
            return tf.clip_by_value(requantized(a.family, q, x, nearer), -highest - 1, highest)

        q = cond(_is_far(x.scale), brought, lambda: tf.identity(q))
        return tf.cast(of_int16(a.family, q, nearer), q.dtype)

    def emit(e: Emission) -> None:
        source, params = e.inputs[0], e.node.inputs[0].params
        if e.wide and params is not None and params.scale > FARTHEST:
            nearer = dataclasses.replace(params, scale=np.float32(FARTHEST))
            source = e.temporary("nearer", e.shape(source), nearer)
            e.add("QUANTIZE", outputs=[source])
        e.add(code, [source])

    return Op(
        name,
        compute,
        emit,
        accepts=of_reals,
        elementwise=True,
        **how,
    )


ACTIVATIONS: tuple[Op, ...] = (
    lookup_row(
        "elu",
        _elu,
        "ELU, with any alpha",
        layers=(_layers.ELU,),
        symbols=("nn.elu",),
        functions=(_activations.elu, tf.nn.elu),
        attributes=lambda call: {"alpha": float(getattr(call.layer, "alpha", 1.0))},
        needs=("alpha",),
        kernel=Kernel(
            "ELU",
            in_float32(_elu, xnnpack=_elu),
            fits=lambda attributes: attributes["alpha"] == 1,
        ),
    ),
    lookup_row(
        "gelu",
        _gelu,
        "GELU, exact or approximated with a hyperbolic tangent",
        symbols=("nn.gelu",),
        functions=(_activations.gelu, tf.nn.gelu),
        attributes=lambda call: {"approximate": bool(operands(call, "features", "approximate")[1])},
        needs=("approximate",),
        kernel=Kernel(
            "GELU",
            in_float32(_gelu_in_float32),
            fields=lambda attributes: dict(attributes),
        ),
    ),
    lookup_row(
        "hard_swish",
        lambda x: x * tf.clip_by_value(x + 3.0, 0.0, 6.0) / 6.0,
        "x * relu6(x + 3) / 6, also in operations",
        layers=(HardSwish,),
        kernel=Kernel(
            "HARD_SWISH",
            _hard_swish_table,
            takes=_takes_hard_swish,
        ),
    ),
    _bounded(
        "sigmoid",
        "LOGISTIC",
        tf.sigmoid,
        lambda x: 1.0 / single(1.0 + single(tf.exp(-x))),
        sigmoid_of_int16,
        _scaled_sigmoid,
        output=FixedRange(0.0, 255 / 256, is_bound=True),
        doc="sigmoid; its output has 256 steps from 0 to 1",
        symbols=("math.sigmoid",),
        functions=(_activations.sigmoid, tf.nn.sigmoid),
    ),
    _bounded(
        "tanh",
        "TANH",
        tf.tanh,
        tf.tanh,
        tanh_of_int16,
        _scaled_tanh,
        output=FixedRange(-1.0, 127 / 128, is_bound=True),
        doc="tanh; its output has 256 steps from -1 to 1",
        symbols=("math.tanh",),
        functions=(_activations.tanh, tf.nn.tanh),
    ),
    Op(
        "linear",
        lambda a: a.q[0],
        lambda e: e.reshape(e.inputs[0], e.outputs[0]),
        doc="the linear activation, which changes nothing",
        functions=(_activations.linear,),
        accepts=of_reals,
        output=SharedRange(),
        elementwise=True,
        alias=True,
    ),
)
