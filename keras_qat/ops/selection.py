"""Comparisons, selections between two tensors, and casts of integers and booleans to float."""

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
from keras_qat.helper_layers.operations import MaskScores
from keras_qat.ops.composed import (
    NO_WIDE,
    WIDE,
    Computing,
    Emitting,
    get_inputs,
    integer_params,
    prepare_each,
    requantize_each,
    wide_params,
)
from keras_qat.ops.elementwise import accepts_two
from keras_qat.ops.emission import Emission
from keras_qat.ops.lookup import accept_float
from keras_qat.ops.movement import read_integers
from keras_qat.ops.op import Arguments, Attributes, Op, get_held_dtype
from keras_qat.ops.requantize import REQUANTIZE, Multiplier, prepare_requantization, requantize
from keras_qat.tflite.schema import SCOPE


def _find_common(params: Sequence[QuantParams]) -> QuantParams:
    """Return 16-bit quantization parameters for both tensors of a comparison."""
    first, second = (x.as_tensors().scale for x in params)
    finer = 1.0 if params[0].bits == 16 else 2.0**-7
    return wide_params(tf.maximum(first, second) * finer)


def _make_comparison(name: str, code: str, sign: str) -> Op:
    def compute(a: Arguments) -> tf.Tensor:
        x, y = requantize_each(Computing(a, a.prepared), get_inputs(a), WIDE)
        return getattr(tf.math, name)(x, y)

    def emit(e: Emission) -> None:
        params, targets = e.all_params, []
        sources: list[Any] = list(e.inputs)
        if params[0] != params[1]:  # Equal parameters need no conversion.
            inputs = list(zip(e.inputs, params, strict=True))
            sources = requantize_each(Emitting(e), inputs, _find_common(params))
        for index, source in enumerate(sources):  # Kernels for int8 would rescale and round.
            targets.append(e.temporary(f"whole_{index}", e.shape(source), "int32"))
            e.cast(source, targets[-1])
        e.add(code, targets)

    return Op(
        name,
        compute,
        emit,
        prepare=lambda a: prepare_each(a, get_inputs(a), _find_common(a.params)),
        doc=f"x {sign} y, for two tensors, or for a tensor and a constant",
        kinds=(name,),
        accepts=_accepts_comparison,
        integers=(),
        quantizes_constants=True,
    )


def _accepts_comparison(call: Call, attributes: Attributes) -> str | None:
    if not all(value.is_float for value in call.inputs):
        return ""
    on_one_grid = any(set(value.shape) == {1} for value in call.inputs)  # See `OnGrid`.
    return (None if on_one_grid else NO_WIDE) or accepts_two(4, call, attributes, False)


COMPARISONS: tuple[Op, ...] = tuple(
    _make_comparison(*row)
    for row in (
        ("greater", "GREATER", ">"),
        ("greater_equal", "GREATER_EQUAL", ">="),
        ("less", "LESS", "<"),
        ("less_equal", "LESS_EQUAL", "<="),
        ("equal", "EQUAL", "=="),
        ("not_equal", "NOT_EQUAL", "!="),
    )
)


def _accepts_select(call: Call, attributes: Attributes) -> str | None:
    first = call.args[0] if call.args else call.kwargs.get("condition")
    if not isinstance(first, Value) or first.is_float or len(call.args) + len(call.kwargs) < 3:
        return "it needs a mask and two tensors"
    if max(len(value.shape) for value in [*call.inputs, call.output]) > 4:
        return "it broadcasts more than 4 axes"
    return accept_float(call)


def _emit_select(e: Emission) -> None:
    inputs = list(zip(e.inputs[1:], e.all_params, strict=True))
    e.add("SELECT_V2", [e.inputs[0], *requantize_each(Emitting(e), inputs, e.params)])


SELECT = Op(
    "select",
    lambda a: tf.where(
        a.q[0], *requantize_each(Computing(a, a.prepared), get_inputs(a)[1:], a.output)
    ),
    _emit_select,
    prepare=lambda a: prepare_each(a, get_inputs(a)[1:], a.output),
    doc="values of one of two tensors, selected by a boolean tensor",
    kinds=("where",),
    accepts=_accepts_select,
    quantizes_constants=True,
)


_INTEGERS = integer_params(16)
"""Quantization parameters for the int32 input of a QUANTIZE, with the scale 1. `bits` is 16,
because kernels treat int32 like int16."""


def _find_limit(output: QuantParams) -> tf.Tensor:
    """Return a limit above the output's range. Integers are clipped to it before a QUANTIZE."""
    return tf.floor(2.0**output.bits * output.as_tensors().scale) + 1.0


def _prepare_cast(a: Arguments) -> tuple[Any, Any]:
    as_integers = dataclasses.replace(a, params=[_INTEGERS])
    limit = tf.minimum(_find_limit(a.output), 2.0**31 - 128)
    return REQUANTIZE.prepare_arguments(as_integers).prepared, tf.cast(limit, tf.int64)


def _cast(a: Arguments) -> tf.Tensor:
    prepared, limit = a.prepared
    x = tf.minimum(tf.maximum(tf.cast(a.q[0], tf.int64), -limit), limit)
    return tf.cast(multiply(x, prepared.fixed), get_held_dtype(a.output))


