"""Turns Keras masks into tensors of the graph, for traced layers that read a mask.

A Keras mask is an attribute of a tensor. An Embedding or a Masking sets it, and layers pass it on.
`masked_scores.py` handles masks that a model adds to scores as -1e9.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, flatten_values, map_values
from keras_qat.graph.facts import Facts, reach
from keras_qat.graph.keras_masks import KerasMasks
from keras_qat.graph.operations import is_operation
from keras_qat.graph.read_model import read_model
from keras_qat.graph.rebuild_model import make_input
from keras_qat.graph.sizes import fold_known_sizes, use_python_integers
from keras_qat.helper_layers.operations import CarryMask
from keras_qat.keras2.backend import accepts_mask, keras, layers
from keras_qat.lowering.builder import LoweringContext, PartsBuilder
from keras_qat.lowering.expand_call import make_symbol, trace_in_place
from keras_qat.lowering.inline_trace import identify_weights
from keras_qat.messages import KERAS, get_package
from keras_qat.ops.registry import is_listed
from keras_qat.tracing.cannot_trace import CannotTrace
from keras_qat.tracing.trace_layer import TracedLayer, trace_layer

RECURRENT = layers.RNN, layers.Bidirectional

_TRACED = layers.Attention, layers.AdditiveAttention, layers.GlobalAveragePooling1D, layers.Softmax
"""Keras' layers that are traced only if they read a mask."""


class _Symbols(dict[Value, Any]):
    """Maps a value to a symbolic Keras tensor, which is created on first use."""

    def __missing__(self, value: Value) -> tf.Tensor:
        symbol = self[value] = make_input(value.shape, value.dtype)
        return symbol


