"""Curves that TFLite has int8 kernels of, and some int16 ones: sigmoid, tanh, GELU and others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.control_flow import Choice, cond, trace_once
from keras_qat.arithmetic.fixed_point import (
    divide,
    divide_up,
    get_exponent,
    high_product,
    multiply,
    saturate,
    shift,
    shift_back,
    to_fixed_point,
    upper_bits,
)
from keras_qat.arithmetic.kernel_families import KernelFamily
from keras_qat.arithmetic.quant_params import QuantParams, single
from keras_qat.arithmetic.sigmoid_and_tanh import (
    Curve,
    compute_int16_sigmoid,
    compute_int16_tanh,
    compute_sigmoid,
    compute_tanh,
    prepare_sigmoid,
    prepare_tanh,
)
from keras_qat.graph.operations import get_argument
from keras_qat.helper_layers.operations import HardSwish
from keras_qat.keras2.backend import keras, layers
from keras_qat.ops.emission import Emission
from keras_qat.ops.lookup import (
    Entries,
    Kernel,
    accept_float,
    compute_in_float32,
    look_up,
    lookup_row,
    prepare_table,
)
from keras_qat.ops.op import Arguments, FixedRange, Op, Prepare, SharedRange
from keras_qat.ops.requantize import prepare_requantization, requantize

_activations = keras.activations


def _elu(x: Any, alpha: float) -> Any:
    return tf.where(x < 0, alpha * tf.math.expm1(x), x)


def _gelu(x: Any, approximate: bool) -> Any:
    if approximate:
        return 0.5 * x * (1.0 + tf.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * tf.math.erfc(-math.sqrt(0.5) * x)


def _gelu_in_float32(x: Any, approximate: bool) -> Any:
    """Computes GELU in the order of operations of TFLite's kernel."""
    if approximate:
        cube = single(single(single(single(0.044715 * x) * x) * x))
        inner = single(math.sqrt(2 / math.pi) * single(x + cube))
        return single(0.5 * x) * single(1.0 + single(tf.tanh(inner)))
    scaled = single(x * np.float64(np.float32(-math.sqrt(0.5))))
    return single(0.5 * x) * single(tf.math.erfc(scaled))


def _takes_hard_swish(x: QuantParams, output: QuantParams) -> Any:
    """Returns whether TFLite's HARD_SWISH takes these scales.

    Kernels check the output's scale, and shift by no more than 31 bits up and 15 down, which they
    do not check.
    """
    to_output, to_gate = (single(x.scale / 128.0 / scale) for scale in (output.scale, 3 / 32768))
    return (to_output < 1) & (to_gate < 2.0**30) & (tf.minimum(to_output, to_gate) >= 2.0**-16)


def _hard_swish_table(a: Arguments, up: bool = False) -> Any:
    """Computes x * relu6(x + 3) / 6 in 16 bits, rounding halves away from zero or `up`."""
    rounded = divide_up if up else divide
    fine = a.params[0].scale / 128.0
    value = shift(tf.cast(a.q[0], tf.int64), 7)
    factor, exponent = upper_bits(to_fixed_point(single(fine / a.output.scale)))
    scaled = high_product(value, factor, 15)
    # The gate relu6(x + 3) / 6: from -1 to 1 at first, in 32768ths.
    gate_ratio = single(fine / np.float64(np.float32(3 / 32768)))
    gate_factor, gate_exponent = upper_bits(to_fixed_point(gate_ratio))
    gate = saturate(shift(value, tf.maximum(gate_exponent - 1, 0)), 15)
    gate = high_product(gate, gate_factor, 15)
    gate = tf.where(gate_exponent > 0, saturate(shift(gate, 1), 15), gate)
    gate = shift_back(rounded(gate, tf.maximum(-gate_exponent, 0)) + 2**15, 1)
    product = gate * scaled
    shifted = tf.sign(product) * shift_back(tf.abs(product), 15)
    product = shift_back(product, 15) if up else shifted
    return tf.cast(rounded(product, tf.maximum(-exponent, 0)), tf.float64)


