"""Tensors side by side."""

from __future__ import annotations

import numpy as np

from keras_qat.keras2.backend import keras
from keras_qat.keras2.graph import Call, Value
from keras_qat.operations import operands
from keras_qat.ops.movement import first, integers, moved, symbol_of
from keras_qat.ops.op import Attributes, Op, SharedRange
from keras_qat.tflite.emission import Emission

__all__ = ["CONCATENATE", "STACK"]

_layers = keras.layers


def _attributes(call: Call) -> Attributes:
    """`axis`, and of integers the `numbers` among the tensors, by place."""
    axis = operands(call, "values", "axis")[1] or 0 if symbol_of(call) else call.layer.axis
    axes, rank = integers(axis), len(call.output.shape)
    parts = first(call)
    parts = list(parts) if isinstance(parts, (list, tuple)) else [parts]
    numbers = tuple(
        (place, integers(each), tuple(np.shape(each)))
        for place, each in enumerate(parts)
        if not isinstance(each, Value)
    )
    return {"axis": axes[0] % rank if axes and rank else None, "numbers": numbers}


def _accepts(call: Call, attributes: Attributes) -> str | None:
    if attributes["axis"] is None:
        return "its options are not known before run time"
    if attributes["numbers"] and call.output.is_float:
        return "with constants"
    return None


def _inputs(e: Emission) -> list[int]:
    """The tensors, numbers among integers included."""
    inputs = list(e.inputs)
    dtype = e.node.output.dtype
    for place, values, shape in e.attributes["numbers"]:
        constant = np.array(values, dtype).reshape(shape)
        inputs.insert(place, e.constant("numbers", constant))
    return inputs


def _emit(e: Emission) -> None:
    axis = e.attributes["axis"]
    e.add(
        "CONCATENATION",
        _inputs(e),
        options="ConcatenationOptions",
        axis=axis,
        fusedActivationFunction=0,
    )


CONCATENATE = Op(
    "concatenate",
    moved,
    _emit,
    doc="tensors side by side",
    layers=(_layers.Concatenate,),
    symbols=("concat",),
    attributes=_attributes,
    needs=("axis",),
    defaults={"numbers": ()},
    accepts=_accepts,
    output=SharedRange(),
)


def _emit_stack(e: Emission) -> None:
    inputs = _inputs(e)
    options = {"valuesCount": len(inputs), "axis": e.attributes["axis"]}
    e.add("PACK", inputs, options="PackOptions", **options)


STACK = Op(
    "stack",
    moved,
    _emit_stack,
    doc="tensors side by side along a new axis",
    symbols=("stack",),
    attributes=_attributes,
    needs=("axis",),
    defaults={"numbers": ()},
    accepts=_accepts,
    output=SharedRange(),
)
