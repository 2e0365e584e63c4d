"""Elementwise operations on two tensors, or on a tensor and a constant."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic import fixed_point
from keras_qat.arithmetic.control_flow import Predicate, cond, trace_once
from keras_qat.arithmetic.fixed_point import multiply, shift, to_fixed_point
from keras_qat.arithmetic.plain_operations import product
from keras_qat.arithmetic.quant_params import QuantParams, ratio, single
from keras_qat.graph.calls import Call
from keras_qat.graph.operations import list_operands
from keras_qat.keras2.backend import layers
from keras_qat.ops.emission import Activation, Emission
from keras_qat.ops.lookup import Entries, accept_float, compute_in_float32, look_up, prepare_table
from keras_qat.ops.op import Arguments, Attributes, Op, SharedRange
from keras_qat.ops.requantize import Multiplier, prepare_requantization, requantize


@dataclasses.dataclass(frozen=True)
class _NativeScale:
    """The scale of a kernel's result, which is then converted to the output's scale.

    Args:
        is_wider: whether the result's scale is larger than the output's. Otherwise they are equal.
        ends: the lowest and the highest result. Results are integers minus the zero point.
        conversion: the multiplier that converts results to the output's scale.
    """

    is_wider: Predicate
    ends: tuple[tf.Tensor, tf.Tensor]
    conversion: Multiplier

    @classmethod
    def prepare(cls, native: QuantParams, a: Arguments) -> _NativeScale:
        low, high = (
            tf.cast(q - native.zero_point, a.q[0].dtype) for q in (native.lowest, native.highest)
        )
        conversion = prepare_requantization(a.family, native, a.output)
        return cls(native.scale > a.output.scale, (low, high), conversion)

    def convert(self, result: tf.Tensor) -> tf.Tensor:
        return cond(
            self.is_wider,
            lambda: requantize(tf.clip_by_value(result, *self.ends), self.conversion),
            lambda: tf.identity(result),
        )


@dataclasses.dataclass(frozen=True)
class _Sum:
    """The prepared parameters of a sum of two tensors.

    Args:
        once: parameters for `_add_once`. None for kernels that always use `_add_twice`.
        twice: parameters for `_add_twice`: fixed-point multipliers of both inputs and of their sum.
        native: the scale of the kernel's result.
    """

    once: tuple[tf.Tensor, ...] | None
    twice: tuple[Any, ...]
    native: _NativeScale


def _prepare_add(a: Arguments) -> _Sum:
    native, sign = _find_native(a.params, a.output), a.attributes["sign"]
    first, second = (x.scale for x in a.params)
    rounds_once = a.family.additions == "rounded_once" and not a.wide
    return _Sum(
        once=_prepare_once(first, second, native.scale, sign) if rounds_once else None,
        twice=_find_multipliers(_count_bits(a), first, second, native.scale),
        native=_NativeScale.prepare(native, a),
    )


def _add(a: Arguments) -> tf.Tensor:
    """Compute a + b or a - b in a scale that kernels support, then convert the result."""
    prepared: _Sum = a.prepared
    return prepared.native.convert(_add_once(a, prepared.once) if prepared.once else _add_twice(a))


def _find_native(params: Sequence[QuantParams], output: QuantParams) -> QuantParams:
    """Return the output's parameters. If an input's scale is much larger, increase the scale.

    Otherwise TFLite's kernels would abort, because their multipliers must be below 1. Int8 kernels
    could also overflow 16 bits.
    """
    widest, finest = (pick(*(x.scale for x in params)) for pick in (tf.maximum, tf.minimum))
    if output.bits == 16:
        is_far, least = widest > 2.0**13 * output.scale, single(widest / 2.0**13)
    else:
        is_fine_scale = single(finest / output.scale) < 2.0**-10
        most = tf.where(
            is_fine_scale, tf.constant(2.0**5, tf.float64), tf.constant(2.0**7, tf.float64)
        )
        is_far, least = widest > most * output.scale, single(widest / 2.0**5)
    scale = tf.where(is_far, least, output.scale)
    return dataclasses.replace(output, scale=scale)


def _add_once(a: Arguments, prepared: tuple[tf.Tensor, ...]) -> tf.Tensor:
    """Add like XNNPACK: multiply both inputs by 21-bit integers, add a half, and shift once."""
    first, second, bits, half, is_supported = prepared

    def compute() -> tf.Tensor:
        x, y = (tf.cast(q, tf.int32) for q in a.q)
        total = x * first + y * second + half
        return tf.cast(tf.bitwise.right_shift(total, bits), a.q[0].dtype)

    return cond(is_supported, compute, lambda: _add_twice(a))


@trace_once
def _prepare_once(a: Any, b: Any, output: Any, sign: int) -> tuple[tf.Tensor, ...]:
    """Return the parameters of `_add_once`. The last one is False if XNNPACK refuses the sum.

    XNNPACK requires ratios of input scale / output scale from 2^-10 to below 2^8. `_find_native`
    already excludes larger ratios.
    """
    ratios = [single(scale / output) for scale in (a, b)]
    bits = 20 - fixed_point.get_exponent(tf.maximum(*ratios))
    first, second = (
        tf.cast(tf.round(factor * fixed_point.power_of_two(bits)), tf.int32) for factor in ratios
    )
    half = shift(tf.ones_like(bits), bits - 1)
    is_accepted = tf.reduce_all([factor >= 2.0**-10 for factor in ratios])
    return first, sign * second, tf.cast(bits, tf.int32), tf.cast(half, tf.int32), is_accepted


def _count_bits(a: Arguments) -> int:
    """Return by how many bits TFLite's kernel shifts inputs to the left before it adds them."""
    return 15 if a.wide else 20