@dataclasses.dataclass(frozen=True)
class _Direct:
    """The prepared numbers of an 8-bit curve.

    Args:
        is_clear: whether no entry of the table lies so near a half that the last bits of float32
            count.
        before, after: what inputs and results are multiplied by.
        entries: the table.
        ends: how far an input counts, and the ends of the output; None where all inputs count.
    """

    is_clear: Any
    before: Any
    after: Any
    entries: Entries
    ends: tuple[Any, Any, Any] | None


def _prepare_directly(
    function: Callable[[Any], Any],
    of_tflite: Callable[[Any], Any],
    of_micro: Callable[[Any, int], Any],
) -> Prepare:
    """Prepares a real function with a fixed output range.

    Args:
        function: the function.
        of_tflite: the same in the operations of TFLite's table.
        of_micro: the same in fixed point, as TFLite Micro computes it.
    """
    float32 = compute_in_float32(of_tflite, xnnpack=function)

    def table(a: Arguments) -> Any:
        is_float = a.family.int8_curves == "float32"
        return float32(a) if is_float else _in_fixed_point(a, of_micro)

    entries = prepare_table(table)

    @trace_once
    def is_clear(lowest: Any, scale: Any, output: Any) -> Any:
        prepared = (tf.range(256, dtype=tf.float64) + lowest) * scale
        scaled = function(prepared) / output
        return tf.reduce_all(tf.abs(scaled - tf.floor(scaled) - 0.5) > 1e-4)

    def prepare(a: Arguments) -> _Direct:
        (x,), output = a.params, a.output
        return _Direct(
            is_clear(x.lowest - x.zero_point, x.scale, output.scale),
            tf.cast(x.scale, tf.float32),
            tf.cast(1 / output.scale, tf.float32),
            entries(a),
            _ends(x, output, a.q[0].dtype) if a.family.int8_curves == "fixed_point" else None,
        )

    return prepare


def _directly(scaled: Callable[..., Any]) -> Callable[[Any, _Direct], Any]:
    """Computes each number, in a third of the time that a look-up takes, if all are clear.

    Args:
        scaled: the function in few and fast operations: from x, and by what to multiply x before
            and the function behind, to whole numbers.

    Returns:
        From quantized values less the zero point, and what was prepared, to results.
    """
    real = tf.TensorSpec([])
    signature = [tf.TensorSpec([], tf.bool), tf.TensorSpec(None), real, real]

    # Training changes every second table's condition: not a branch to trace for good.
    @partial(trace_once, signature=[*signature, tf.TensorSpec([256]), real], in_line=True)
    def chosen(is_clear: Any, q: Any, before: Any, after: Any, values: Any, first: Any) -> Any:
        entries = Entries(values, first)
        return tf.cond(is_clear, lambda: scaled(q, before, after), lambda: look_up(q, entries))

    def compute(q: Any, prepared: _Direct) -> Any:
        clear, entries = prepared.is_clear, prepared.entries
        clear = clear.tensor if isinstance(clear, Choice) else clear
        result = chosen(clear, q, prepared.before, prepared.after, entries.values, entries.first)
        result = tf.ensure_shape(result, q.shape)
        if prepared.ends is None:
            return result
        reach, lowest, highest = prepared.ends
        return tf.where(q <= -reach, lowest, tf.where(q >= reach, highest, result))

    return compute


def _in_fixed_point(a: Arguments, function: Callable[[Any, int], Any]) -> Any:
    """Computes the table of a function that takes numbers with 4 bits in front of the point."""
    (q,), (x,), output = a.q, a.params, a.output
    scale = to_fixed_point(tf.cast(x.scale, tf.float64) * 2.0**27)
    values = function(multiply(tf.cast(q, tf.int64), scale), 4)
    steps = get_exponent(tf.cast(1 / output.scale, tf.float64))
    return tf.cast(divide(values, 31 - steps), tf.float64)


def _ends(x: QuantParams, output: QuantParams, dtype: tf.DType) -> tuple[Any, Any, Any]:
    """Returns the largest input that TFLite Micro's kernels use, and the ends of the output.

    Numbers of 15 and more in steps of 4 and more become the end itself. They are compared with 15
    divided by the power of two above a step, without a remainder: 0 for steps of 8 and more, with
    which 0 is at the lower end too.
    """
    exponent = tf.cast(get_exponent(tf.cast(x.scale, tf.float64)) + 1, tf.float64)
    reach = tf.floor(15.0 / tf.pow(tf.constant(2.0, tf.float64), exponent))
    ends = reach, output.lowest - output.zero_point, output.highest - output.zero_point
    return tuple(tf.cast(end, dtype) for end in ends)


