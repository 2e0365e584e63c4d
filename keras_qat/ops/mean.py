"""Means along axes.

In TFLite's kernels, sums of more than `MOST_WIDE` 16-bit values overflow. Such a mean is computed
in several steps, each a mean of fewer values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_qat.arithmetic.fixed_point import get_exponent, multiply, shift, to_fixed_point
from keras_qat.arithmetic.plain_operations import product, quotient
from keras_qat.arithmetic.quant_params import single
from keras_qat.graph.calls import Call
from keras_qat.graph.operations import get_kind
from keras_qat.keras2.backend import layers
from keras_qat.ops.emission import Emission
from keras_qat.ops.op import Arguments, Attributes, OwnRange
from keras_qat.ops.pooling import REDUCE_MAX
from keras_qat.ops.weighted_sums import EXACT

MOST_WIDE = 2**16
"""The maximum number of 16-bit values with a sum of 32 bits."""

Sizes = Sequence[int | None]


class Step(NamedTuple):
    """One step of a mean: means of parts of the values, before the mean of all results.

    Args:
        axes: the axes of the mean, which then have size 1.
        parts: number of parts of the axis that are averaged separately; 0 to average the axes. The
            last part is padded with zeros, at most 1 / `MOST_WIDE` of all values.
        size: the size of each part.
    """

    axes: tuple[int, ...]
    parts: int = 0
    size: int = 0

    @property
    def mean_axes(self) -> tuple[int, ...]:
        """The axes of the mean in the result of `split`."""
        return (self.axes[0] + 1,) if self.parts else self.axes

    def padding(self, shape: Sizes) -> list[tuple[int, int]]:
        """Returns how many zeros pad each axis, for the last part."""
        (axis,) = self.axes
        return [
            (0, self.parts * self.size - size if index == axis and size else 0)
            for index, size in enumerate(shape)
        ]

    def split(self, shape: Sizes) -> list[int | None]:
        """Returns the shape with an axis of parts."""
        (axis,) = self.axes
        return [*shape[:axis], self.parts, self.size, *shape[axis + 1 :]]

    def result(self, shape: Sizes) -> list[int | None]:
        """Returns the shape of the results."""
        size = self.parts or 1
        return [size if axis in self.axes else old for axis, old in enumerate(shape)]


def wide_steps(shape: Sizes, axes: Sequence[int]) -> Iterator[Step]:
    """Returns the steps of a mean of 16-bit values before its last step."""
    sizes = {axis: shape[axis] for axis in axes}
    if None in sizes.values():
        return
    known = {axis: int(size or 0) for axis, size in sizes.items()}
    for axis, size in known.items():
        if size > MOST_WIDE:
            known[axis] = parts = -(-size // MOST_WIDE)
            yield Step((axis,), parts, -(-size // parts))
    while math.prod(known.values()) > MOST_WIDE:
        group: dict[int, int] = {}
        for axis, size in reversed(known.items()):
            if size > 1 and math.prod(group.values()) * size <= MOST_WIDE:
                group[axis] = size
        yield Step(tuple(sorted(group)))
        known |= dict.fromkeys(group, 1)


def _prepare_mean(a: Arguments) -> tuple[Any, ...]:
    """Return the factor of sums. For XNNPACK it lacks the count if that is unknown."""
    (params,), output = a.params, a.output
    if _is_fixed_point(a):
        return to_fixed_point(params.scale / output.scale)
    count = _find_count(a)
    if a.family.means == "one_factor":
        scales = params.scale, output.scale
        return scales if count is None else (_find_one_factor(scales, count),)
    prepared = single(params.scale / output.scale), params.zero_point, output.zero_point
    return prepared if count is None else _factor_and_offset(a, prepared, count)


def _find_count(a: Arguments) -> int | None:
    """Return the number of values of a mean; None if it is unknown."""
    shape = a.q[0].shape
    sizes = [None] if shape.rank is None else [shape[axis] for axis in a.attributes["axes"]]
    return None if None in sizes else math.prod(sizes)  # type: ignore[arg-type]


def _factor_and_offset(a: Arguments, prepared: Any, count: Any) -> tuple[Any, ...]:
    """Return XNNPACK's factor of sums, the zero points in a sum, and the offsets that it adds."""
    (ratio, zero, zero_point), size = prepared, tf.cast(count, tf.float64)
    factor, zeros = single(ratio * single(1.0 / size)), size * zero
    return factor, zeros, single(zero_point - _round_summand(a, zeros * factor)), zero_point


