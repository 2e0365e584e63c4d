"""Integers that follow from a tensor: its shape, and where its largest value is."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_qat.keras2.graph import Call
from keras_qat.operations import operands
from keras_qat.ops.movement import axes_of, move, rank_of, source_of
from keras_qat.ops.op import Arguments, Attributes, OwnRange
from keras_qat.tflite.emission import Emission
from keras_qat.tflite.names import SCOPE
from keras_qat.tflite.objects import TYPES

__all__ = ["ARGMAX", "ARGMIN", "SHAPE"]


def _on_values(a: Arguments) -> Any:
    return a.on(a.q)


def _emit_shape(e: Emission) -> None:
    out = TYPES[e.node.output.dtype]
    e.add("SHAPE", [source_of(e)], options="ShapeOptions", outType=out)


SHAPE = move(
    "shape",
    "the sizes of a tensor",
    _emit_shape,
    compute=_on_values,
    output=OwnRange(),
    symbols=("compat.v1.shape", "shape"),
)


def _attributes(call: Call) -> Attributes:
    _, axis = operands(call, "input", "axis")
    axis = call.kwargs.get("dimension", axis)
    axes = axes_of(axis or 0, rank_of(call))
    return {"axis": axes[0] if axes else None}


def _emit_arg(code: str) -> Any:
    def emit(e: Emission) -> None:
        source = source_of(e)
        if e.wide:  # The kernels take int8 and int32.
            wider = e.builder.tensor(f"{SCOPE}/{e.node.name}/int32", e.shape(source), "int32")
            types = {"inDataType": TYPES["int16"], "outDataType": TYPES["int32"]}
            e.add("CAST", [source], [wider], "CastOptions", **types)
            source = wider
        axis = e.constant("axis", np.int32(e.attributes["axis"]))
        kind = code.title().replace("_", "")  # ArgMax
        out = TYPES[e.node.output.dtype]
        e.add(code, [source, axis], options=f"{kind}Options", outputType=out)

    return emit


ARGMAX = move(
    "argmax",
    "where the largest value is",
    _emit_arg("ARG_MAX"),
    of_integers=(),
    compute=_on_values,
    output=OwnRange(),
    symbols=("math.argmax",),
    attributes=_attributes,
    needs=("axis",),
)

ARGMIN = move(
    "argmin",
    "where the smallest value is",
    _emit_arg("ARG_MIN"),
    of_integers=(),
    compute=_on_values,
    output=OwnRange(),
    symbols=("math.argmin",),
    attributes=_attributes,
    needs=("axis",),
)
