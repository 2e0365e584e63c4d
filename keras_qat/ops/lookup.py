"""Operators that compute an elementwise function by a lookup table.

A table contains the function's result for each of the 256 int8 values. If TFLite has no integer
kernel for the function, the file contains the table. CAST, ADD and GATHER look up values in it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic.control_flow import trace_once
from keras_qat.arithmetic.kernel_families import REFERENCE, KernelFamily
from keras_qat.arithmetic.plain_operations import gather
from keras_qat.arithmetic.quant_params import QuantParams, round_half_away, single
from keras_qat.graph.calls import Call
from keras_qat.ops.emission import Emission
from keras_qat.ops.op import Arguments, Attributes, Op, Prepare

Table = Callable[[Arguments], tf.Tensor]
"""A function that computes the entries of a table in float64. In its `Arguments`, `q` holds all
possible values of the input, relative to the zero point."""


@functools.cache
def _make_tabulator(
    table: Table, family: KernelFamily
) -> Callable[[QuantParams, QuantParams, Attributes], tf.Tensor]:
    @trace_once
    def compute(
        bits: tuple[int, int], attributes: Attributes, *ends: tuple[tf.Tensor, tf.Tensor]
    ) -> tf.Tensor:
        x, output = (QuantParams(*end, of_end) for end, of_end in zip(ends, bits, strict=True))
        lowest_first = tf.range(2.0 ** (16 if x.bits == 16 else 8), dtype=tf.float64)
        q = lowest_first + x.lowest - x.zero_point
        no_call: Any = None
        return table(Arguments(family, attributes, [q], [x], output, no_call))

    def tabulate(x: QuantParams, output: QuantParams, attributes: Attributes) -> tf.Tensor:
        x, output = x.as_tensors(), output.as_tensors()
        ends = [(end.scale, end.zero_point) for end in (x, output)]
        return compute((x.bits, output.bits), dict(attributes), *ends)

    return tabulate


@dataclasses.dataclass(frozen=True)
class Entries:
    """A lookup table for all quantized values of an input.

    Args:
        values: the output for each quantized value of the input, from the lowest to the highest.
        first: the index of the entry for the input's zero point.
        of_eights: a second table for kernels that process 8 elements at a time. They use `values`
            only for the last `size % 8` elements. None if there is only one table.
    """

    values: tf.Tensor
    first: tf.Tensor
    of_eights: tf.Tensor | None = None


def prepare_table(table: Table, of_neon: Table | None = None) -> Prepare:
    """Returns a function for `Op.prepare` that computes a lookup table.

    Args:
        table: a function that computes the table.
        of_neon: a function that computes the table for ARM's vector instructions (NEON), which
            process 8 elements at a time. None means that both tables are the same.
    """

    def prepare(a: Arguments) -> Entries:
        (x,), dtype = a.params, a.q[0].dtype
        tables = (table, of_neon) if of_neon and a.family.neon else (table,)
        values = [_make_tabulator(one, a.family)(x, a.output, a.attributes) for one in tables]
        first, *of_eights = (tf.cast(of_one, dtype) for of_one in values)
        return Entries(first, tf.cast(x.zero_point - x.lowest, dtype), *of_eights)

    return prepare


def look_up(q: tf.Tensor, entries: Entries) -> tf.Tensor:
    positions = tf.cast(q + entries.first, tf.int32)
    values = gather(entries.values, positions)
    if entries.of_eights is None:
        return values
    order = tf.reshape(tf.range(tf.size(q)), tf.shape(q))
    in_eights = order < tf.size(q) // 8 * 8
    return tf.where(in_eights, gather(entries.of_eights, positions), values)


def compute_by_table(a: Arguments) -> tf.Tensor:
    return look_up(a.q[0], a.prepared)


def compute_in_float64(function: Callable[..., tf.Tensor], a: Arguments) -> tf.Tensor:
    """Computes a table from a float function. Rounds halves away from zero.

    Results are clipped to the output's range. NaN becomes the quantized value of 0.
    """
    (q,), (x,), output = a.q, a.params, a.output
    values = function(q * x.scale, **a.attributes)
    values = tf.where(tf.math.is_nan(values), tf.zeros_like(values), values)
    low, high = (end - output.zero_point for end in (output.lowest, output.highest))
    return tf.clip_by_value(round_half_away(values / output.scale), low, high)


def compute_in_float32(
    function: Callable[..., tf.Tensor], xnnpack: Callable[..., tf.Tensor] | None = None
) -> Table:
    """Returns a function that computes a table in float32, with the same results as int8 kernels.

    TFLite's kernels round halves away from zero, and then add the zero point. XNNPACK's kernels
    first add the zero point in float32, and then round halves to even.

    Args:
        function: a function of a tensor and the attributes. The tensor has float32 precision, but
            the type float64.
        xnnpack: the same function with XNNPACK's operations. None if XNNPACK has no kernel.
    """

    def table(a: Arguments) -> tf.Tensor:
        (q,), (x,), output = a.q, a.params, a.output
        adds_first = xnnpack is not None and a.family.tables == "half_to_even"
        compute = xnnpack if adds_first and xnnpack is not None else function
        values = single(compute(single(q * x.scale), **a.attributes))
        scaled, zero_point = single(values * single(1.0 / output.scale)), output.zero_point
        if adds_first:
            return tf.round(single(scaled + zero_point)) - zero_point
        return round_half_away(scaled)

    return table


@dataclasses.dataclass(frozen=True)
class Kernel:
    """TFLite's int8 kernel for an elementwise function.

    Args:
        code: the operator's name in TFLite.
        table: a function that computes the kernel's table.
        of_neon: a function that computes the table for ARM's vector instructions. None if both
            tables are the same.
        fits: a function that returns True if the kernel supports an operator's attributes.
        fields: a function that returns the options in TFLite's schema, given the attributes.
        supports: a function that returns True if the kernel supports the quantization parameters
            of input and output.
    """

    code: str
    table: Table
    of_neon: Table | None = None
    fits: Callable[[Attributes], bool] = lambda attributes: True
    fields: Callable[[Attributes], Mapping[str, Any]] = lambda attributes: {}
    supports: Callable[[QuantParams, QuantParams], tf.Tensor] = lambda x, output: tf.constant(True)


def accept_float(call: Call, attributes: Attributes | None = None) -> str | None:
    """Accepts a call if its output in the Keras model is float. Used as `Op.accepts`."""
    return None if call.output.is_float else f"computes {call.output.dtype}"


def lookup_row(
    name: str,
    function: Callable[..., tf.Tensor],
    doc: str,
    *,
    kernel: Kernel | None = None,
    **fields: Any,
) -> Op:
    """Returns an `Op` that computes an elementwise function by a lookup table.

    Args:
        name, doc: as in `Op`.
        function: a TensorFlow function of a float64 tensor and the attributes. Infinite results
            become an end of the output's range. For example, log(0) is the lowest value.
        kernel: TFLite's kernel for 8 bits. None if TFLite has no kernel.
        fields: other fields of the `Op`.
    """
    generic = partial(compute_in_float64, function)
    tabulate = _make_tabulator(generic, REFERENCE)

    def has_kernel(wide: bool, attributes: Attributes) -> bool:
        return kernel is not None and not wide and kernel.fits(attributes)

    def table(a: Arguments, neon: bool = False) -> tf.Tensor:
        if kernel is None or not has_kernel(a.wide, a.attributes):
            return generic(a)
        own = kernel.of_neon if neon and kernel.of_neon else kernel.table
        return tf.where(kernel.supports(a.params[0], a.output), own(a), generic(a))

    of_neon = functools.partial(table, neon=True) if kernel and kernel.of_neon else None

    def emit(e: Emission) -> None:
        x, output = e.input_params, e.params
        ends = x.as_tensors(), output.as_tensors()
        if kernel is not None and has_kernel(e.wide, e.attributes) and kernel.supports(*ends):
            e.add(kernel.code, **kernel.fields(e.attributes))
            return
        values = tabulate(x, output, e.attributes).numpy() + output.zero_point
        shape = e.shape(e.inputs[0])
        cast, positions = (e.temporary(name, shape, "int32") for name in ("cast", "places"))
        e.cast(e.inputs[0], cast)  # Indices begin at 0.
        e.add("ADD", [cast, e.constant("half", values.size // 2)], [positions])
        e.add(
            "GATHER", [e.constant("table", values.astype(output.dtype), output), positions], axis=0
        )

    return Op(
        name,
        compute_by_table,
        emit,
        prepare=prepare_table(table, of_neon),
        doc=doc,
        elementwise=True,
        **{"accepts": accept_float, **fields},
    )
