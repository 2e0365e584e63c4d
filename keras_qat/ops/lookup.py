"""Operators that compute one quantized value from one: they look it up in a table.

A new operator of this sort is one `lookup_row`, from a real function. Where TFLite has no integer
kernel of it, the file holds the table and looks it up: CAST, ADD, GATHER.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.control_flow import traced_once
from keras_qat.arithmetic.kernel_families import REFERENCE, KernelFamily
from keras_qat.arithmetic.quant_params import QuantParams, round_half_away, single
from keras_qat.frontend.graph import Call
from keras_qat.frontend.keras2.backend import keras
from keras_qat.ops.emission import Emission
from keras_qat.ops.op import Arguments, Attributes, Op, OwnRange, Prepare
from keras_qat.tflite.schema import TYPES

__all__ = [
    "LOOKUPS",
    "Entries",
    "Kernel",
    "by_table",
    "in_float32",
    "looked_up",
    "lookup_row",
    "of_reals",
]

Table = Callable[[KernelFamily, Any, QuantParams, QuantParams, Attributes], Any]
"""Computes the entries of a table in float64.

The arguments are the kernel family, all quantized values that the input's type can hold, the
parameters of input and output, and the attributes. Zero points are subtracted from the values."""


def _entries_of(
    table: Table, family: KernelFamily
) -> Callable[[QuantParams, QuantParams, Attributes], Any]:
    """A function that makes a table: 256 entries for int8, 65536 for int16, the lowest one first.

    Of the parameters, which may be tensors, and attributes.
    """

    @traced_once
    def made(bits: tuple[int, int], attributes: Attributes, *numbers: Any) -> Any:
        x = QuantParams(numbers[0], numbers[1], bits[0])
        q = tf.range(2.0 ** (16 if x.bits == 16 else 8), dtype=tf.float64) + x.lowest
        output = QuantParams(numbers[2], numbers[3], bits[1])
        return table(family, q - x.zero_point, x, output, attributes)

    def entries(x: QuantParams, output: QuantParams, attributes: Attributes) -> Any:
        x, output = x.as_tensors(), output.as_tensors()
        numbers = x.scale, x.zero_point, output.scale, output.zero_point
        return made((x.bits, output.bits), dict(attributes), *numbers)

    return entries


@dataclasses.dataclass(frozen=True)
class Entries:
    """A table for all quantized values of an input.

    Args:
        values: the output's, for the lowest value of the input first.
        first: what brings the input's values less their zero point to places that count from 0.
    """

    values: Any
    first: Any


def by_table(table: Table) -> Prepare:
    """Prepares the table as a family of kernels has it; `looked_up` computes."""
    entries = functools.cache(functools.partial(_entries_of, table))

    def prepare(a: Arguments) -> Entries:
        (x,), dtype = a.params, a.q[0].dtype
        values = entries(a.family)(x, a.output, a.attributes)
        return Entries(tf.cast(values, dtype), tf.cast(x.zero_point - x.lowest, dtype))

    return prepare


def looked_up(q: Any, entries: Entries) -> Any:
    """The entry of each quantized value."""
    return tf.gather(entries.values, tf.cast(q + entries.first, tf.int32))


def _of_function(function: Callable[..., Any]) -> Table:
    """Returns the table of a real function, computed in float64 and rounded half away from zero.

    Infinite values become the end of the range. What is no number becomes zero.
    """

    def table(
        family: KernelFamily, q: Any, x: QuantParams, output: QuantParams, attributes: Attributes
    ) -> Any:
        values = function(q * x.scale, **attributes)
        values = tf.where(tf.math.is_nan(values), tf.zeros_like(values), values)
        low, high = (each - output.zero_point for each in (output.lowest, output.highest))
        return tf.clip_by_value(round_half_away(values / output.scale), low, high)

    return table


def in_float32(function: Callable[..., Any], xnnpack: Callable[..., Any] | None = None) -> Table:
    """A table as int8 kernels make it: in float32, times the inverse of the output's scale.

    TFLite rounds halves away from zero, then adds the zero point. XNNPACK adds it in float32, then
    rounds halves to even.

    Args:
        function: of real numbers, float32 ones in float64, and attributes.
        xnnpack: the same as XNNPACK computes it, if it has a table of it.
    """

    def table(
        family: KernelFamily, q: Any, x: QuantParams, output: QuantParams, attributes: Attributes
    ) -> Any:
        adds_first = xnnpack is not None and family.tables == "half_to_even"
        real = xnnpack if adds_first and xnnpack is not None else function
        values = single(real(single(q * x.scale), **attributes))
        scaled, zero_point = single(values * single(1.0 / output.scale)), output.zero_point
        if adds_first:
            return tf.round(single(scaled + zero_point)) - zero_point
        return round_half_away(scaled)

    return table


@dataclasses.dataclass(frozen=True)
class Kernel:
    """TFLite's own int8 kernel of a function.

    Args:
        code: its name in TFLite.
        table: what it computes.
        fits: whether it computes with these attributes.
        fields: from attributes to the options.
        takes: whether it takes these parameters of input and output.
    """

    code: str
    table: Table
    fits: Callable[[Attributes], bool] = lambda attributes: True
    fields: Callable[[Attributes], Mapping[str, Any]] = lambda attributes: {}
    takes: Callable[[QuantParams, QuantParams], Any] = lambda x, output: tf.constant(True)


def emit_entries(e: Emission, entries: np.ndarray) -> None:
    """Writes a table and what looks it up. Positions count from 0, so that half of it is added.

    Args:
        e: the operator.
        entries: the output's quantized values, for the lowest value of the input first.
    """
    shape = e.shape(e.inputs[0])
    cast, places = (e.temporary(name, shape, "int32") for name in ("cast", "places"))
    given = e.builder.graph.tensors[e.inputs[0]].type
    e.add("CAST", outputs=[cast], inDataType=given, outDataType=TYPES["int32"])
    half = e.constant("half", entries.size // 2)
    e.add("ADD", [cast, half], [places])
    params = e.node.output.params
    table = e.constant("table", entries, params)
    e.add("GATHER", [table, places], axis=0)


def of_reals(call: Call, attributes: Attributes | None = None) -> str | None:
    """Why a call has no kernel: it computes something else than real numbers. An `Op.accepts`."""
    return None if call.output.is_float else f"computes {call.output.dtype}"


def _where(takes: Callable[[QuantParams, QuantParams], Any], table: Table, other: Table) -> Table:
    """A kernel's table where it takes such parameters, else the other one."""
    return lambda family, q, x, output, attributes: tf.where(
        takes(x, output),
        table(family, q, x, output, attributes),
        other(family, q, x, output, attributes),
    )


