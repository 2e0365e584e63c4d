"""Makes Keras masks tensors of the graph, for layers that are opened and read a mask."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, flatten_values, map_values
from keras_qat.graph.keras_masks import KerasMasks
from keras_qat.graph.operations import is_operation
from keras_qat.graph.read_model import read_model
from keras_qat.graph.sizes import fold_known_sizes, use_python_integers
from keras_qat.helper_layers.operations import CarryMask
from keras_qat.keras2.backend import accepts_mask, keras, layers, make_input
from keras_qat.lowering.builder import LoweringContext, PartsBuilder
from keras_qat.lowering.inner_names import weights_in
from keras_qat.messages import KERAS, get_package
from keras_qat.ops.registry import is_listed
from keras_qat.tracing.cannot_trace import CannotTrace
from keras_qat.tracing.trace_layer import TracedLayer, trace_layer


class _Symbols(dict[Value, Any]):
    """Value -> the symbolic tensor that stands for it, made when it is asked for."""

    def __missing__(self, value: Value) -> Any:
        symbol = self[value] = make_input(value.shape, value.dtype)
        return symbol


class MaskTensors:
    """The masks of a graph's values as values, and the calls that compute them.

    Tracing replaces the calls that Keras' masks come from, so each call is noted before.
    """

    def __init__(self, context: LoweringContext) -> None:
        self.context = context
        self.calls: list[Call] = []
        """Calls that compute masks and are not part of the graph yet."""
        self._made_by: dict[Value, Call] = {}
        self._symbols = _Symbols()
        self._masks = KerasMasks(self._symbols.__getitem__, self._made_by.get, self._kept)
        self._traced: dict[tuple[Any, str], TracedLayer] = {}
        self._count = 0

    def note(self, call: Call) -> None:
        """Notes which call made values, before it is replaced."""
        for value in flatten_values(call.outputs):
            self._made_by.setdefault(value, call)

    def hand_over(self, values: list[Value]) -> None:
        """Lets the masks of values come from the calls that are noted next."""
        for value in values:
            self._made_by.pop(value, None)

    def take_calls(self) -> list[Call]:
        """Returns the new calls that compute masks, which become part of the graph."""
        calls, self.calls = self.calls, []
        return calls

    def trace(
        self, call: Call, expansion: Call | None, lenders: Sequence[Any] = ()
    ) -> tuple[TracedLayer, list[Value]]:
        """Trace a layer with the masks that it reads, and return all tensors that it reads.

        Args:
            call: the call.
            expansion: another call that computes the same and is traced in its place, or None.
            lenders: other layers whose weights it reads, and variables that no layer holds.

        Raises:
            CannotTrace, OnlyTrains: if it cannot be traced.
        """
        try:
            return self._trace(call, expansion, lenders)
        except CannotTrace as error:
            given = use_python_integers(call)
            if given is None or expansion or type(error) is not CannotTrace:
                raise
        return self._trace(given, None, lenders)  # Python compares and branches by them.

    def _trace(
        self, call: Call, expansion: Call | None, lenders: Sequence[Any]
    ) -> tuple[TracedLayer, list[Value]]:
        inputs = list(dict.fromkeys((expansion or call).inputs))
        masks = {} if expansion else self.of(inputs)
        if expansion or masks or lenders:
            traced = trace_layer(expansion or call, masks, lenders)
        else:
            traced = self._trace_alone(call)
        of_steps = expansion and isinstance(call.layer, RECURRENT)
        if traced.carries_masks and not of_steps:
            self.hand_over(flatten_values(call.outputs))
        else:
            self.of(flatten_values(call.outputs))  # Raises if they cannot be traced.
        return traced, [*inputs, *masks.values()]

    def _trace_alone(self, call: Call) -> TracedLayer:
        """Trace a layer that reads no masks, once for all calls of the same shapes and weights."""
        leaves = tf.nest.flatten((call.args, call.kwargs))
        if not all(leaf is None or isinstance(leaf, (Value, bool)) for leaf in leaves):
            return trace_layer(call)
        args = map_values(
            lambda x: (call.inputs.index(x), x.shape, x.dtype, *weights_in(x)),
            (call.args, call.kwargs),
        )
        key = call.layer, str(args)
        if key not in self._traced:
            self._traced[key] = trace_layer(call)
        return self._traced[key]

    def of(self, values: list[Value]) -> dict[Value, Value]:
        """Returns value -> its mask, for those that carry one.

        Raises:
            CannotTrace: if a mask cannot be traced.
        """
        masks = {value: self._of(value) for value in values if value.masked}
        return {value: mask for value, mask in masks.items() if mask is not None}

    def _of(self, value: Value) -> Value | None:
        try:
            symbol = self._masks.find(value)
        except CannotTrace:
            raise
        except Exception as error:  # Whatever a user's own code may raise.
            raise CannotTrace("it reads a mask that cannot be traced") from error
        symbols = {id(symbol): value for value, symbol in self._symbols.items()}
        return symbols.get(id(symbol))

    def _kept(self, symbol: Any, call: Call) -> Any:
        """Adds the calls that compute a mask, and returns the symbolic tensor of its value."""
        if any(symbol is known for known in self._symbols.values()):
            return symbol
        if not keras.backend.is_keras_tensor(symbol):
            raise CannotTrace("it reads a mask that is a constant")
        return self._symbols[self._add(dict(self._symbols), symbol, call)]

    def of_attention(self, call: Call, inputs: list[Value], given: Value | None) -> Value | None:
        """Returns one mask [batch, queries, keys], as Keras makes it from those of the inputs.

        Args:
            call: the call.
            inputs: queries, values and keys.
            given: the mask that it is given, of truth values or integers.
        """
        masks, (query, *others) = self.of(inputs), inputs
        symbols = _Symbols()
        parts = []
        for value in dict.fromkeys(others):
            if value in masks:
                parts.append(symbols[masks[value]][:, tf.newaxis, :])
        if query in masks:
            parts.append(symbols[masks[query]][:, :, tf.newaxis])
        if parts and given is not None:
            parts.append(tf.cast(symbols[given], tf.bool))
        if not parts:
            return given
        return self._add(symbols, functools.reduce(tf.logical_and, parts), call)

    def of_all_steps(self, sequence: Value, call: Call) -> Value:
        """Returns a mask that is True for all steps of a sequence, which a call reads."""
        symbols = _Symbols()
        first = symbols[sequence][..., 0]
        return self._add(symbols, tf.equal(first, first), call)

    def _add(self, symbols: dict[Value, Any], result: Any, maker: Call) -> Value:
        """Adds the calls that compute a symbolic tensor from others, and returns its value.

        Args:
            symbols: value -> the symbolic tensor that stands for it.
            result: the symbolic tensor.
            maker: the call that the new ones are a part of.
        """
        try:
            graph = read_model(keras.Model(list(symbols.values()), result))
        except ValueError as error:
            raise CannotTrace("it reads a mask that cannot be traced") from error
        current = dict(zip(flatten_values(graph.inputs), symbols, strict=True))
        for call in fold_known_sizes(graph).calls:
            self._count += 1
            name = f"{maker.name}/mask_{self._count}"
            for value in flatten_values(call.outputs):
                label = name + value.name.removeprefix(call.name)
                current[value] = Value(label, value.shape, value.dtype)
            args, kwargs, outputs = map_values(
                current.__getitem__, (call.args, call.kwargs, call.outputs)
            )
            layer = self.context.keep(call.layer, name, call.layer)
            self.calls.append(Call(layer, args, kwargs, outputs, name).as_part_of(maker))
        return current[flatten_values(graph.outputs)[0]]

    def carried(self, graph: Graph) -> Graph:
        """Attaches masks to what operations compute, where whole layers or the model need them.

        The model's own outputs need them for losses and metrics.
        """
        lost = {
            value
            for call in graph.calls
            for value in flatten_values(call.outputs)
            if value.masked and self._made_by.get(value) is not call
        }
        if not lost:
            return graph
        needed = {value for value in flatten_values(graph.outputs) if value.masked}
        for call in [*reversed(graph.loss_only), *reversed(graph.calls)]:
            passes_on = needed.intersection(flatten_values(call.outputs)) - lost
            if passes_on or _may_read_masks(call):
                needed.update(value for value in call.inputs if value.masked)
        masks = self.of([value for value in graph.values() if value in lost & needed])
        carrying: dict[Value, Value] = {}

        def with_masks(structure: Any) -> Any:
            return map_values(lambda value: carrying.get(value, value), structure)

        def with_masked_inputs(call: Call) -> Call:
            args, kwargs = with_masks((call.args, call.kwargs))
            return dataclasses.replace(call, args=args, kwargs=kwargs)

        calls: list[Call] = []
        for call in graph.calls:
            calls.append(call if is_operation(call.layer) else with_masked_inputs(call))
            for index, value in enumerate(flatten_values(call.outputs)):
                if value in masks:
                    parts = PartsBuilder(call, self.context)
                    layer = parts.new(f"masked_{index}" if index else "masked", CarryMask)
                    output = Value(f"{value.name}_masked", value.shape, value.dtype, masked=True)
                    parts.add(layer, value, kwargs={"mask": masks[value]}, output=output)
                    calls += [part.as_part_of(call) for part in parts.calls]
                    carrying[value] = output
        calls = _in_order([*calls, *self.take_calls()])
        loss_only, outputs = map(with_masked_inputs, graph.loss_only), with_masks(graph.outputs)
        return dataclasses.replace(graph, calls=calls, loss_only=list(loss_only), outputs=outputs)


RECURRENT = layers.RNN, layers.Bidirectional
"""Layers whose mask may be an argument, of which they hand nothing on to layers inside."""


def is_recurrent(layer: Any) -> bool:
    """Returns whether a layer computes what a recurrent one of Keras does."""
    return isinstance(layer, RECURRENT) and get_package(type(layer).call) in KERAS


def _in_order(calls: list[Call]) -> list[Call]:
    """Sorts calls so that each comes behind those that it reads, and else as they are."""
    among, done = set(calls), dict[Call, None]()

    def add(call: Call) -> None:
        for value in call.inputs:
            if value.producer in among and value.producer not in done:
                add(value.producer)
        done[call] = None

    for call in calls:
        if call not in done:
            add(call)
    return list(done)


_TRACED = layers.Attention, layers.AdditiveAttention, layers.GlobalAveragePooling1D, layers.Softmax
"""Keras' layers that are traced if they read a mask."""


def reads_mask(call: Call) -> bool:
    """Returns whether a call of one of Keras' layers reads a mask, as a tensor if it can."""
    is_given = bool(flatten_values(call.kwargs.get("mask")))
    is_masked = is_given or any(value.masked for value in call.inputs)
    return is_masked and (type(call.layer) in _TRACED or isinstance(call.layer, RECURRENT))


def _may_read_masks(call: Call) -> bool:
    """Returns whether the layer of a call that stays whole reads masks, or may do so inside."""
    is_given = isinstance(call.layer, RECURRENT) and call.kwargs.get("mask") is not None
    if is_operation(call.layer) or is_given:
        return False
    if type(call.layer) is layers.MultiHeadAttention or not is_listed(call.layer):
        return True
    return accepts_mask(call.layer)
