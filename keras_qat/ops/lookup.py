"""Operators that compute one quantized value from one: they look it up in a table.

A new operator of this sort is one `lookup_row`, from a real function. Where TFLite has no integer
kernel of it, the file holds the table and looks it up: CAST, ADD, GATHER.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from keras_qat.arithmetic.control_flow import trace_once
from keras_qat.arithmetic.kernel_families import REFERENCE, KernelFamily
from keras_qat.arithmetic.quant_params import QuantParams, round_half_away, single
from keras_qat.graph.calls import Call
from keras_qat.helper_layers.elementwise_functions import Formula, evaluate_formula
from keras_qat.helper_layers.finite_functions import Logarithm, SquareRoot
from keras_qat.keras2.backend import keras, layers
from keras_qat.ops.emission import Emission
from keras_qat.ops.op import Arguments, Attributes, Op, OwnRange, Prepare

Table = Callable[[Arguments], Any]
"""Computes the entries of a table in float64, as an `Op.compute` that is not prepared: `q` holds
all quantized values that the input's type can hold, less the zero point. There is no call."""


@functools.cache
def _entries_of(
    table: Table, family: KernelFamily
) -> Callable[[QuantParams, QuantParams, Attributes], Any]:
    """Returns a function that makes a table: 256 entries for int8, 65536 for int16, lowest first.

    It takes the parameters of input and output, which may be tensors, and attributes.
    """

    @trace_once
    def entries_of(bits: tuple[int, int], attributes: Attributes, *ends: tuple[Any, Any]) -> Any:
        x, output = (QuantParams(*end, of_end) for end, of_end in zip(ends, bits, strict=True))
        q = tf.range(2.0 ** (16 if x.bits == 16 else 8), dtype=tf.float64) + x.lowest
        no_call: Any = None
        return table(Arguments(family, attributes, [q - x.zero_point], [x], output, no_call))

    def entries(x: QuantParams, output: QuantParams, attributes: Attributes) -> Any:
        x, output = x.as_tensors(), output.as_tensors()
        ends = [(end.scale, end.zero_point) for end in (x, output)]
        return entries_of((x.bits, output.bits), dict(attributes), *ends)

    return entries


@dataclasses.dataclass(frozen=True)
class Entries:
    """A table for all quantized values of an input.

    Args:
        values: the output's, for the lowest value of the input first.
        first: the number to add to the input's values less their zero point, so that positions
            count from 0.
        of_eights: another table, for all values but the last `size % 8`; or None.
    """

    values: Any
    first: Any
    of_eights: Any = None


def prepare_table(table: Table, of_neon: Table | None = None) -> Prepare:
    """Prepares the table as a family of kernels has it; `compute_by_table` computes.

    Args:
        table: the table.
        of_neon: the table of ARM's vector instructions, which take 8 values at a time, if it
            differs.
    """

    def prepare(a: Arguments) -> Entries:
        (x,), dtype = a.params, a.q[0].dtype
        tables = (table, of_neon) if of_neon and a.family.neon else (table,)
        values = [_entries_of(one, a.family)(x, a.output, a.attributes) for one in tables]
        values, *of_eights = (tf.cast(value, dtype) for value in values)
        return Entries(values, tf.cast(x.zero_point - x.lowest, dtype), *of_eights)

    return prepare


def look_up(q: Any, entries: Entries) -> Any:
    """Looks up the entry of each quantized value."""
    positions = tf.cast(q + entries.first, tf.int32)
    values = tf.gather(entries.values, positions)
    if entries.of_eights is None:
        return values
    order = tf.reshape(tf.range(tf.size(q)), tf.shape(q))
    in_eights = order < tf.size(q) // 8 * 8
    return tf.where(in_eights, tf.gather(entries.of_eights, positions), values)


def compute_by_table(a: Arguments) -> Any:
    """Looks up values in the table that `prepare_table` prepared: an `Op.compute`."""
    return look_up(a.q[0], a.prepared)