def lookup_row(
    name: str,
    function: Callable[..., Any],
    doc: str,
    *,
    kernel: Kernel | None = None,
    **fields: Any,
) -> Op:
    """The row of a function of one number.

    Args:
        name, doc: as in `Op`.
        function: in TensorFlow, of a float64 tensor and the attributes. Where it is infinite, the
            result is the end of the output's range, so that e.g. a logarithm of what is not
            positive is the lowest value.
        kernel: TFLite's own kernel, for 8 bits.
        fields: the row's other fields.
    """
    generic = _of_function(function)
    entries, prepare_generic = _entries_of(generic, REFERENCE), by_table(generic)
    prepare_kernel = prepare_generic
    if kernel is not None:
        prepare_kernel = by_table(_where(kernel.takes, kernel.table, generic))

    def has_kernel(wide: bool, attributes: Attributes) -> bool:
        return kernel is not None and not wide and kernel.fits(attributes)

    def prepare(a: Arguments) -> Entries:
        return (prepare_kernel if has_kernel(a.wide, a.attributes) else prepare_generic)(a)

    def compute(a: Arguments) -> Any:
        return looked_up(a.q[0], a.numbers)

    def emit(e: Emission) -> None:
        (x,), output = e.node.inputs, e.node.output.params
        assert x.params is not None
        assert output is not None
        ends = x.params.as_tensors(), output.as_tensors()
        if kernel is not None and has_kernel(e.wide, e.attributes) and kernel.takes(*ends):
            e.add(kernel.code, **kernel.fields(e.attributes))
            return
        found = entries(x.params, output, e.attributes).numpy() + output.zero_point
        emit_entries(e, found.astype(output.dtype))

    return Op(
        name,
        compute,
        emit,
        prepare=prepare,
        doc=doc,
        accepts=of_reals,
        elementwise=True,
        **fields,
    )


_activations = keras.activations


def _log(x: Any) -> Any:
    return tf.math.log(tf.maximum(x, 0.0))


def _softplus(x: Any) -> Any:
    return tf.maximum(x, 0.0) + tf.math.log1p(tf.exp(-tf.abs(x)))


_NON_NEGATIVE = OwnRange(non_negative=True)

LOOKUPS: tuple[Op, ...] = (
    lookup_row(
        "selu",
        lambda x: 1.0507009873554805 * tf.where(x < 0, 1.6732632423543772 * tf.math.expm1(x), x),
        "scaled exponential linear unit",
        symbols=("nn.selu",),
        functions=(_activations.selu, tf.nn.selu),
    ),
    lookup_row(
        "softplus",
        _softplus,
        "log(1 + exp(x))",
        symbols=("math.softplus",),
        functions=(_activations.softplus, tf.nn.softplus),
        output=_NON_NEGATIVE,
    ),
    lookup_row(
        "mish",
        lambda x: x * tf.tanh(_softplus(x)),
        "x * tanh(softplus(x))",
        functions=(_activations.mish,),
    ),
    lookup_row(
        "softsign",
        lambda x: x / (1.0 + tf.abs(x)),
        "x / (1 + |x|)",
        symbols=("nn.softsign",),
        functions=(_activations.softsign, tf.nn.softsign),
    ),
    lookup_row(
        "exp",
        tf.exp,
        "exponential function",
        symbols=("math.exp",),
        functions=(_activations.exponential, tf.exp),
        output=_NON_NEGATIVE,
        kernel=Kernel("EXP", in_float32(tf.exp)),
    ),
    lookup_row(
        "log",
        _log,
        "natural logarithm; the lowest value of what is not positive",
        symbols=("math.log",),
        functions=(tf.math.log,),
        kernel=Kernel("LOG", in_float32(_log)),
    ),
    lookup_row(
        "sqrt",
        lambda x: tf.sqrt(tf.maximum(x, 0.0)),
        "square root; 0 of what is negative",
        symbols=("math.sqrt",),
        functions=(tf.sqrt,),
        output=_NON_NEGATIVE,
    ),
    lookup_row(
        "rsqrt",
        lambda x: 1.0 / tf.sqrt(tf.maximum(x, 0.0)),
        "1 / square root; the highest value of what is not positive",
        symbols=("math.rsqrt",),
        functions=(tf.math.rsqrt,),
        output=_NON_NEGATIVE,
    ),
)
