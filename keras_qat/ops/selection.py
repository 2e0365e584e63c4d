"""Comparisons, choices between two tensors, and numbers made of integers and truth values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.fixed_point import multiply
from keras_qat.arithmetic.quant_params import QuantParams, round_half_away
from keras_qat.graph.calls import Call, Value
from keras_qat.graph.operations import get_operands, read_scalar
from keras_qat.ops.composed import (
    NO_WIDE,
    WIDE,
    Computing,
    Emitting,
    Machine,
    Preparing,
    Quantized,
    wide_params,
)
from keras_qat.ops.elementwise import accepts_up_to
from keras_qat.ops.emission import Emission
from keras_qat.ops.lookup import accept_float
from keras_qat.ops.movement import read_integers
from keras_qat.ops.op import Arguments, Attributes, Op, get_held_dtype
from keras_qat.ops.requantize import REQUANTIZE
from keras_qat.tflite.schema import SCOPE


def _common(params: Sequence[QuantParams]) -> QuantParams:
    """Returns 16-bit parameters that hold two tensors: 128 values for a step of the wider one."""
    first, second = (x.as_tensors().scale for x in params)
    finer = 1.0 if params[0].bits == 16 else 2.0**-7
    return wide_params(tf.maximum(first, second) * finer)


def _both(m: Machine, inputs: Sequence[Quantized], common: QuantParams) -> list[Any]:
    """Brings two tensors to a common scale, so that their quantized values can be compared."""
    return [m.run(REQUANTIZE, [x], common)[0] for x in inputs]


def _prepare_comparison(a: Arguments) -> list[Any]:
    prepared: list[Any] = []
    _both(Preparing(a, prepared), list(zip(a.q, a.params, strict=True)), _common(a.params))
    return prepared


def _comparison(name: str, code: str, words: str) -> Op:
    def compute(a: Arguments) -> Any:
        x, y = _both(Computing(a, a.prepared), list(zip(a.q, a.params, strict=True)), WIDE)
        return getattr(tf.math, name)(x, y)

    def emit(e: Emission) -> None:
        params, targets = e.all_params, []
        sources: list[Any] = list(e.inputs)
        if params[0] != params[1]:  # Else they are on one grid.
            inputs = list(zip(e.inputs, params, strict=True))
            sources = _both(Emitting(e), inputs, _common(params))
        for index, source in enumerate(sources):  # Kernels compare int8 after rounding it anew.
            targets.append(e.temporary(f"whole_{index}", e.shape(source), "int32"))
            e.cast(source, targets[-1])
        e.add(code, targets)

    return Op(
        name,
        compute,
        emit,
        prepare=_prepare_comparison,
        doc=f"whether values are {words} those of another tensor, or a constant",
        kinds=(name,),
        accepts=_accepts_comparison,
        integers=(),
        quantizes_constants=True,
    )


def _accepts_comparison(call: Call, attributes: Attributes) -> str | None:
    if not all(value.is_float for value in call.inputs):
        return ""
    on_one_grid = any(set(value.shape) == {1} for value in call.inputs)  # With a number, OnGrid.
    return (None if on_one_grid else NO_WIDE) or accepts_up_to(4, reals=False)(call, attributes)


COMPARISONS: tuple[Op, ...] = tuple(
    _comparison(*row)
    for row in (
        ("greater", "GREATER", "greater than"),
        ("greater_equal", "GREATER_EQUAL", "at least"),
        ("less", "LESS", "less than"),
        ("less_equal", "LESS_EQUAL", "at most"),
        ("equal", "EQUAL", "equal to"),
        ("not_equal", "NOT_EQUAL", "not equal to"),
    )
)


def _accepts_select(call: Call, attributes: Attributes) -> str | None:
    first = call.args[0] if call.args else call.kwargs.get("condition")
    if not isinstance(first, Value) or first.is_float or len(call.args) + len(call.kwargs) < 3:
        return "not of a tensor of truth values and two others"
    if max(len(value.shape) for value in [*call.inputs, call.output]) > 4:
        return "broadcast with more than 4 axes"
    return accept_float(call)


def _chosen(m: Machine, inputs: Sequence[Quantized], output: QuantParams) -> list[Any]:
    return [m.run(REQUANTIZE, [x], output)[0] for x in inputs]


def _prepare_select(a: Arguments) -> list[Any]:
    prepared: list[Any] = []
    _chosen(Preparing(a, prepared), list(zip(a.q, a.params, strict=True))[1:], a.output)
    return prepared


def _select(a: Arguments) -> Any:
    inputs = list(zip(a.q, a.params, strict=True))[1:]
    return tf.where(a.q[0], *_chosen(Computing(a, a.prepared), inputs, a.output))


def _emit_select(e: Emission) -> None:
    inputs = list(zip(e.inputs[1:], e.all_params, strict=True))
    e.add("SELECT_V2", [e.inputs[0], *_chosen(Emitting(e), inputs, e.params)])


SELECT = Op(
    "select",
    _select,
    _emit_select,
    prepare=_prepare_select,
    doc="values of one tensor or of another, as truth values say",
    kinds=("where",),
    accepts=_accepts_select,
    quantizes_constants=True,
)


_WHOLE = QuantParams(np.float32(1), 0, 16)
"""Stands for the parameters of integers in 32 bits, which kernels treat as those in 16."""


def _limit(output: QuantParams) -> Any:
    """Returns a whole number beyond the output's range: larger ones would overflow in kernels."""
    return tf.floor(2.0**output.bits * output.as_tensors().scale) + 1.0


