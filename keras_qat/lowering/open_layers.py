"""Opens layers that no row lists: replaces them by the calls that they are made of.

These are Lambdas, custom layers and functions that a user wrote as activations. A layer that cannot
be opened stays whole and computes in float.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from keras_qat.graph.calls import Call, Graph, Value, map_values, values_in
from keras_qat.graph.operation_calls import call_in_layer
from keras_qat.graph.operations import is_operation, kind_of
from keras_qat.graph.rebuild_model import rebuild_model
from keras_qat.graph.size_expressions import with_known_sizes
from keras_qat.graph.static_shapes import close_sizes, closing_sizes
from keras_qat.helper_layers.operations import TrainingOnly, WeightTensor
from keras_qat.keras2.backend import any_first_sizes, keras, layers
from keras_qat.keras2.layers_and_models import layers_in, rename
from keras_qat.lowering.activations import split_activation
from keras_qat.lowering.attention import split_masked_attention
from keras_qat.lowering.attention_masks import hides
from keras_qat.lowering.builder import LoweringContext, PartsBuilder, calls_behind
from keras_qat.lowering.equivalents import equivalent
from keras_qat.lowering.inner_names import InnerNames, expression_of, name_of_weight, weights_behind
from keras_qat.lowering.lent_weights import LentWeights
from keras_qat.lowering.mask_tensors import MaskTensors, is_recurrent, reads_mask
from keras_qat.lowering.masking import finds_number, reads_floats, split_masking
from keras_qat.lowering.normalizing import normalizing
from keras_qat.lowering.own_batch_norm import plain_batch_norm
from keras_qat.lowering.own_code import ATTENTION, has_own_activation, is_closed
from keras_qat.lowering.recurrent import given_mask
from keras_qat.lowering.unrolling import in_few_operations, refused_cells
from keras_qat.lowering.written_out import own_weights
from keras_qat.tracing.attention_dropout import with_dropout
from keras_qat.tracing.cannot_trace import (
    READS_OTHERS,
    CannotOpen,
    OnlyTrains,
    ReadsWeights,
    TooLarge,
)
from keras_qat.tracing.compare_traces import NOISE
from keras_qat.tracing.trace_layer import OpenedLayer
from keras_qat.tracing.whole_graph import as_one_call


def open_layers(graph: Graph, context: LoweringContext) -> Graph:
    """Opens every layer that no row lists.

    The calls of a layer share its weights: one that cannot be opened in one call stays whole in
    all, and weights of which two calls compute different things stay apart from what they compute.
    Where one reads a tensor that another kept in an attribute, all layers are opened as one.

    Args:
        graph: a graph as it was read.
        context: collects the layers that are made.
    """
    opened = _open_all(graph, context)
    if READS_OTHERS not in (opened.closed or {}).values() or graph.loss_only:
        return opened
    context.clear()
    with contextlib.suppress(ValueError):
        together = _open_all(as_one_call(graph), context)
        if READS_OTHERS not in (together.closed or {}).values():
            return together
    context.clear()
    return _open_all(graph, context)


def _open_all(read: Graph, context: LoweringContext) -> Graph:
    """Opens the layers until all calls of each one agree."""
    whole: dict[Any, str] = {}
    together, apart, lent = set[Any](), set[Any](), LentWeights(read)
    while True:
        # Copies, as values know which call computes them, and calls may be given masked tensors.
        calls, loss_only = (list(map(dataclasses.replace, c)) for c in (read.calls, read.loss_only))
        graph = dataclasses.replace(read, calls=calls, loss_only=loss_only)
        context.lenders, changes = lent.shared, lent.changes
        opened = _open_each(graph, context, whole, together, apart | lent.apart(), lent)
        mixed = {layer: context.refused[layer] for layer in context.opened.keys() & context.refused}
        mixed |= refused_cells(context.opened, context.refused)
        # Recurrent layers of which some calls are written out, and others are not.
        partly = {call.layer for call in opened.calls if is_recurrent(call.layer)}
        partly &= context.opened.keys()
        mixed |= dict.fromkeys(partly & together, "its calls differ")
        split = context.split_weights() - apart
        changed = mixed or partly or split or lent.changes != changes
        if not changed and not lent.refuse(opened):
            return opened
        whole.update(mixed)
        together |= partly
        apart |= split
        context.clear()


def _open_each(
    graph: Graph,
    context: LoweringContext,
    whole: Mapping[Any, str],
    together: Collection[Any],
    apart: Collection[Any],
    lent: LentWeights,
) -> Graph:
    """Opens the layers but those that stay `whole`, keeping weights `apart` from what they give.

    Of recurrent layers `together`, every call is written out.
    """
    lenders = set(lent.shared.values())

    def is_whole(call: Call) -> bool:
        """Returns whether a call is a whole subclassed model: its parts keep their names."""
        return graph.calls == [call] and isinstance(call.layer, keras.Model)

    closed: dict[str, str] = {}
    losses: list[Call] = []
    anchor, masks = values_in(graph.inputs)[0], MaskTensors(context)
    masked = {call.layer for call in graph.calls if reads_mask(call)}
    readers, outputs = graph.consumers(), set(values_in(graph.outputs))

    def reads_masks(call: Call) -> bool:
        """Returns whether one of the calls of a layer reads a mask: all become the same."""
        masked.update([call.layer] if reads_mask(call) else ())
        return call.layer in masked

    def expand(call: Call, siblings: Sequence[Call] = ()) -> list[Call]:
        masks.note(call)
        allowed = context.may_open(call)
        if allowed is False:
            return [call]
        written_out = equivalent(call, allowed is True, call.layer in together)
        parts = _unknown_activation(call, context) or plain_batch_norm(call, context)
        if parts:
            masks.hand_over(values_in(call.outputs))
        elif type(call.layer) is layers.MultiHeadAttention:
            parts = split_masked_attention(call, context, masks)
        elif is_recurrent(call.layer) and reads_masks(call) and not written_out:
            with contextlib.suppress(CannotOpen):
                parts = given_mask(call, masks)
        elif finds_number(call) and (allowed or not reads_floats(call, readers, outputs)):
            with contextlib.suppress(CannotOpen):
                parts = split_masking(call, context, masks)
        elif written_out or is_closed(call.layer) or reads_masks(call) or call.layer in lenders:
            try:
                if call.layer in whole:
                    raise CannotOpen(whole[call.layer])
                forced = allowed is True or is_whole(call)
                prefix = "" if is_whole(call) else f"{call.name}/"
                taken = {other.name.removeprefix(prefix) for other in siblings}
                named = context.names.setdefault(call.layer, {})
                namer = InnerNames(call, prefix, named, taken)
                with in_few_operations(call.layer), with_dropout(call.layer):
                    read_here = [*lent.of.get(call.layer, ()), *own_weights(call.layer)]
                    read_here += lent.outside.get(call.layer, [])
                    opened, read = masks.opened(call, written_out, read_here)
                parts = _calls_of(
                    opened, call, read, context, anchor, namer, forced, call.layer in apart, losses
                )
                parts = [*masks.take_calls(), *parts]
            except OnlyTrains as error:
                keep = PartsBuilder(call, context)
                layer = keep.new("", TrainingOnly, error.model, weights=error.model.weights)
                return keep.end(layer, call.inputs[0])
            except CannotOpen as error:
                if isinstance(error, ReadsWeights) and lent.note(call.layer, error.variables):
                    return [call]  # It is opened with the layers that lend them, the next time.
                if is_whole(call):
                    raise ValueError(
                        f"The subclassed model '{call.name}' cannot be opened: {error}. Express "
                        f"it in the functional style, keras.Model(inputs, outputs), or quantize "
                        f"the functional models inside it one by one."
                    ) from error
                is_of_keras = type(call.layer) is not layers.RNN and written_out
                is_usual = is_of_keras or type(call.layer) in ATTENTION or call.layer in masked
                if not is_usual or isinstance(error, TooLarge):
                    closed[call.name] = context.refused[call.layer] = str(error)
        siblings = [*siblings, *parts]
        return [c for part in closing_sizes(parts) for c in expand(part, siblings)] or [call]

    calls = [part for call in closing_sizes(graph.calls) for part in expand(call)]
    losses = [*graph.loss_only, *losses]
    return masks.carried(dataclasses.replace(graph, calls=calls, closed=closed, loss_only=losses))


def _unknown_activation(call: Call, context: LoweringContext) -> list[Call]:
    """Splits a user's own activation, a function or a layer, off a Keras layer."""
    if type(call.layer) is layers.Activation or not has_own_activation(call.layer):
        return []
    parts, inner = split_activation(call, context), call.layer.activation
    if getattr(inner, "weights", ()):  # A copy of the layer would not be built.
        parts[-1] = dataclasses.replace(parts[-1], layer=inner)
    return parts


