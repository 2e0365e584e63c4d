"""Whole numbers of real ones, such as the pixels beside a position: looked up in a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.arithmetic.quant_params import QuantParams, single
from keras_qat.helper_layers.operations import ROUNDINGS, Positions
from keras_qat.ops.emission import Emission
from keras_qat.ops.lookup import Entries, look_up
from keras_qat.ops.op import Arguments, Op

_LARGEST = 2.0**23 - 1
"""The largest whole number: float32 holds all, and three bytes all differences."""


def _entries(x: QuantParams, rounding: str) -> Any:
    """Returns the whole number of each quantized value, the lowest first, as training has it."""
    x = x.as_tensors()
    q = tf.range(2.0 ** (16 if x.bits == 16 else 8), dtype=tf.float64) + x.lowest - x.zero_point
    return tf.clip_by_value(ROUNDINGS[rounding](single(q * x.scale)), -_LARGEST, _LARGEST)


def _prepare(a: Arguments) -> Entries:
    (x,), dtype = a.params, a.q[0].dtype
    entries = tf.cast(_entries(x, a.attributes["rounding"]), dtype)
    return Entries(entries, tf.cast(x.zero_point - x.lowest, dtype))


def _emit(e: Emission) -> None:
    """Writes a table for each byte of the numbers: TFLite Micro's GATHER takes no larger ones."""
    (source,), (target,), shape = e.inputs, e.outputs, e.shape(e.inputs[0])
    entries = _entries(e.input_params, e.attributes["rounding"]).numpy().astype(np.int32)
    lowest = int(entries.min())
    digits = max(1, -(-int(entries.max() - lowest).bit_length() // 8))
    cast, positions = (e.temporary(name, shape, "int32") for name in ("cast", "places"))
    e.cast(source, cast)
    e.add("ADD", [cast, e.constant("half", entries.size // 2)], [positions])
    # Bytes are signed, so that each is 128 too low.
    total = e.constant("lowest", lowest + sum(128 << 8 * digit for digit in range(digits)))
    for digit in range(digits):
        codes = ((entries - lowest) >> 8 * digit) % 256 - 128
        byte, number, scaled, added = (
            e.temporary(f"{name}_{digit}", shape, "int32" if index else "int8")
            for index, name in enumerate(("byte", "number", "scaled", "sum"))
        )
        table = e.constant(f"table_{digit}", codes.astype(np.int8))
        e.add("GATHER", [table, positions], [byte], axis=0)
        e.cast(byte, number)
        if digit:
            e.add("MUL", [number, e.constant(f"unit_{digit}", 256**digit)], [scaled])
            number = scaled
        added = added if digit + 1 < digits else target
        e.add("ADD", [number, total], [added])
        total = added


POSITIONS = Op(
    "positions",
    lambda a: tf.cast(look_up(a.q[0], a.prepared), tf.int32),
    _emit,
    prepare=_prepare,
    doc="whole numbers of real ones, as `tf.cast` makes them of a position",
    layers=(Positions,),
    attributes=lambda call: {"rounding": call.layer.rounding},
    needs=("rounding",),
    on_request=True,
    elementwise=True,
)