def _prepare_cast(a: Arguments) -> tuple[Any, Any]:
    as_integers = dataclasses.replace(a, params=[_WHOLE])
    limit = tf.minimum(_limit(a.output), 2.0**31 - 128)
    return REQUANTIZE.prepare_arguments(as_integers).prepared, tf.cast(limit, tf.int64)


def _from_integers(a: Arguments) -> Any:
    prepared, limit = a.prepared
    x = tf.minimum(tf.maximum(tf.cast(a.q[0], tf.int64), -limit), limit)
    return tf.cast(multiply(x, prepared.fixed), get_held_dtype(a.output))


def _emit_cast(e: Emission) -> None:
    """Writes integers of 32 bits with the scale 1, cut off beyond the range, and QUANTIZE.

    QUANTIZE takes pixels, of type uint8, as they are.
    """
    (source,), shape = e.inputs, e.shape(e.inputs[0])
    if e.dtype(source) == "uint8" and e.params.dtype == np.int8:
        pixels = e.builder.tensor(f"{SCOPE}/{e.node.name}/pixels", shape, "uint8", _WHOLE)
        e.reshape(source, pixels)
        e.add("QUANTIZE", [pixels])
        return

    def make_integers(name: str) -> int:
        return e.builder.tensor(f"{SCOPE}/{e.node.name}/{name}", shape, "int32", _WHOLE)

    is_bool = e.dtype(source) == "bool"
    if e.dtype(source) != "int32":
        in_int32 = make_integers("int32")
        e.cast(source, in_int32)
        source = in_int32
    if not is_bool:
        limit = int(min(_limit(e.params), 2.0**31 - 128))
        for code, end in (("MINIMUM", limit), ("MAXIMUM", -limit)):
            clipped = make_integers(code.lower())
            e.add(code, [source, e.constant(f"{code.lower()}/end", end)], [clipped])
            source = clipped
    e.add("QUANTIZE", [source])


def _accepts_cast(call: Call, attributes: Attributes) -> str | None:
    if not call.inputs[0].is_float:
        return accept_float(call)
    is_integer = tf.as_dtype(call.output.dtype).is_integer
    return "makes integers of quantized values: indices may be off" if is_integer else ""


FROM_INTEGERS = Op(
    "from_integers",
    _from_integers,
    _emit_cast,
    prepare=_prepare_cast,
    doc="integers and truth values as real numbers",
    kinds=("cast",),
    accepts=_accepts_cast,
)


def _one_hot_attributes(call: Call) -> Attributes:
    depth, *values, axis = get_operands(call, "depth", "on_value", "off_value", "axis")
    known, axes = read_integers(depth), read_integers(-1 if axis is None else axis)
    on, off = (read_scalar(1 if value is None else value) for value in values)
    off = 0.0 if values[1] is None else off
    rank = len(call.output.shape)
    return {"depth": known and known[0], "on": on, "off": off, "axis": axes and axes[0] % rank}


def _prepare_one_hot(a: Arguments) -> tuple[Any, Any]:
    ends = (_code(a.attributes[name], a.output) for name in ("on", "off"))
    return tuple(tf.cast(end - a.output.zero_point, get_held_dtype(a.output)) for end in ends)


def _code(value: float, output: QuantParams) -> Any:
    """Returns the quantized value of a number."""
    params = output.as_tensors()
    code = round_half_away(value / params.scale) + params.zero_point
    return tf.clip_by_value(code, params.lowest, params.highest)


def _one_hot(a: Arguments) -> Any:
    (on, off), depth, axis = a.prepared, a.attributes["depth"], a.attributes["axis"]
    return tf.where(tf.one_hot(a.q[0], depth, True, False, axis), on, off)


def _emit_one_hot(e: Emission) -> None:
    params, (source,) = e.params, e.inputs
    on, off = (
        e.constant(name, np.array(_code(e.attributes[name], params), params.dtype), params)
        for name in ("on", "off")
    )
    if e.dtype(source) not in ("int32", "int64"):
        in_int32 = e.temporary("int32", e.shape(source), "int32")
        e.cast(source, in_int32)
        source = in_int32
    axis = e.attributes["axis"]
    last = len(e.shape(e.outputs[0])) - 1
    depth = e.constant("depth", e.attributes["depth"])
    e.add("ONE_HOT", [source, depth, on, off], axis=-1 if axis == last else axis)


ONE_HOT = Op(
    "one_hot",
    _one_hot,
    _emit_one_hot,
    prepare=_prepare_one_hot,
    doc="a number for each index, and another one for all others",
    kinds=("one_hot",),
    attributes=_one_hot_attributes,
    needs=("depth", "axis"),
    defaults={"on": 1.0, "off": 0.0},
    bits=(8,),
    accepts=lambda call, attributes: (
        "its options are not known before run time"
        if None in attributes.values()
        else accept_float(call)
    ),
)