def _calls_of(
    opened: OpenedLayer,
    call: Call,
    read: list[Value],
    context: LoweringContext,
    anchor: Value,
    namer: InnerNames,
    forced: bool,
    apart: bool,
    losses: list[Call],
) -> list[Call]:
    """Returns the calls inside an opened layer, on what it reads and on the call's outputs.

    What it computes from weights alone becomes one tensor of weights, unless they are kept `apart`.
    What its own losses and metrics need is added to `losses`.
    """
    parts, graph = PartsBuilder(call, context), with_known_sizes(opened.graph)
    inputs = values_in(graph.inputs)
    for value, outer in zip(inputs, read, strict=False):
        value.rows = outer.rows
    close_sizes(graph)
    if any(weight.is_complex for weight in opened.weights):
        raise CannotOpen("its weights are complex numbers")
    current: dict[Value, Value] = dict(zip(inputs, read, strict=False))
    of_weights = set(opened.weights) if apart else _computed_from_weights(graph, opened.weights)
    if not forced and (symbol := normalizing(graph, of_weights)):
        raise CannotOpen(f"it normalizes (tf.{symbol}), which takes more than 8 bits")
    pairs = list(zip(values_in(graph.outputs), values_in(call.outputs), strict=False))
    for value, output in pairs:
        output.shape = value.shape if len(value.shape) == len(output.shape) else output.shape
        output.rows = value.rows
    outputs_of = dict(reversed(pairs))  # Of a tensor that is returned twice, the first.
    # Inside of the layer a tensor may carry another mask than outside.
    inside = {value for inner in graph.calls for value in inner.inputs}
    direct = {
        value: output
        for value, output in outputs_of.items()
        if opened.carries_masks or value not in inside or not (value.masked or output.masked)
    }
    count = context.opened[call.layer] = context.opened.get(call.layer, 0) + 1
    mark = f"#{count}" if count > 1 else ""

    def tensor_of(value: Value) -> Value:
        """Returns the value in an inner one's place; weights become tensors at first use."""
        if value not in current:
            name = namer.unique(name_of_weight(value, opened), expression_of(value, opened))
            variable, label = id(opened.weights.get(value)), name + mark
            if variable in context.lenders:
                name, label = context.shared_name(variable, name)
            owner = context.lenders.get(variable, call.layer)
            layer, shape = _weight_tensor(value, opened, parts, name, owner)
            current[value] = direct.get(value) or Value(label, shape, value.dtype)
            parts.calls.append(Call(layer, (anchor,), {}, current[value], name, source=call.source))
        return current[value]

    of_losses = set(graph.loss_only)
    for inner in [*graph.calls, *graph.loss_only]:
        if set(values_in(inner.outputs)) <= of_weights:
            continue
        symbol = kind_of(inner)
        args, kwargs = map_values(tensor_of, (inner.args, inner.kwargs))
        gives_output = not outputs_of.keys().isdisjoint(values_in(inner.outputs))
        name = namer.name(inner, (args, kwargs), gives_output)
        for value in values_in(inner.outputs):
            label = name + mark + value.name.removeprefix(inner.name)
            inner_value = Value(label, value.shape, value.dtype, None, value.masked, value.rows)
            current[value] = direct.get(value) or inner_value
        outputs = map_values(current.__getitem__, inner.outputs)
        layer, source = inner.layer, None
        if is_operation(layer):
            source = call.source
            rename(layer, name.rsplit("/", 1)[-1])
            layer = context.keep(call.layer, f"{symbol} {name}", layer)
        added = losses if inner in of_losses else parts.calls
        added.append(Call(layer, args, kwargs, outputs, name, source=source))
    for index, (value, output) in enumerate(pairs):
        if tensor_of(value) is not output:  # The layer returns its input, or a tensor twice.
            identity = parts.new(f"output_{index}", layers.Activation, "linear")
            is_taken = index > 0 or namer.gave_output
            name = f"{call.name}/output_{index}" if is_taken else call.name
            parts.calls.append(
                Call(identity, (current[value],), {}, output, name, source=call.source)
            )
    for part in parts.calls:
        part.within = (*call.within, call.layer)
    return parts.calls