class MaskTensors:
    """Computes the Keras masks of a graph's tensors as tensors of the graph.

    The mask of a tensor depends on the layers that compute the tensor. Tracing replaces these
    layers. Therefore `note` is called before tracing.
    """

    def __init__(self, context: LoweringContext) -> None:
        self.context = context
        self.calls: list[Call] = []
        """Calls that compute masks, until `take_calls` returns them."""
        self._made_by: dict[Value, Call] = {}
        self._symbols = _Symbols()
        self._masks = KerasMasks(self._symbols.__getitem__, self._made_by.get, self._keep)
        self._traced: dict[tuple[layers.Layer, str], TracedLayer] = {}
        self._count = 0

    def note(self, call: Call) -> None:
        """Remember the original call that computes a tensor. Its layer computes the mask."""
        for value in flatten_values(call.outputs):
            self._made_by.setdefault(value, call)

    def hand_over(self, values: list[Value]) -> None:
        """Forget the calls that compute `values`. Their replacements are given to `note` later."""
        for value in values:
            self._made_by.pop(value, None)

    def take_calls(self) -> list[Call]:
        """Return the calls that compute masks. The caller adds them to the graph."""
        calls, self.calls = self.calls, []
        return calls

    def trace(
        self, call: Call, expansion: Call | None, lenders: Sequence[layers.Layer | tf.Variable] = ()
    ) -> tuple[TracedLayer, list[Value]]:
        """Trace a layer with its masks. Return the trace, and all tensors that the layer reads.

        Args:
            call: the call.
            expansion: a call to trace instead, such as an unrolled LSTM. Or None.
            lenders: other layers that share weights with this layer, or variables without a layer.

        Raises:
            CannotTrace: if the layer or a mask cannot be traced.
            OnlyTrains: if the layer changes its input only in training.
        """
        inputs = list(dict.fromkeys((expansion or call).inputs))
        try:
            masks = {} if expansion else self.find(inputs)
            if expansion or masks or lenders:
                traced = trace_layer(expansion or call, masks, lenders)
            else:
                traced = self._trace_alone(call)
        except CannotTrace as error:
            given = use_python_integers(call)  # Python code may have branches that depend on them.
            if given is None or expansion or type(error) is not CannotTrace:
                raise
            return self.trace(given, None, lenders)
        is_unrolled = expansion and isinstance(call.layer, RECURRENT)
        if traced.carries_masks and not is_unrolled:
            self.hand_over(flatten_values(call.outputs))
        else:
            self.find(flatten_values(call.outputs))  # Raises an error if they cannot be traced.
        return traced, [*inputs, *masks.values()]

    def _trace_alone(self, call: Call) -> TracedLayer:
        """Trace a layer without masks. Reuse the trace of a call with equal shapes and weights."""
        leaves = tf.nest.flatten((call.args, call.kwargs))
        if not all(leaf is None or isinstance(leaf, (Value, bool)) for leaf in leaves):
            return trace_layer(call)
        args = map_values(
            lambda x: (call.inputs.index(x), x.shape, x.dtype, *identify_weights(x)),
            (call.args, call.kwargs),
        )
        key = call.layer, str(args)
        if key not in self._traced:
            self._traced[key] = trace_layer(call)
        return self._traced[key]

    def find(self, values: list[Value]) -> dict[Value, Value]:
        """Return a dictionary from values to their masks. Values without a mask are left out.

        Raises:
            CannotTrace: if a mask cannot be traced.
        """
        masks = {value: self._find(value) for value in values if value.masked}
        return {value: mask for value, mask in masks.items() if mask is not None}

    def _find(self, value: Value) -> Value | None:
        try:
            symbol = self._masks.find(value)
        except CannotTrace:
            raise
        except Exception as error:  # Custom code may raise any error.
            raise CannotTrace("it reads a mask that cannot be traced") from error
        symbols = {id(symbol): value for value, symbol in self._symbols.items()}
        return symbols.get(id(symbol))

    def _keep(self, symbol: tf.Tensor, call: Call) -> tf.Tensor:
        """Store the calls that compute the mask `symbol`. Return a symbolic tensor for it."""
        if any(symbol is known for known in self._symbols.values()):
            return symbol
        if not keras.backend.is_keras_tensor(symbol):
            raise CannotTrace("it reads a mask that is a constant")
        return self._symbols[self._add(dict(self._symbols), symbol, call)]

    def make_attention_mask(
        self, call: Call, inputs: list[Value], given: Value | None
    ) -> Value | None:
        """Return the mask that MultiHeadAttention computes. Its shape is [batch, queries, keys].

        It combines the masks of `inputs` (queries, values, keys) and the argument `given`.
        """
        masks, (query, *others) = self.find(inputs), inputs
        symbols = _Symbols()
        terms = [symbols[masks[x]][:, tf.newaxis, :] for x in dict.fromkeys(others) if x in masks]
        if query in masks:
            terms.append(symbols[masks[query]][:, :, tf.newaxis])
        if not terms:
            return given
        if given is not None:
            terms.append(tf.cast(symbols[given], tf.bool))
        return self._add(symbols, functools.reduce(tf.logical_and, terms), call)

    def make_full_mask(self, sequence: Value, call: Call) -> Value:
        """Return a mask that is True for all steps of a sequence, which is an input of `call`."""
        symbols = _Symbols()
        first = symbols[sequence][..., 0]
        return self._add(symbols, tf.equal(first, first), call)

    def _add(self, symbols: dict[Value, tf.Tensor], result: tf.Tensor, maker: Call) -> Value:
        """Store the calls from symbolic inputs, `symbols`, to `result`. Return the result's value.

        The names of the calls begin with the name of `maker`.
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

    def attach(self, graph: Graph) -> Graph:
        """Attach Keras masks again to tensors that are now computed by operations.

        Losses, metrics and layers that are not traced may still read these masks.
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
        masks = self.find([value for value in graph.values() if value in lost & needed])
        carrying: dict[Value, Value] = {}

        def read_masked(call: Call) -> Call:
            args, kwargs = map_values(lambda x: carrying.get(x, x), (call.args, call.kwargs))
            return dataclasses.replace(call, args=args, kwargs=kwargs)

        calls: list[Call] = []
        for call in graph.calls:
            calls.append(call if is_operation(call.layer) else read_masked(call))
            for index, value in enumerate(flatten_values(call.outputs)):
                if value in masks:
                    parts = PartsBuilder(call, self.context)
                    layer = parts.new(f"masked_{index}" if index else "masked", CarryMask)
                    output = Value(f"{value.name}_masked", value.shape, value.dtype, masked=True)
                    parts.add(layer, value, kwargs={"mask": masks[value]}, output=output)
                    calls += [part.as_part_of(call) for part in parts.calls]
                    carrying[value] = output
        return dataclasses.replace(
            graph,
            calls=_sort([*calls, *self.take_calls()]),
            loss_only=list(map(read_masked, graph.loss_only)),
            outputs=map_values(lambda x: carrying.get(x, x), graph.outputs),
        )


