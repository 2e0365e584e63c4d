"""Operations on two tensors, or on a tensor and a constant, value by value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.as_written import product
from keras_qat.arithmetic.control_flow import cond, traced_once
from keras_qat.arithmetic.fixed_point import exponent_of, fixed_point, multiply, power_of_two, shift
from keras_qat.arithmetic.kernel_families import KernelFamily
from keras_qat.arithmetic.partial_evaluation import of_numbers
from keras_qat.arithmetic.quant_params import QuantParams, ratio, single
from keras_qat.frontend.graph import Call
from keras_qat.frontend.keras2.backend import keras
from keras_qat.frontend.tf_operations import inputs_and_constants
from keras_qat.ops.emission import Emission
from keras_qat.ops.lookup import by_table, in_float32, of_reals
from keras_qat.ops.op import Arguments, Attributes, Op, SharedRange
from keras_qat.ops.requantize import requantized

__all__ = ["ADD", "MAXIMUM", "MINIMUM", "MULTIPLY", "SUBTRACT"]

_layers = keras.layers


def _add(a: Arguments) -> Any:
    """a + b, or a - b, in a scale that kernels take, and in that of the output."""
    native = _native(a.params, a.output)
    result = _add_in(dataclasses.replace(a, output=native))

    def brought() -> Any:
        low, high = (
            tf.cast(q - native.zero_point, result.dtype) for q in (native.lowest, native.highest)
        )
        clipped = tf.clip_by_value(result, low, high)
        return requantized(a.family, clipped, native, a.output)

    return cond(_is_wider(native, a.output), brought, lambda: tf.identity(result))


@of_numbers
def _is_wider(native: QuantParams, output: QuantParams) -> Any:
    return native.scale > output.scale


@of_numbers
def _native(params: Sequence[QuantParams], output: QuantParams) -> QuantParams:
    """The output's parameters, or wider ones where an input's scale is far wider.

    There TFLite's kernels end the process, for what they multiply by has to be below 1, or in
    int8 overflow at 16 bits. XNNPACK's do not, but leave such sums to TFLite.
    """
    widest, finest = (pick(*(each.scale for each in params)) for pick in (tf.maximum, tf.minimum))
    if output.bits == 16:
        is_far, least = widest > 2.0**13 * output.scale, single(widest / 2.0**13)
    else:
        left = single(finest / output.scale) < 2.0**-10
        most = tf.where(left, tf.constant(2.0**5, tf.float64), tf.constant(2.0**7, tf.float64))
        is_far, least = widest > most * output.scale, single(widest / 2.0**5)
    scale = tf.where(is_far, least, output.scale)
    return dataclasses.replace(output, scale=scale)


def _add_in(a: Arguments) -> Any:
    """XNNPACK: the larger ratio becomes a multiplier of 21 bits, half up once.

    It leaves ratios below 2^-10 and from 2^8 on to TFLite's kernel.
    """
    sign, scales = a.attributes["sign"], [each.scale for each in a.params]
    if a.family.additions != "rounded_once" or a.wide:
        return _add_twice(a)
    first, second, bits, half, taken = _multipliers(*scales, a.output.scale, sign)

    def once() -> Any:
        x, y = (tf.cast(each, tf.int32) for each in a.q)
        total = tf.bitwise.right_shift(x * first + y * second + half, bits)
        return tf.cast(total, a.q[0].dtype)

    return cond(taken, once, lambda: _add_twice(a))


@of_numbers
@traced_once
def _multipliers(a: Any, b: Any, output: Any, sign: int) -> tuple[Any, Any, Any, Any, Any]:
    """What XNNPACK multiplies the inputs by, the bits it drops of the sum, half, and if it does."""
    ratios = [single(each / output) for each in (a, b)]
    bits = 20 - exponent_of(tf.maximum(*ratios))
    first, second = (tf.cast(tf.round(each * power_of_two(bits)), tf.int32) for each in ratios)
    half = shift(tf.ones_like(bits), bits - 1)
    taken = tf.reduce_all([(each >= 2.0**-10) & (each < 2.0**8) for each in ratios])
    return first, sign * second, tf.cast(bits, tf.int32), tf.cast(half, tf.int32), taken


def _add_twice(a: Arguments) -> Any:
    """TFLite's: both on a scale that holds either, with 20 more bits (15 for int16), then added.

    Its optimized int16 kernel takes tensors of one shape 16 values at a time, and rounds each only
    once on the way to the common scale. The rest, less than 16, is computed as in other kernels.
    """
    x, y = (tf.cast(each, tf.int64) for each in a.q)
    scales, bits = [each.scale for each in a.params], 15 if a.wide else 20
    *numbers, to_output = _common_scale(bits, scales[0], scales[1], a.output.scale)

    def total(scaled: list[Any]) -> Any:
        return multiply(scaled[0] + a.attributes["sign"] * scaled[1], to_output)

    result = total([multiply(shift(q, bits), n) for q, n in zip((x, y), numbers, strict=True)])
    is_add = a.attributes["sign"] > 0
    if a.wide and is_add and a.family.optimized and x.shape.is_compatible_with(y.shape):
        fast = total(
            [multiply(q, (n[0], n[1] + bits)) for q, n in zip((x, y), numbers, strict=True)]
        )
        of_one_shape = tf.reduce_all(tf.equal(tf.shape(x), tf.shape(y)))
        count = tf.where(of_one_shape, tf.size(result) // 16 * 16, 0)
        places = tf.reshape(tf.range(tf.size(result)), tf.shape(result))
        result = tf.where(places < count, fast, result)
    return tf.cast(result, a.q[0].dtype)


@of_numbers
def _common_scale(bits: int, first: Any, second: Any, output: Any) -> tuple[Any, ...]:
    """What the inputs are multiplied by, and their sum."""
    common = 2 * tf.maximum(first, second)
    ratios = first / common, second / common, common / (2.0**bits * output)
    return tuple(map(fixed_point, ratios))


def _squared(x: Any) -> Any:
    return single(x * x)


_square = by_table(in_float32(_squared, xnnpack=_squared))


def _multiply(a: Arguments) -> Any:
    """a * b. XNNPACK: times a ratio in float32, where that is from 2^-16 to below 2^8.

    It makes a square of a tensor times itself, which it looks up.
    """
    x, y = a.q
    factor, in_float32, taken = _factor(a.family, tuple(a.params), a.output)

    def in_integers() -> Any:
        whole = tf.cast(x, tf.int64) * tf.cast(y, tf.int64)
        return tf.cast(multiply(whole, fixed_point(factor)), x.dtype)

    rescale = a.family.products
    if rescale is None or a.wide:
        return in_integers()

    def in_float() -> Any:
        if x is y:
            return _square(dataclasses.replace(a, q=[x], params=a.params[:1]))
        return rescale(product(x, y), in_float32)

    return cond(taken, in_float, in_integers)


@of_numbers
def _factor(
    family: KernelFamily, params: tuple[QuantParams, ...], output: QuantParams
) -> tuple[Any, Any, Any]:
    """What products are multiplied by, also in float32, and whether XNNPACK does so."""
    factor = ratio(family, *(each.scale for each in params), by=output.scale)
    return factor, tf.cast(factor, tf.float32), (factor >= 2.0**-16) & (factor < 2.0**8)


def _accepts_up_to(rank: int) -> Callable[[Call, Attributes], str | None]:
    """Two inputs, which are broadcast if they have at most `rank` axes."""

    def accepts(call: Call, attributes: Attributes) -> str | None:
        leaves = tf.nest.flatten((call.args, call.kwargs))
        shapes = [tuple(each.shape) for each in inputs_and_constants(call)]
        if any(isinstance(leaf, tf.Variable) for leaf in leaves):
            return "a variable"
        if len(shapes) != 2:
            return "not two inputs"
        if len(set(shapes)) > 1 and max(map(len, shapes)) > rank:
            return f"broadcast with more than {rank} axes"
        return of_reals(call)

    return accepts


def _emit_sum(e: Emission) -> None:
    code = "ADD" if e.attributes["sign"] > 0 else "SUB"
    given, output = [each.params for each in e.node.inputs], e.node.output.params
    assert output is not None
    native = _native([each.as_tensors() for each in given if each], output.as_tensors())
    is_wider, (target,) = bool(native.scale > output.scale), e.outputs
    if is_wider:
        native = dataclasses.replace(output, scale=np.float32(native.scale))
        target = e.temporary("wider", e.shape(target), native)
    e.add(code, outputs=[target], fusedActivationFunction=e.activation, potScaleInt16=False)
    if is_wider:
        e.add("QUANTIZE", [target], e.outputs)


ADD = Op(
    "add",
    _add,
    _emit_sum,
    doc="sums of two tensors, or of one and a constant",
    layers=(_layers.Add,),
    symbols=("__operators__.add", "math.add"),
    attributes=lambda call: {"sign": 1},
    defaults={"sign": 1},
    accepts=_accepts_up_to(6),
    takes_clip=True,
    elementwise=True,
    takes_constants=True,
)

SUBTRACT = dataclasses.replace(
    ADD,
    name="subtract",
    doc="differences of two tensors, or of one and a constant",
    layers=(_layers.Subtract,),
    symbols=("math.subtract",),
    attributes=lambda call: {"sign": -1},
    defaults={"sign": -1},
)

MULTIPLY = dataclasses.replace(
    ADD,
    name="multiply",
    compute=_multiply,
    emit=lambda e: e.add("MUL", fusedActivationFunction=e.activation),
    doc="products of two tensors, or of one and a constant",
    layers=(_layers.Multiply,),
    symbols=("math.multiply",),
    attributes=lambda call: {},
    defaults={},
)


def _extremum(name: str, doc: str, function: Callable[[Any, Any], Any], layer: type) -> Op:
    """Of quantized values, as all have the same parameters."""
    return dataclasses.replace(
        ADD,
        name=name,
        compute=lambda a: function(*a.q),
        emit=lambda e: e.add(name.upper()),
        doc=f"the {doc} one of two tensors, or of one and a constant, value by value",
        layers=(layer,),
        symbols=(f"math.{name}",),
        attributes=lambda call: {},
        defaults={},
        accepts=_accepts_up_to(5),
        output=SharedRange(),
        takes_clip=False,
    )


MAXIMUM = _extremum("maximum", "larger", tf.maximum, _layers.Maximum)
MINIMUM = _extremum("minimum", "smaller", tf.minimum, _layers.Minimum)