def _computed_from_weights(graph: Graph, weights: dict[Value, Any]) -> set[Value]:
    """Returns the weights, and the values to compute from them alone.

    Of a weight one value at most is read by other calls, which is why it may be kept in the place
    of that weight: of real numbers, as it is quantized. Layers with weights of their own, or with
    noise in training, stay calls, and so do masks.
    """
    behind: dict[Value, set[Value]] = {weight: {weight} for weight in weights}
    for call in graph.calls:
        is_pure = not getattr(call.layer, "weights", ()) and type(call.layer) not in NOISE
        is_pure = is_pure and not hides(call)
        if is_pure and call.inputs and behind.keys() >= set(call.inputs):
            read = set[Value]().union(*(behind[value] for value in call.inputs))
            behind.update(dict.fromkeys(values_in(call.outputs), read))
    outputs, readers = set(values_in(graph.outputs)), graph.consumers()

    def is_read_by_others(value: Value) -> bool:
        """Returns whether a value is an output, or a call reads it that computes more."""
        results = [set(values_in(call.outputs)) for call in readers[value]]
        return value in outputs or not all(map(behind.keys().__ge__, results))

    def used(weight: Value) -> list[Value]:
        """Returns what is computed from a weight and read by calls that compute more."""
        return [
            value for value, read in behind.items() if weight in read and is_read_by_others(value)
        ]

    while values := [x for x in behind if x.is_complex and is_read_by_others(x)]:
        behind = {x: read for x, read in behind.items() if x not in values}
    for weight in weights:
        while len(values := used(weight)) > 1:
            del behind[values[-1]]
    return set(behind)


