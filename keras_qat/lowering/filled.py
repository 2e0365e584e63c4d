"""Computes with numbers that fill a tensor for each example, as states that steps begin with."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import numpy as np

from keras_qat.graph.calls import Call, Graph, Value, values_in
from keras_qat.graph.operations import is_operation, kind_of
from keras_qat.graph.size_expressions import BATCH, computed_sizes
from keras_qat.graph.tf_operations import number, operands
from keras_qat.keras2.backend import layers
from keras_qat.lowering.attention_masks import HIDES
from keras_qat.lowering.builder import LoweringContext, PartsBuilder

FILLED = {"zeros": "shape", "ones": "shape", "fill": "dims"}
"""Operation that fills a tensor with a number -> name of the argument that has its sizes."""

NUMBERS = {"zeros": 0.0, "zeros_like": 0.0, "ones": 1.0, "ones_like": 1.0}
"""Operation that fills a tensor -> its number."""

FAR = {"maximum": HIDES, "minimum": -HIDES}
"""Operation that keeps a tensor's range -> the number from which on it ignores the other."""

COMPUTES = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}


def filled(call: Call) -> np.ndarray | None:
    """Returns one example of what a call fills with a number; None if not all is known."""
    kind = kind_of(call)
    shape: list[Any] | None = None
    if kind in FILLED:
        sizes, value = operands(call, FILLED[kind], "value")
        shape = computed_sizes(sizes) if values_in(sizes) else None
    elif kind in ("zeros_like", "ones_like"):
        value, (first, *inner) = None, call.output.shape or [1]
        shape = None if None in inner else [BATCH if first is None else first, *inner]
    value = number(NUMBERS.get(kind, value)) if shape else None
    if not shape or value is None or shape[0] != BATCH or {BATCH, -1}.intersection(shape[1:]):
        return None
    return np.full([1, *shape[1:]], value, np.float32) if call.output.is_float else None


def with_filled_constants(graph: Graph, context: LoweringContext) -> Graph:
    """Drops what computes with filled numbers, and what zeros are added to or multiplied by.

    Maxima get a constant in the place of a number far below all others, which as a tensor would set
    the range of what it is compared with. So do minima, far above.
    """
    known: dict[Value, float] = {}
    far: dict[Value, float] = {}
    """What is far from all other numbers, if not exactly there."""
    calls = []
    for call in graph.calls:
        new = [call]
        if (x := filled(call)) is not None:
            known[call.output] = float(x.flat[0])
        elif is_operation(call.layer):
            if (value := _computed(call, known, far)) is not None:
                (known if value[1] else far)[call.output] = value[0]
            else:
                new = _with_constant(call, known, far, context)
        calls += new
    return dataclasses.replace(graph, calls=calls)


def _computed(
    call: Call, known: dict[Value, float], far: dict[Value, float]
) -> tuple[float, bool] | None:
    """Returns the number that a call gives everywhere, and whether exactly; None if not known."""
    kind = kind_of(call)
    if not all(value.is_float for value in [*call.inputs, *values_in(call.outputs)]):
        return None
    if kind == "exp":
        value = {**known, **far}.get(call.inputs[0], 0.0)
        return (0.0, True) if value <= HIDES else None
    if kind not in COMPUTES or None in call.output.shape[1:]:
        return None
    both = operands(call, "x", "y")
    numbers = [known.get(x) if isinstance(x, Value) else number(x) for x in both]
    first, second = numbers
    if first is not None and second is not None:
        return float(COMPUTES[kind](first, second)), True
    if kind == "multiply":
        return (0.0, True) if 0.0 in numbers else None
    pairs = zip(both, numbers, strict=True)
    ends = [far.get(x, value) if isinstance(x, Value) else value for x, value in pairs]
    first, second = ends
    if None not in ends or (end := first if second is None else second) is None:
        return None
    sign = -1.0 if first is None and kind == "subtract" else 1.0
    return (sign * end, False) if abs(end) >= -HIDES else None


def _with_constant(
    call: Call, known: dict[Value, float], far: dict[Value, float], context: LoweringContext
) -> list[Call]:
    """Returns a call without zeros that it adds, and with a constant that it compares with."""
    kind, ends = kind_of(call), {**known, **far}
    others = [value for value in call.inputs if value not in ends]
    values = [ends[value] for value in call.inputs if value in ends]
    if len(others) != 1 or len(values) != 1 or call.output.shape != others[0].shape:
        return [call]
    (other,), (value,) = others, values
    if value == 0.0 and (kind == "add" or (kind == "subtract" and call.args[0] is other)):
        # Under a name of its own: later steps, which add something, have this one.
        parts = PartsBuilder(call, context)
        return parts.end(parts.new("sum_with_zeros", layers.Activation, "linear"), other)
    if kind not in FAR or value / FAR[kind] < 1.0:
        return [call]
    x = np.full([size or 1 for size in call.output.shape], value, np.float32)
    return [Call(call.layer, (other, x), {}, call.outputs, call.name).as_part_of(call)]