def _round_summand(a: Arguments, product: Any) -> Any:
    """Round a product before an addition, unless one instruction computes both."""
    return product if a.family.means == "fused" else single(product)


def _find_one_factor(scales: tuple[Any, Any], count: Any) -> Any:
    """Return onnxruntime's factor of sums."""
    before, after = scales
    return single(quotient(before, single(after * tf.cast(count, tf.float64))))


def _is_fixed_point(a: Arguments) -> bool:
    return a.family.means == "fixed_point" or a.wide


def _mean(a: Arguments) -> Any:
    """Compute means along axes, in several steps if 16-bit sums would overflow."""
    if not a.wide:
        return _mean_at_once(a)
    (x,), prepared = a.q, to_fixed_point(tf.constant(1.0))
    # The file uses the sizes of the model if they are known.
    sizes = zip(x.shape, a.call.inputs[0].shape, strict=True)
    shape = [there if size is None else size for size, there in sizes]
    for step in wide_steps(shape, a.attributes["axes"]):
        if step.parts:
            (axis,), sizes_now = step.axes, tf.shape(x)
            split = [sizes_now[:axis], [step.parts, step.size], sizes_now[axis + 1 :]]
            x = tf.reshape(tf.pad(x, step.padding(shape)), tf.concat(split, 0))
        attributes = {"axes": step.mean_axes, "keepdims": not step.parts}
        of_step = dataclasses.replace(a, q=[x], attributes=attributes, prepared=prepared)
        x, shape = _mean_at_once(of_step), step.result(shape)
    return _mean_at_once(dataclasses.replace(a, q=[x]))


def _mean_at_once(a: Arguments) -> Any:
    """Compute means along axes.

    XNNPACK multiplies the sum, including zero points, by a float32 factor, and adds an offset. ARM
    rounds only once for both. TFLite divides a shifted 31-bit multiplier by the number of values.
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
    if a.family.means == "one_factor":
        (only,) = prepared if len(prepared) == 1 else (_find_one_factor(prepared, count),)
        return tf.cast(a.family.halves(single(product(sums, only))), x.dtype)
    if len(prepared) == 3:  # The count was unknown.
        prepared = _factor_and_offset(a, prepared, count)
    factor, zeros, offset, zero_point = prepared
    scaled = tf.round(single(_round_summand(a, (sums + zeros) * factor) + offset))
    return tf.cast(scaled - zero_point, x.dtype)


def _emit(e: Emission) -> None:
    """Add a mean, after the steps of a mean of many 16-bit values."""
    source, axes = e.source, e.attributes["axes"]
    for number, step in enumerate(wide_steps(e.shape(source), axes) if e.wide else ()):
        name = f"step_{number}"
        result = e.temporary(name, tuple(step.result(e.shape(source))), source)
        if step.parts:
            source = _split(e, source, step, name)
        inputs = [source, e.constant(f"{name}/axes", step.mean_axes)]
        e.add("MEAN", inputs, [result], keepDims=not step.parts)
        source = result
    e.add("MEAN", [source, e.constant("axes", axes)], keepDims=e.attributes["keepdims"])


def _split(e: Emission, source: int, step: Step, name: str) -> int:
    """Pad an axis with zeros, and split it as in `Step.split`."""
    shape, padding = e.shape(source), step.padding(e.shape(source))
    if any(after for _, after in padding):
        filled = [size and size + after for size, (_, after) in zip(shape, padding, strict=True)]
        padded = e.temporary(f"{name}/padded", tuple(filled), source)
        e.add("PAD", [source, e.constant(f"{name}/padding", padding)], [padded])
        source = padded
    return e.make_reshaped(source, tuple(step.split(shape)), f"{name}/parts")


def _accepts_mean(call: Call, attributes: Attributes) -> str | None:
    is_masked = not get_kind(call) and any(value.masked for value in call.inputs)
    return REDUCE_MAX.accepts(call, attributes) or ("with a mask" if is_masked else None)


MEAN = dataclasses.replace(
    REDUCE_MAX,
    name="mean",
    prepare=_prepare_mean,
    compute=_mean,
    emit=_emit,
    doc="means along axes",
    output=OwnRange(),
    falls_back_to_input_range=True,
    onnx_kernel=True,
    layers=tuple(getattr(layers, f"GlobalAveragePooling{n}D") for n in (1, 2, 3)),
    kinds=("reduce_mean",),
    accepts=_accepts_mean,
)