def _add_twice(a: Arguments) -> tf.Tensor:
    """Add like TFLite: round both inputs in a common finer scale, add them, and round the sum.

    The optimized int16 ADD rounds inputs differently in blocks of 16 values, if both tensors have
    the same shape. Values after the last whole block are rounded like in other kernels.
    """
    x, y = (tf.cast(q, tf.int64) for q in a.q)
    bits, (*factors, to_output) = _count_bits(a), a.prepared.twice

    pairs = list(zip((x, y), factors, strict=True))

    def add(scaled: list[tf.Tensor]) -> tf.Tensor:
        return multiply(scaled[0] + a.attributes["sign"] * scaled[1], to_output)

    result = add([multiply(shift(q, bits), factor) for q, factor in pairs])
    is_add = a.attributes["sign"] > 0
    if a.wide and is_add and a.family.optimized and x.shape.is_compatible_with(y.shape):
        fast = add([multiply(q, (factor, power + bits)) for q, (factor, power) in pairs])
        of_one_shape = tf.reduce_all(tf.equal(tf.shape(x), tf.shape(y)))
        count = tf.where(of_one_shape, tf.size(result) // 16 * 16, 0)
        indices = tf.reshape(tf.range(tf.size(result)), tf.shape(result))
        result = tf.where(indices < count, fast, result)
    return tf.cast(result, a.q[0].dtype)


def _find_multipliers(bits: int, first: Any, second: Any, output: Any) -> tuple[Any, ...]:
    common = 2 * tf.maximum(first, second)
    ratios = first / common, second / common, common / (2.0**bits * output)
    return tuple(map(to_fixed_point, ratios))


def _compute_square(x: tf.Tensor) -> tf.Tensor:
    return single(x * x)


_prepare_square = prepare_table(compute_in_float32(_compute_square, xnnpack=_compute_square))


@dataclasses.dataclass(frozen=True)
class _Product:
    """The prepared parameters of a product of two tensors.

    Args:
        ratio: the product of both input scales, divided by the scale of the result.
        square: a table of x * x, if both inputs are the same tensor. Otherwise None.
        native: the scale of the kernel's result. None if it is always the output's scale.
    """

    ratio: Multiplier
    square: Entries | None = None
    native: _NativeScale | None = None


FAR = 2.0**7
"""The largest `_Product.ratio` for 8 bits."""


def _find_native_of_product(params: Sequence[QuantParams], output: QuantParams) -> QuantParams:
    """Return the output's parameters. If the product's scale is much larger, increase the scale.

    Otherwise XNNPACK could leave the product to TFLite's kernel, which overflows 16 bits on x86.
    """
    first, second = (x.scale for x in params)
    is_far = first * second > FAR * output.scale
    scale = tf.where(is_far, single(first * second / FAR), output.scale)
    return dataclasses.replace(output, scale=scale)


def _prepare_multiply(a: Arguments) -> _Product:
    if a.wide:
        factor = ratio(a.family, *(x.scale for x in a.params), by=a.output.scale)
        return _Product(Multiplier(to_fixed_point(factor)))
    native = _find_native_of_product(a.params, a.output)
    factor = ratio(a.family, *(x.scale for x in a.params), by=native.scale)
    multiplier, square = Multiplier(to_fixed_point(factor)), None
    if a.family.products is not None:
        is_float = (factor >= 2.0**-16) & (factor < 2.0**8)  # XNNPACK refuses other factors.
        multiplier = Multiplier(to_fixed_point(factor), tf.cast(factor, tf.float32), is_float)
        if a.q[0] is a.q[1]:
            square = _prepare_square(
                dataclasses.replace(a, q=a.q[:1], params=a.params[:1], output=native)
            )
    return _Product(multiplier, square, _NativeScale.prepare(native, a))


def _multiply(a: Arguments) -> tf.Tensor:
    """Compute a * b, and multiply by `_Product.ratio` in float32 or in fixed point.

    If both inputs are the same tensor, XNNPACK uses a table of squares.
    """
    prepared: _Product = a.prepared
    x, y = a.q

    def multiply_in_float(factor: tf.Tensor) -> tf.Tensor:
        if prepared.square is not None:
            return look_up(x, prepared.square)
        assert a.family.products is not None
        return a.family.products(product(x, y), factor)

    result = prepared.ratio.multiply(
        lambda: tf.cast(x, tf.int64) * tf.cast(y, tf.int64), x.dtype, multiply_in_float
    )
    return result if prepared.native is None else prepared.native.convert(result)


def accepts_two(rank: int, call: Call, attributes: Attributes, floats: bool = True) -> str | None:
    """Accepts calls with two inputs. Inputs with more than `rank` axes must have equal shapes.

    If `floats` is True, calls must return float values.
    """
    leaves = tf.nest.flatten((call.args, call.kwargs))
    shapes = [tuple(x.shape) for x in list_operands(call)]
    if any(isinstance(leaf, tf.Variable) for leaf in leaves):
        return "a variable"
    if len(shapes) != 2:
        return "it needs two input tensors"
    if len(set(shapes)) > 1 and max(map(len, shapes)) > rank:
        return f"it broadcasts more than {rank} axes"
    return accept_float(call) if floats else None


def _emit_multiply(e: Emission) -> None:
    if e.wide:
        e.add("MUL", fusedActivationFunction=e.activation)
    else:
        _emit_wide(e, "MUL", _find_native_of_product)


def _emit_wide(e: Emission, code: str, find_native: Callable[..., Any], **options: Any) -> None:
    """Add an operator. If its result needs a larger scale than the output's, also add a QUANTIZE.

    A ReLU6 is not fused, because the larger scale may not represent 6 exactly. A RELU6 follows the
    QUANTIZE instead.
    """
    output = e.params
    inputs = tuple(x.params for x in e.node.inputs if x.params)
    scale = _find_wider_scale(find_native, inputs, output)
    if scale is None:
        e.add(code, fusedActivationFunction=e.activation, **options)
        return
    shape, ends_at_6 = e.shape(e.outputs[0]), e.activation == Activation.RELU6
    native = dataclasses.replace(output, scale=scale)
    wider = e.temporary("wider", shape, native)
    fused = Activation.RELU if ends_at_6 else e.activation
    e.add(code, outputs=[wider], fusedActivationFunction=fused, **options)
    target = e.temporary("unclipped", shape, output) if ends_at_6 else e.outputs[0]
    e.add("QUANTIZE", [wider], [target])
    if ends_at_6:
        e.add("RELU6", [target], e.outputs)


@functools.lru_cache(maxsize=1024)
def _find_wider_scale(
    find_native: Callable[..., Any], inputs: tuple[QuantParams, ...], output: QuantParams
) -> np.float32 | None:
    """Return the scale of a kernel's result. Return None if it is the output's scale."""
    native = find_native([params.as_tensors() for params in inputs], output.as_tensors())
    return np.float32(native.scale) if bool(native.scale > output.scale) else None


ADD = Op(
    "add",
    _add,
    lambda e: _emit_wide(
        e, "ADD" if e.attributes["sign"] > 0 else "SUB", _find_native, potScaleInt16=False
    ),
    prepare=_prepare_add,
    doc="sums of two tensors, or of a tensor and a constant",
    layers=(layers.Add,),
    kinds=("add",),
    attributes=lambda call: {"sign": 1},
    defaults={"sign": 1},
    accepts=partial(accepts_two, 6),
    can_merge_relu=True,
    elementwise=True,
    quantizes_constants=True,
)

SUBTRACT = dataclasses.replace(
    ADD,
    name="subtract",
    doc="differences of two tensors, or of a tensor and a constant",
    layers=(layers.Subtract,),
    kinds=("subtract",),
    attributes=lambda call: {"sign": -1},
    defaults={"sign": -1},
)

MULTIPLY = dataclasses.replace(
    ADD,
    name="multiply",
    prepare=_prepare_multiply,
    compute=_multiply,
    emit=_emit_multiply,
    doc="products of two tensors, or of a tensor and a constant",
    layers=(layers.Multiply,),
    kinds=("multiply",),
    attributes=lambda call: {},
    defaults={},
)


def _make_extremum(name: str, function: Callable[[Any, Any], Any], layer: type) -> Op:
    return dataclasses.replace(
        ADD,
        name=name,
        prepare=None,
        compute=lambda a: function(*a.q),
        emit=lambda e: e.add(name.upper()),
        doc=f"the elementwise {name} of two tensors, or of a tensor and a constant",
        layers=(layer,),
        kinds=(name,),
        attributes=lambda call: {},
        defaults={},
        accepts=partial(accepts_two, 5),
        output=SharedRange(),
        can_merge_relu=False,
    )


MAXIMUM = _make_extremum("maximum", tf.maximum, layers.Maximum)
MINIMUM = _make_extremum("minimum", tf.minimum, layers.Minimum)