def _emit_cast(e: Emission) -> None:
    """Add a CAST to int32, a MINIMUM, a MAXIMUM and a QUANTIZE. uint8 needs only a QUANTIZE."""
    (source,), shape = e.inputs, e.shape(e.inputs[0])
    if e.dtype(source) == "uint8" and e.params.dtype == np.int8:
        pixels = e.builder.tensor(f"{SCOPE}/{e.node.name}/pixels", shape, "uint8", _INTEGERS)
        e.reshape(source, pixels)
        e.add("QUANTIZE", [pixels])
        return

    def make_integers(name: str) -> int:
        return e.builder.tensor(f"{SCOPE}/{e.node.name}/{name}", shape, "int32", _INTEGERS)

    is_bool = e.dtype(source) == "bool"
    if e.dtype(source) != "int32":
        in_int32 = make_integers("int32")
        e.cast(source, in_int32)
        source = in_int32
    if not is_bool:
        limit = int(min(_find_limit(e.params), 2.0**31 - 128))
        for code, end in (("MINIMUM", limit), ("MAXIMUM", -limit)):
            clipped = make_integers(code.lower())
            e.add(code, [source, e.constant(f"{code.lower()}/end", end)], [clipped])
            source = clipped
    e.add("QUANTIZE", [source])


def _accepts_cast(call: Call, attributes: Attributes) -> str | None:
    if not call.inputs[0].is_float:
        return accept_float(call)
    is_integer = tf.as_dtype(call.output.dtype).is_integer
    return "converts quantized values to integers, so indices may be wrong" if is_integer else ""


FROM_INTEGERS = Op(
    "from_integers",
    _cast,
    _emit_cast,
    prepare=_prepare_cast,
    doc="converts integers and booleans to float",
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
    ends = (_quantize(a.attributes[name], a.output) for name in ("on", "off"))
    return tuple(tf.cast(end - a.output.zero_point, get_held_dtype(a.output)) for end in ends)


def _quantize(value: float, output: QuantParams) -> tf.Tensor:
    params = output.as_tensors()
    q = round_half_away(value / params.scale) + params.zero_point
    return tf.clip_by_value(q, params.lowest, params.highest)


def _one_hot(a: Arguments) -> tf.Tensor:
    (on, off), depth, axis = a.prepared, a.attributes["depth"], a.attributes["axis"]
    return tf.where(tf.one_hot(a.q[0], depth, True, False, axis), on, off)


def _emit_one_hot(e: Emission) -> None:
    params, (source,) = e.params, e.inputs
    on, off = (
        e.constant(name, np.array(_quantize(e.attributes[name], params), params.dtype), params)
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
    doc="one value at each index, and another value elsewhere",
    kinds=("one_hot",),
    attributes=_one_hot_attributes,
    needs=("depth", "axis"),
    defaults={"on": 1.0, "off": 0.0},
    bits=(8,),
    accepts=lambda call, attributes: (
        "its options are known only at run time"
        if None in attributes.values()
        else accept_float(call)
    ),
)


# Masked attention scores become the lowest value of the range. Their softmax is then 0.
# If a minimum follows, masked values become the highest value.


def _prepare_masking(a: Arguments) -> tuple[Multiplier, Any]:
    """Return the multiplier for attention scores, and the quantized value of masked scores."""
    prepared = prepare_requantization(a.family, a.params[0], a.output)
    return prepared, tf.cast(
        _get_masked_value(a.output, a.attributes) - a.output.zero_point, a.q[0].dtype
    )


def _get_masked_value(params: QuantParams, attributes: Any) -> int:
    return params.highest if attributes["above"] else params.lowest


def _mask_scores(a: Arguments) -> Any:
    (scores, *masks), (prepared, end) = a.q, a.prepared
    result = requantize(scores, prepared)
    for mask in a.call.layer.masks(result, masks):
        result = tf.where(mask, result, end)
    return result


def _emit_masking(e: Emission) -> None:
    (target,), shape, params = e.outputs, e.shape(e.outputs[0]), e.params
    masks = [_emit_mask(e, index, len(shape)) for index in range(1, len(e.inputs))]
    causal, hidden = e.attributes["causal"], e.attributes["hidden"]
    if causal is not None:
        causal = ~causal if hidden else causal
        masks.append(
            e.constant("causal", causal.reshape((1,) * (len(shape) - causal.ndim) + causal.shape))
        )
    value = np.array([_get_masked_value(params, e.attributes)], params.dtype)
    lowest = e.constant("lowest", value, params)
    result = e.temporary("scores", shape, target)
    e.builder.quantize(e.inputs[0], result)
    for index, mask in enumerate(masks, 1):
        masked = target if index == len(masks) else e.temporary(f"masked_{index}", shape, target)
        e.add("SELECT_V2", [mask, *((lowest, result) if hidden else (result, lowest))], [masked])
        result = masked


def _emit_mask(e: Emission, index: int, rank: int) -> int:
    """Return input `index` as a boolean mask with `rank` axes. Nonzero values become True."""
    mask, params = e.inputs[index], e.node.inputs[index].params
    sizes, dtype = e.shape(mask), e.dtype(mask)
    if dtype != "bool":
        zero = np.array([0 if params is None else params.zero_point], dtype)
        nonzero = e.temporary(f"mask_{index}", sizes, "bool")
        e.add("NOT_EQUAL", [mask, e.constant(f"zero_{index}", zero, params)], [nonzero])
        mask = nonzero
    if len(sizes) == rank:
        return mask
    target = e.temporary(
        f"broadcast_{index}", (*sizes[:-2], *(1,) * (rank - len(sizes)), *sizes[-2:]), "bool"
    )
    e.reshape(mask, target)
    return target


MASK_SCORES = Op(
    "mask_scores",
    _mask_scores,
    _emit_masking,
    prepare=_prepare_masking,
    doc="attention scores, replaced by the lowest or the highest value if they are masked",
    layers=(MaskScores,),
    attributes=lambda call: {
        name: getattr(call.layer, name) for name in ("causal", "hidden", "above")
    },
    has_mark=True,
    max_axes=5,
    integers=(),
)