def _scaled_tanh(q: Any, before: Any, after: Any) -> Any:
    return tf.round(tf.tanh(q * before) * after)


def _scaled_sigmoid(q: Any, before: Any, after: Any) -> Any:
    """Computes a sigmoid by tanh, which takes TensorFlow half as long as its sigmoid."""
    return _scaled_tanh(q, before * 0.5, after * 0.5) + after * 0.5


FARTHEST = 4.0
"""The largest scale of 16 bits: from 5.3 on, products overflow in TFLite's kernels."""


def _bounded(
    name: str,
    code: str,
    function: Any,
    of_tflite: Any,
    of_micro: Any,
    prepare_curve: Callable[[KernelFamily, Any], Curve],
    of_int16: Callable[[Any, Curve], Any],
    scaled: Any,
    **how: Any,
) -> Op:
    """Makes the row of a function with a fixed output range."""
    prepare_int8 = _prepare_directly(function, of_tflite, of_micro)
    compute_int8 = _directly(scaled)

    def prepare(a: Arguments) -> Any:
        if not a.wide:
            return prepare_int8(a)
        (x,) = a.params
        nearer = dataclasses.replace(x, scale=tf.minimum(x.scale, FARTHEST))
        conversion = prepare_requantization(a.family, x, nearer)
        return x.scale > FARTHEST, conversion, prepare_curve(a.family, nearer.scale)

    def compute(a: Arguments) -> Any:
        (q,), highest = a.q, float(a.params[0].highest)
        if not a.wide:
            return compute_int8(q, a.prepared)
        is_far, conversion, curve = a.prepared

        def brought_nearer() -> Any:
            return tf.clip_by_value(requantize(q, conversion), -highest - 1, highest)

        nearer = cond(is_far, brought_nearer, lambda: tf.identity(q))
        return tf.cast(of_int16(nearer, curve), q.dtype)

    def emit(e: Emission) -> None:
        source, params = e.inputs[0], e.node.inputs[0].params
        if e.wide and params is not None and params.scale > FARTHEST:
            nearer = dataclasses.replace(params, scale=np.float32(FARTHEST))
            source = e.temporary("nearer", e.shape(source), nearer)
            e.add("QUANTIZE", outputs=[source])
        e.add(code, [source])

    return Op(name, compute, emit, prepare=prepare, accepts=accept_float, elementwise=True, **how)


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
        "x * relu6(x + 3) / 6, also in operations",
        layers=(HardSwish,),
        kernel=Kernel(
            "HARD_SWISH",
            _hard_swish_table,
            partial(_hard_swish_table, up=True),
            takes=_takes_hard_swish,
        ),
    ),
    _bounded(
        "sigmoid",
        "LOGISTIC",
        tf.sigmoid,
        lambda x: 1.0 / single(1.0 + single(tf.exp(-x))),
        compute_sigmoid,
        prepare_sigmoid,
        compute_int16_sigmoid,
        _scaled_sigmoid,
        output=FixedRange(0.0, 255 / 256, is_bound=True),
        doc="sigmoid; its output has 256 steps from 0 to 1",
        kinds=("sigmoid",),
        functions=(_activations.sigmoid, tf.nn.sigmoid),
    ),
    _bounded(
        "tanh",
        "TANH",
        tf.tanh,
        tf.tanh,
        compute_tanh,
        prepare_tanh,
        compute_int16_tanh,
        _scaled_tanh,
        output=FixedRange(-1.0, 127 / 128, is_bound=True),
        doc="tanh; its output has 256 steps from -1 to 1",
        kinds=("tanh",),
        functions=(_activations.tanh, tf.nn.tanh),
    ),
    Op(
        "linear",
        lambda a: a.q[0],
        lambda e: e.reshape(e.inputs[0], e.outputs[0]),
        doc="the linear activation, which changes nothing",
        functions=(_activations.linear,),
        accepts=accept_float,
        output=SharedRange(),
        elementwise=True,
        alias=True,
    ),
)