@any_first_sizes()
def _weight_tensor(
    value: Value, opened: OpenedLayer, parts: PartsBuilder, name: str, owner: Any
) -> tuple[Any, Any]:
    """Returns the layer, made once, for a value that depends on weights alone, and its shape."""
    of_frozen_layers = {
        id(w) for inner in layers_in(owner)[1:] if not inner.trainable for w in inner.weights
    }

    known = {id(w) for w in owner.weights}

    def is_frozen(variable: Any) -> bool:
        if id(variable) not in known:  # Of an object that Keras does not know.
            return True
        return not variable.trainable or id(variable) in of_frozen_layers

    # As Keras lists them: those that train first.
    sources = sorted(weights_behind(value, opened), key=lambda w: is_frozen(opened.weights[w]))
    variables = [opened.weights[source] for source in sources]
    expression = None
    if value not in opened.weights:
        graph = dataclasses.replace(
            opened.graph,
            inputs=sources,
            outputs=value,
            output_names=["tensor"],
            calls=calls_behind(value),
            loss_only=[],
            name="expression",
        )
        expression = rebuild_model(graph, apply=call_in_layer)
    layer = parts.context.layer(
        owner,
        f"weight {name}",
        lambda: WeightTensor(
            [tuple(variable.shape) for variable in variables],
            expression,
            weight_dtype=variables[0].dtype.name,
            frozen=[index for index, w in enumerate(variables) if is_frozen(w)],
            regularizers=[opened.regularizers.get(id(w)) for w in variables],
            constraints=[variable.constraint for variable in variables],
            trainable=owner.trainable,
            name=name.rsplit("/", 1)[-1],
        ),
        variables,
    )
    return layer, tuple(value.shape)
