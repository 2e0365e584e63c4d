"""Means along axes."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic.fixed_point import get_exponent, multiply, shift, to_fixed_point
from keras_qat.arithmetic.quant_params import single
from keras_qat.graph.calls import Call, multiply_sizes
from keras_qat.graph.operations import get_kind
from keras_qat.keras2.backend import layers
from keras_qat.ops.op import Arguments, Attributes, OwnRange
from keras_qat.ops.pooling import REDUCE_MAX, emit_reduce
from keras_qat.ops.weighted_sums import EXACT

MOST_WIDE = 2**16
"""The maximum number of int16 values that kernels can sum in 32 bits without overflow."""


def _prepare_mean(a: Arguments) -> tuple[Any, ...]:
    """Return the constants for `_mean`.

    If an averaged axis has an unknown size, `_mean` computes some constants itself.
    """
    (params,), output = a.params, a.output
    if _is_fixed_point(a):
        return to_fixed_point(params.scale / output.scale)
    count = _find_count(a)
    prepared = single(params.scale / output.scale), params.zero_point, output.zero_point
    return prepared if count is None else _factor_and_offset(a, prepared, count)


def _find_count(a: Arguments) -> int | None:
    shape = a.q[0].shape
    sizes = [None] if shape.rank is None else [shape[axis] for axis in a.attributes["axes"]]
    return None if None in sizes else math.prod(sizes)  # type: ignore[arg-type]


def _factor_and_offset(a: Arguments, prepared: Any, count: Any) -> tuple[Any, ...]:
    """Return `(factor, zeros, offset, zero_point)` for XNNPACK's formula.

    The quantized mean is round((sum + zeros) * factor + offset). `sum` is the sum of (q - z) for
    input values q with zero point z. `zeros` is `count` times z.
    """
    (ratio, zero, zero_point), size = prepared, tf.cast(count, tf.float64)
    factor, zeros = single(ratio * single(1.0 / size)), size * zero
    return factor, zeros, single(zero_point - _round_summand(a, zeros * factor)), zero_point


def _round_summand(a: Arguments, product: Any) -> Any:
    """Round a product to float32, unless the kernel rounds only after the addition."""
    return product if a.family.means == "fused" else single(product)


def _is_fixed_point(a: Arguments) -> bool:
    return a.family.means == "fixed_point" or a.wide


def _mean(a: Arguments) -> Any:
    """Compute means along axes, like the kernels.

    XNNPACK multiplies the sum by a float32 factor, and adds an offset. On ARM, it rounds only once,
    after the addition. TFLite multiplies the sum by a fixed-point number.
    """
    (x,), (params,) = a.q, a.params
    axes = [axis % x.shape.rank for axis in a.attributes["axes"]]
    sizes = [x.shape[axis] for axis in axes]
    most = math.prod(size or 2**24 for size in sizes) * 2**params.bits
    adding = x if most < EXACT else tf.cast(x, tf.float64)
    sums = tf.cast(tf.reduce_sum(adding, axes, a.attributes["keepdims"]), tf.float64)
    count: Any = tf.constant(_find_count(a) or 0, tf.int64)
    if None in sizes:
        count = tf.reduce_prod(tf.gather(tf.shape(x, tf.int64), axes))
    if _is_fixed_point(a):
        multiplier, exponent = a.prepared
        bits = tf.minimum(tf.minimum(get_exponent(tf.cast(count, tf.float64)), 32), 31 + exponent)
        factor = shift(multiplier, bits) // count, exponent - bits
        return tf.cast(multiply(tf.cast(sums, tf.int64), factor), x.dtype)
    prepared: Any = a.prepared
    if len(prepared) == 3:  # The count was unknown.
        prepared = _factor_and_offset(a, prepared, count)
    factor, zeros, offset, zero_point = prepared
    scaled = tf.round(single(_round_summand(a, (sums + zeros) * factor) + offset))
    return tf.cast(scaled - zero_point, x.dtype)


def _has_few_values(call: Call) -> bool:
    """Return True if one mean has at most `MOST_WIDE` values, or if the number is unknown."""
    sizes = [call.inputs[0].shape[axis] for axis in MEAN.attributes(call)["axes"]]
    return (multiply_sizes(sizes) or 0) <= MOST_WIDE


def _accepts_mean(call: Call, attributes: Attributes) -> str | None:
    is_masked = not get_kind(call) and any(value.masked for value in call.inputs)
    return REDUCE_MAX.accepts(call, attributes) or ("it has a mask" if is_masked else None)


MEAN = dataclasses.replace(
    REDUCE_MAX,
    name="mean",
    prepare=_prepare_mean,
    compute=_mean,
    emit=partial(emit_reduce, "MEAN"),
    accepts_wide=_has_few_values,
    doc="means along axes",
    output=OwnRange(),
    falls_back_to_input_range=True,
    layers=tuple(getattr(layers, f"GlobalAveragePooling{n}D") for n in (1, 2, 3)),
    kinds=("reduce_mean",),
    accepts=_accepts_mean,
)
