"""Computes positions in integers from where real numbers are rounded to whole ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, map_values, values_in
from keras_qat.graph.facts import solve
from keras_qat.graph.operations import MOVES, is_operation, kind_of
from keras_qat.graph.tf_operations import array
from keras_qat.helper_layers.operations import Positions
from keras_qat.lowering.builder import LoweringContext, PartsBuilder, suffix_of

ROUNDS = ("floor", "ceil", "round")
"""Operation that makes whole numbers of real ones -> how it rounds."""

KEEPS_WHOLE = MOVES.union(("add", "subtract", "multiply", "maximum", "minimum", "clip_by_value"))
"""Operations that compute whole numbers of whole ones."""


def positions_as_integers(graph: Graph, context: LoweringContext) -> Graph:
    """Rounds to integers at once where whole numbers of 8 bits would become integers later.

    Of `tf.cast(tf.floor(x) + 1, tf.int32)` the sum has a range, whose steps are no whole numbers,
    so that the cast of 2.98 would be 2. Numbers of the model's inputs stay as they are: their
    steps are not known to the model.
    """
    calls: list[Call] = []
    as_integers = _AsIntegers(context, calls)
    for call in graph.calls:
        is_cast = kind_of(call) == "cast"
        if is_cast and call.inputs[0].is_float and call.output.dtype in ("int32", "int64"):
            as_integers.cast(call)
        else:
            calls.append(call)
    return dataclasses.replace(graph, calls=calls)


class _OfInputs(Exception):
    """Raised for numbers of the model's inputs, which stay as they are."""


class _AsIntegers:
    """Writes calls that compute values as integers of 32 bits."""

    def __init__(self, context: LoweringContext, calls: list[Call]) -> None:
        self.context, self.calls = context, calls
        self.made: dict[Value, Value | None] = {}
        """Value that holds whole numbers -> the same as integers; None for others."""

    def cast(self, call: Call) -> None:
        """Adds a cast of real numbers, or calls that compute the same."""
        (value,), parts = call.inputs, PartsBuilder(call, self.context)
        try:
            whole = self.of(value)
        except _OfInputs:
            self.calls.append(call)
            return
        if whole is None and call.output.dtype == "int32":
            self.calls += parts.end(parts.new("", Positions, "truncate"), value)
            return
        if whole is None:
            whole = parts.add(parts.new("truncate", Positions, "truncate"), value)
            whole.dtype = "int32"
        cast = parts.new("", type(call.layer), tf.cast, dtype="int32")
        self.calls += parts.end(cast, whole, kwargs={"dtype": call.output.dtype})

    def of(self, value: Value) -> Value | None:
        """Returns the integers of whole numbers; None if they may be fractions.

        Raises:
            _OfInputs: if they are those of the model's inputs.
        """
        if value not in self.made:
            self.made[value] = self._computed(value)
        return self.made[value]

    def _computed(self, value: Value) -> Value | None:
        if solve(value, is_given):
            raise _OfInputs
        call = value.producer
        if call is None or not is_operation(call.layer):
            return None
        kind = kind_of(call)
        if kind in ROUNDS:
            (x,) = call.inputs
            if solve(x, is_given):
                raise _OfInputs
            return self._rounded(x, value, kind)
        if kind == "cast" and not call.inputs[0].is_float:
            return self._end(value, "integers", tf.cast, *call.inputs, dtype="int32")
        if kind not in KEEPS_WHOLE or not value.is_float or _fractions(call):
            return None
        known = {x: self.of(x) for x in call.inputs if x.is_float}
        if None in known.values():
            return None
        args, kwargs = map_values(lambda x: known.get(x, x), (call.args, call.kwargs))
        args, kwargs = tf.nest.map_structure(_as_integer, (args, kwargs))
        return self._end(value, "whole", call.layer.function, *args, **kwargs)

    def _rounded(self, x: Value, like: Value, rounding: str) -> Value:
        """Adds the layer that rounds a value, named after the call that made `like`."""
        assert like.producer is not None
        parts = PartsBuilder(like.producer, self.context)
        return self._add(parts, parts.new(rounding, Positions, rounding), like, x)

    def _end(self, like: Value, part: str, function: Any, *args: Any, **kwargs: Any) -> Value:
        """Adds an operation on integers that stands for the one that made `like`."""
        assert like.producer is not None
        parts = PartsBuilder(like.producer, self.context)
        operation = parts.new(part, type(like.producer.layer), function, dtype="int32")
        return self._add(parts, operation, like, *args, **kwargs)

    def _add(
        self, parts: PartsBuilder, layer: Any, like: Value, *args: Any, **kwargs: Any
    ) -> Value:
        """Adds a call in place of the one that made `like`, with integers for all its outputs."""
        path = parts.path(layer)

        def integers(value: Value) -> Value:
            name = path + suffix_of(value.name, parts.call.name)
            return Value(name, value.shape, "int32", rows=value.rows)

        outputs = map_values(integers, parts.call.outputs)
        parts.add(layer, *args, kwargs=kwargs, output=outputs)
        self.calls += [part.as_part_of(parts.call) for part in parts.calls]
        made = dict(zip(values_in(parts.call.outputs), values_in(outputs), strict=True))
        self.made.update(made)
        return made[like]


def is_given(value: Value) -> Generator[Value, Any, bool]:
    """Tell whether a tensor only holds values of the model's inputs."""
    call = value.producer
    if call is None:
        return True
    if kind_of(call) not in MOVES:
        return False
    for x in call.inputs:
        if not (yield x):
            return False
    return True


def _fractions(call: Call) -> bool:
    """Returns whether there is a number among the arguments of a call that is not whole."""
    known = map(array, tf.nest.flatten((call.args, call.kwargs)))
    return any(np.any(numbers != np.round(numbers)) for numbers in known if numbers is not None)


def _as_integer(leaf: Any) -> Any:
    """Returns real numbers among arguments as integers; anything else as it is."""
    numbers = array(leaf)
    if numbers is None or numbers.dtype.kind != "f":
        return leaf
    return numbers.astype(np.int32) if numbers.ndim else int(numbers)