def _of_function(function: Callable[..., Any]) -> Table:
    """Returns the table of a real function, computed in float64 and rounded half away from zero.

    Infinite values become the end of the range. What is no number becomes zero.
    """

    def table(a: Arguments) -> Any:
        (q,), (x,), output = a.q, a.params, a.output
        values = function(q * x.scale, **a.attributes)
        values = tf.where(tf.math.is_nan(values), tf.zeros_like(values), values)
        low, high = (end - output.zero_point for end in (output.lowest, output.highest))
        return tf.clip_by_value(round_half_away(values / output.scale), low, high)

    return table


def compute_in_float32(
    function: Callable[..., Any], xnnpack: Callable[..., Any] | None = None
) -> Table:
    """Returns a table as int8 kernels make it: in float32, times the inverse of the output's scale.

    TFLite rounds halves away from zero, then adds the zero point. XNNPACK adds it in float32, then
    rounds halves to even.

    Args:
        function: takes float32 numbers in float64, and attributes.
        xnnpack: the function as XNNPACK computes it, if it has a table of it.
    """

    def table(a: Arguments) -> Any:
        (q,), (x,), output = a.q, a.params, a.output
        adds_first = xnnpack is not None and a.family.tables == "half_to_even"
        real = xnnpack if adds_first and xnnpack is not None else function
        values = single(real(single(q * x.scale), **a.attributes))
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
        of_neon: what it computes in ARM's vector instructions, if that differs.
        fits: whether it computes with these attributes.
        fields: from attributes to the options.
        takes: whether it takes these parameters of input and output.
    """

    code: str
    table: Table
    of_neon: Table | None = None
    fits: Callable[[Attributes], bool] = lambda attributes: True
    fields: Callable[[Attributes], Mapping[str, Any]] = lambda attributes: {}
    takes: Callable[[QuantParams, QuantParams], Any] = lambda x, output: tf.constant(True)


def accept_float(call: Call, attributes: Attributes | None = None) -> str | None:
    """Refuses calls that compute something else than real numbers: an `Op.accepts`."""
    return None if call.output.is_float else f"computes {call.output.dtype}"


def lookup_row(
    name: str,
    function: Callable[..., Any],
    doc: str,
    *,
    kernel: Kernel | None = None,
    **fields: Any,
) -> Op:
    """Makes the row of a function of one number.

    Args:
        name, doc: as in `Op`.
        function: in TensorFlow, of a float64 tensor and the attributes. Where it is infinite, the
            result is the end of the output's range, so that e.g. a logarithm of what is not
            positive is the lowest value.
        kernel: TFLite's own kernel, for 8 bits.
        fields: the row's other fields.
    """
    generic = _of_function(function)
    entries = _entries_of(generic, REFERENCE)

    def has_kernel(wide: bool, attributes: Attributes) -> bool:
        return kernel is not None and not wide and kernel.fits(attributes)

    def table(a: Arguments, neon: bool = False) -> Any:
        if kernel is None or not has_kernel(a.wide, a.attributes):
            return generic(a)
        own = kernel.of_neon if neon and kernel.of_neon else kernel.table
        return tf.where(kernel.takes(a.params[0], a.output), own(a), generic(a))

    of_neon = functools.partial(table, neon=True) if kernel and kernel.of_neon else None

    def emit(e: Emission) -> None:
        x, output = e.input_params, e.params
        ends = x.as_tensors(), output.as_tensors()
        if kernel is not None and has_kernel(e.wide, e.attributes) and kernel.takes(*ends):
            e.add(kernel.code, **kernel.fields(e.attributes))
            return
        codes = entries(x, output, e.attributes).numpy() + output.zero_point
        shape = e.shape(e.inputs[0])
        cast, positions = (e.temporary(name, shape, "int32") for name in ("cast", "places"))
        e.cast(e.inputs[0], cast)
        # Positions count from 0, so half of the table's size is added.
        e.add("ADD", [cast, e.constant("half", codes.size // 2)], [positions])
        table = e.constant("table", codes.astype(output.dtype), output)
        e.add("GATHER", [table, positions], axis=0)

    return Op(
        name,
        compute_by_table,
        emit,
        prepare=prepare_table(table, of_neon),
        doc=doc,
        elementwise=True,
        **{"accepts": accept_float, **fields},
    )


_activations = keras.activations


def _log(x: Any) -> Any:
    return tf.math.log(tf.maximum(x, 0.0))


def _softplus(x: Any) -> Any:
    return tf.maximum(x, 0.0) + tf.math.log1p(tf.exp(-tf.abs(x)))


def _thresholded(x: Any, slope: float, maximum: float, threshold: float) -> Any:
    return tf.where(x > threshold, tf.minimum(x, maximum), slope * (x - threshold))


def _options_of_relu(call: Call) -> Attributes:
    layer = call.layer
    maximum = getattr(layer, "max_value", None)
    return {
        "slope": float(getattr(layer, "negative_slope", 0.0)),
        "maximum": math.inf if maximum is None else float(maximum),
        "threshold": float(getattr(layer, "theta", getattr(layer, "threshold", 0.0))),
    }


def accept_option(name: str, value: Any) -> Callable[[Call, Attributes], str | None]:
    """Makes an `accepts` that takes, of the layers with an option, those with one value of it."""

    def accepts(call: Call, attributes: Attributes) -> str | None:
        is_other = getattr(call.layer, name, value) != value
        return "" if is_other else accept_float(call)

    return accepts


_NON_NEGATIVE = OwnRange(non_negative=True)

LOOKUPS: tuple[Op, ...] = (
    lookup_row(
        "selu",
        lambda x: 1.0507009873554805 * tf.where(x < 0, 1.6732632423543772 * tf.math.expm1(x), x),
        "scaled exponential linear unit",
        kinds=("selu",),
        functions=(_activations.selu, tf.nn.selu),
    ),
    lookup_row(
        "thresholded_relu",
        _thresholded,
        "ReLU with a threshold, or with both a slope and a maximum",
        layers=(layers.ThresholdedReLU, layers.ReLU),
        attributes=_options_of_relu,
        needs=("slope", "maximum", "threshold"),
    ),
    lookup_row(
        "softplus",
        _softplus,
        "log(1 + exp(x))",
        kinds=("softplus",),
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
        kinds=("softsign",),
        functions=(_activations.softsign, tf.nn.softsign),
    ),
    lookup_row(
        "exp",
        tf.exp,
        "exponential function",
        kinds=("exp",),
        functions=(_activations.exponential, tf.exp),
        output=_NON_NEGATIVE,
        kernel=Kernel("EXP", compute_in_float32(tf.exp)),
    ),
    lookup_row(
        "log",
        _log,
        "natural logarithm; the lowest value of what is not positive",
        layers=(Logarithm,),
        kinds=("log",),
        functions=(tf.math.log,),
        accepts=accept_option("plus_one", False),
        kernel=Kernel("LOG", compute_in_float32(_log)),
    ),
    lookup_row(
        "sqrt",
        lambda x: tf.sqrt(tf.maximum(x, 0.0)),
        "square root; 0 of what is negative",
        layers=(SquareRoot,),
        kinds=("sqrt",),
        functions=(tf.sqrt,),
        accepts=accept_option("inverse", False),
        output=_NON_NEGATIVE,
    ),
    lookup_row(
        "rsqrt",
        lambda x: 1.0 / tf.sqrt(tf.maximum(x, 0.0)),
        "1 / square root; the highest value of what is not positive",
        layers=(SquareRoot,),
        kinds=("rsqrt",),
        functions=(tf.math.rsqrt,),
        accepts=accept_option("inverse", True),
        output=_NON_NEGATIVE,
    ),
    lookup_row(
        "formula",
        lambda x, formula: evaluate_formula(json.loads(formula), x),
        "a function that code computes with several operations, such as log(1 + exp(x))",
        layers=(Formula,),
        attributes=lambda call: {"formula": call.layer.formula},
        needs=("formula",),
    ),
)