def _sort(calls: list[Call]) -> list[Call]:
    among, done, facts = set(calls), dict[Call, None](), Facts()

    def visit(call: Call) -> Generator[Call, Any, None]:
        for value in call.inputs:
            if value.producer in among:
                yield value.producer
        done[call] = None

    for call in calls:
        facts.find(visit, call)
    return list(done)


def is_recurrent(layer: layers.Layer) -> bool:
    """Return whether a layer is a recurrent layer of Keras, or a subclass that inherits `call`."""
    return isinstance(layer, RECURRENT) and get_package(type(layer).call) in KERAS


def reads_mask(call: Call) -> bool:
    """Return whether a call of a recurrent layer, or of a layer in `_TRACED`, reads a mask."""
    is_given = bool(flatten_values(call.kwargs.get("mask")))
    is_masked = is_given or any(value.masked for value in call.inputs)
    return is_masked and (type(call.layer) in _TRACED or isinstance(call.layer, RECURRENT))


def _may_read_masks(call: Call) -> bool:
    """Return whether a layer that is not traced may read the Keras masks of its inputs."""
    is_given = isinstance(call.layer, RECURRENT) and call.kwargs.get("mask") is not None
    if is_operation(call.layer) or is_given:
        return False
    if type(call.layer) is layers.MultiHeadAttention or not is_listed(call.layer):
        return True
    return accepts_mask(call.layer)


def masks_nonzero(call: Call) -> bool:
    """Return whether a call is a Masking with a nonzero `mask_value`. Quantization may round it."""
    return type(call.layer) is layers.Masking and call.layer.mask_value != 0


def reads_floats(
    call: Call, readers: Mapping[Value, list[Call]], outputs: Collection[Value]
) -> bool:
    """Return whether a Masking can read floats. Its result is then quantized.

    The input, and all tensors that it is computed from, must have no other consumers.
    """

    def find_sources(value: Value) -> list[Value]:
        return value.producer.inputs if value.producer else []

    values = reach(call.inputs, find_sources)
    before = {call, *(value.producer for value in values)}

    def is_read_alone(value: Value) -> bool:
        consumers = readers.get(value, [])  # Inner values of a traced layer are missing.
        has_weights = value.producer is not None and value.producer.layer.weights
        are_alone = all(reader in before or masks_nonzero(reader) for reader in consumers)
        return bool(consumers) and are_alone and value not in outputs and not has_weights

    return all(map(is_read_alone, values))


def split_masking(call: Call, context: LoweringContext, masks: MaskTensors) -> list[Call]:
    """Replace a Masking by `tf.where(mask, x, 0.0)`. Raise `CannotTrace` if this is impossible."""
    (x,), mask = call.inputs, masks.find([call.output])[call.output]

    def compute() -> tf.Tensor:
        return tf.where(tf.expand_dims(make_symbol(mask), -1, name="steps"), make_symbol(x), 0.0)

    parts = trace_in_place(call, compute, context)
    return [*masks.take_calls(), *(part.as_part_of(call) for part in parts)]
