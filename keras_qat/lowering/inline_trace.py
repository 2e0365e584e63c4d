"""Replaces the call of a traced layer by the calls inside the layer.

A trace is a graph of these calls. Its inputs are the layer's inputs, their Keras masks, and the
layer's weights. In the graph of the model, a `WeightTensor` layer returns each weight.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Generator, Mapping
from typing import Any

import tensorflow as tf

from keras_qat.graph.calls import Call, Graph, Value, flatten_values, map_values
from keras_qat.graph.facts import Facts, describe_arguments
from keras_qat.graph.operations import is_operation, name_in_tensorflow, read_array
from keras_qat.graph.rebuild_model import call_in_layer, rebuild_model
from keras_qat.graph.sizes import fold_known_sizes, set_static_shapes
from keras_qat.helper_layers.operations import WeightTensor
from keras_qat.keras2.backend import allow_any_batch_sizes, layers
from keras_qat.keras2.layers_and_models import list_layers, name_inner_calls, rename
from keras_qat.lowering.builder import LoweringContext, PartsBuilder, find_calls_before
from keras_qat.lowering.masked_scores import has_constant_mask
from keras_qat.tracing.cannot_trace import CannotTrace
from keras_qat.tracing.trace_layer import TracedLayer
from keras_qat.tracing.training_phase import NOISE


class TracedCall:
    """A call and the trace of its layer.

    Args:
        call: the call.
        trace: the trace.
        read: the tensors and masks that the call reads. All other inputs of the trace are weights.
        keeps_weights: whether `kernel` is quantized in `kernel * 2.0`, for example. If False, the
            product is quantized.

    Raises:
        CannotTrace: if the layer has complex weights.
    """

    def __init__(
        self, call: Call, trace: TracedLayer, read: list[Value], keeps_weights: bool
    ) -> None:
        self.call, self.trace, self.read = call, trace, read
        self.graph = graph = fold_known_sizes(trace.graph)
        for value, outer in zip(flatten_values(graph.inputs), read, strict=False):
            value.rows = outer.rows
        set_static_shapes(graph)
        if any(weight.is_complex for weight in trace.weights):
            raise CannotTrace("its weights are complex numbers")
        self.of_weights = set(trace.weights)
        """The weights, and all tensors that `WeightTensor` layers compute from them."""
        if not keeps_weights:
            self.of_weights = find_computed_weights(graph, trace.weights)
        self.facts = Facts()

    def name_weight(self, value: Value) -> str:
        """Return the name of a weight, or `kernel_computed` for a tensor computed from `kernel`."""
        suffix = "" if value in self.trace.weights else "_computed"
        variable = self.trace.weights[self.facts.find(self.find_weights, value)[0]]
        return variable.name.split(":")[0].rsplit("/", 1)[-1] + suffix

    def find_weights(self, value: Value) -> Generator[Value, Any, list[Value]]:
        """Return the weights that a value depends on. Called by `Facts.find`."""
        if value in self.trace.weights:
            return [value]
        assert value.producer is not None
        weights: dict[Value, None] = {}
        for read in value.producer.inputs:
            weights.update(dict.fromkeys((yield read)))
        return list(weights)

    def hash_expression(self, value: Value) -> Generator[Value, Any, str]:
        """Return a hash of how a value is computed from weights. Called by `Facts.find`."""
        if value in self.trace.weights:
            return f"weight {id(self.trace.weights[value])}"
        call = value.producer
        assert call is not None
        layer, index = call.layer, flatten_values(call.outputs).index(value)
        expressions = {}
        for read in call.inputs:
            expressions[read] = yield read
        function = name_in_tensorflow(layer) if is_operation(layer) else id(layer)
        arguments = describe_arguments(call, expressions.__getitem__)
        return hashlib.sha256(repr((function, arguments, index)).encode()).hexdigest()


class Inliner:
    """Replaces calls of traced layers by the calls inside the layers.

    If a model calls a layer twice, both calls have the same inner layers.

    Args:
        context: stores the layers.
        anchor: an input of the model. `WeightTensor` layers read it, because calls need inputs.
        owners: maps the id of a variable that several layers read to the layer that owns it.
    """

    def __init__(
        self, context: LoweringContext, anchor: Value, owners: Mapping[int, layers.Layer]
    ) -> None:
        self.context, self.anchor, self.owners = context, anchor, owners
        self.losses: list[Call] = []
        """Calls that compute only losses and metrics of traced layers."""
        self.counts: Counter[layers.Layer] = Counter()
        self.named: dict[layers.Layer, dict[str, object]] = {}
        """For each layer, maps the name of an inner call or weight to an identifier of it."""
        self._labels: dict[int, list[str]] = {}

    def inline(self, traced: TracedCall, prefix: str, taken: set[str]) -> list[Call]:
        """Return the calls inside a layer. They compute the outputs of the layer's call.

        All names begin with `prefix`, such as "block/". `taken` has used names without `prefix`.
        """
        self.counts[traced.call.layer] += 1
        within = (*traced.call.within, traced.call.layer)
        calls = _Inlined(self, traced, prefix, taken).run()
        return [call.replace(within=within) for call in calls]

    def label_shared(self, variable: int, name: str) -> tuple[str, str]:
        """Return the name of a shared weight, and a new tensor's name, such as `kernel#2`."""
        labels = self._labels.setdefault(variable, [])
        first = labels[0] if labels else name
        labels.append(f"{first}#{len(labels) + 1}" if labels else first)
        return first, labels[-1]


class _Inlined:
    def __init__(self, inliner: Inliner, traced: TracedCall, prefix: str, taken: set[str]) -> None:
        self.inliner, self.traced, self.prefix, self.taken = inliner, traced, prefix, taken
        graph, call, trace = traced.graph, traced.call, traced.trace
        self.call, self.parts = call, PartsBuilder(call, inliner.context)
        count = inliner.counts[call.layer]
        self.mark = f"#{count}" if count > 1 else ""
        self.named = inliner.named.setdefault(call.layer, {})
        self.inside = name_inner_calls(call.layer)
        self.names: dict[layers.Layer, str] = {}
        self.has_output = False
        """Whether a call inside the layer already has the name of the layer's call."""
        self.tensors = dict(zip(flatten_values(graph.inputs), traced.read, strict=False))
        """Maps a tensor inside the layer to a tensor of the model."""
        self.ends = list(
            zip(flatten_values(graph.outputs), flatten_values(call.outputs), strict=False)
        )
        for value, output in self.ends:
            output.shape = value.shape if len(value.shape) == len(output.shape) else output.shape
            output.rows = value.rows
        self.outputs = dict(reversed(self.ends))  # Of equal outputs, the first is used.
        # A tensor may have different masks inside and outside of the layer.
        inside = {value for inner in graph.calls for value in inner.inputs}
        self.direct = {
            value: output
            for value, output in self.outputs.items()
            if trace.carries_masks or value not in inside or not (value.masked or output.masked)
        }

    def run(self) -> list[Call]:
        graph = self.traced.graph
        for inner in graph.calls:
            self._add(inner, self.parts.calls)
        for inner in graph.loss_only:
            self._add(inner, self.inliner.losses)
        for index, (value, output) in enumerate(self.ends):
            if self._find_tensor(value) is not output:
                self._return(value, output, index)
        return self.parts.calls

    def _add(self, inner: Call, calls: list[Call]) -> None:
        values, call = flatten_values(inner.outputs), self.call
        if self.traced.of_weights.issuperset(values):
            return
        args, kwargs = map_values(self._find_tensor, (inner.args, inner.kwargs))
        name = self._name_call(inner, (args, kwargs))
        for value in values:
            label = name + self.mark + value.name.removeprefix(inner.name)
            tensor = Value(label, value.shape, value.dtype, None, value.masked, value.rows)
            self.tensors[value] = self.direct.get(value) or tensor
        outputs = map_values(self.tensors.__getitem__, inner.outputs)
        layer, source = inner.layer, None
        if is_operation(layer):
            source, part = call.source, f"{name_in_tensorflow(layer)} {name}"
            rename(layer, name.rsplit("/", 1)[-1])
            layer = self.inliner.context.keep(call.layer, part, layer)
        calls.append(Call(layer, args, kwargs, outputs, name, source=source))

    def _name_call(self, inner: Call, arguments: Any) -> str:
        """Return a name for a call inside the layer.

        Operations that read different weights get different names. The first operation that
        computes an output of the layer gets the name of the layer's call.
        """
        layer = inner.layer
        if is_operation(layer):
            symbol = name_in_tensorflow(layer)
            named = symbol, identify_weights(arguments)
            is_output = not self.outputs.keys().isdisjoint(flatten_values(inner.outputs))
            is_first = is_output and not self.has_output
            if is_first and self.named.setdefault("", named) == named:
                self.has_output = True
                return self.call.name
            return self._make_unique(symbol.rsplit(".", 1)[-1], named)
        if layer not in self.names:
            base = self.inside.get(id(layer), inner.name)
            self.names[layer] = self._make_unique(base, id(layer))
        return self.names[layer]

    def _make_unique(self, base: str, named: object) -> str:
        """Return `base`, or `base_1` if `base` is the name of an item other than `named`."""
        name, count = base, 1
        while name in self.taken or self.named.setdefault(name, named) != named:
            name, count = f"{base}_{count}", count + 1
        self.taken.add(name)
        return self.prefix + name

    def _find_tensor(self, value: Value) -> Value:
        """Return the model's tensor for a tensor in the layer. Add a `WeightTensor` if needed."""
        if value in self.tensors:
            return self.tensors[value]
        traced = self.traced
        expression = traced.facts.find(traced.hash_expression, value)
        name = self._make_unique(traced.name_weight(value), expression)
        variable, label = id(traced.trace.weights.get(value)), name + self.mark
        owner = self.inliner.owners.get(variable)
        if owner is not None:
            name, label = self.inliner.label_shared(variable, name)
        layer = _make_weight_tensor(value, traced, self.inliner.context, name, owner)
        tensor = self.direct.get(value) or Value(label, tuple(value.shape), value.dtype)
        self.tensors[value] = tensor
        call = Call(layer, (self.inliner.anchor,), {}, tensor, name, source=self.call.source)
        self.parts.calls.append(call)
        return tensor

    def _return(self, value: Value, output: Value, index: int) -> None:
        """Add an identity for an output that is also an input, or that equals another output."""
        call = self.call
        identity = self.parts.new(f"output_{index}", layers.Activation, "linear")
        name = f"{call.name}/output_{index}" if index or self.has_output else call.name
        new = Call(identity, (self.tensors[value],), {}, output, name, source=call.source)
        self.parts.calls.append(new)


def identify_weights(arguments: Any) -> list[int | bytes]:
    """Return a list that is equal for arguments with the same weights and constant arrays."""
    leaves = tf.nest.flatten(arguments)
    producers = [leaf.producer for leaf in leaves if isinstance(leaf, Value)]
    weights = [id(call.layer) for call in producers if call and type(call.layer) is WeightTensor]
    arrays = [read_array(leaf) for leaf in leaves if not isinstance(leaf, Value)]
    return [*weights, *(x.tobytes() for x in arrays if x is not None and x.ndim)]


def find_computed_weights(graph: Graph, weights: Mapping[Value, tf.Variable]) -> set[Value]:
    """Return the weights, and all tensors that a `WeightTensor` can compute from them.

    For example, `kernel * 2.0` is included if no other call reads `kernel`. Results of layers with
    weights or noise are excluded. Constant attention masks are excluded too.
    """
    sources: dict[Value, set[Value]] = {weight: {weight} for weight in weights}
    for call in graph.calls:
        has_state = getattr(call.layer, "weights", ()) or type(call.layer) in NOISE
        if (
            call.inputs
            and sources.keys() >= set(call.inputs)
            and not has_state
            and not has_constant_mask(call)
        ):
            read = set[Value]().union(*(sources[value] for value in call.inputs))
            sources.update(dict.fromkeys(flatten_values(call.outputs), read))
    outputs, readers = set(flatten_values(graph.outputs)), graph.consumers()

    def has_other_consumers(value: Value) -> bool:
        results = [set(flatten_values(call.outputs)) for call in readers[value]]
        return value in outputs or not all(map(sources.keys().__ge__, results))

    while values := [x for x in sources if x.is_complex and has_other_consumers(x)]:
        sources = {x: read for x, read in sources.items() if x not in values}
    for weight in weights:
        while values := [x for x in sources if weight in sources[x] and has_other_consumers(x)][1:]:
            del sources[values[-1]]
    return set(sources)


@allow_any_batch_sizes()
def _make_weight_tensor(
    value: Value,
    traced: TracedCall,
    context: LoweringContext,
    name: str,
    owner: layers.Layer | None,
) -> layers.Layer:
    """Return the `WeightTensor` layer for a weight, or for a tensor computed from weights.

    `owner` is the layer that owns a weight which several layers read. Otherwise, it is None.
    """
    trace, owner = traced.trace, traced.call.layer if owner is None else owner
    inside = [inner for inner in list_layers(owner)[1:] if not inner.trainable]
    frozen = {id(variable) for inner in inside for variable in inner.weights}
    known = {id(variable) for variable in owner.weights}

    def is_frozen(variable: tf.Variable) -> bool:
        if id(variable) not in known:  # Keras does not track the object that owns the weight.
            return True
        return not variable.trainable or id(variable) in frozen

    # Keras lists trainable weights first.
    sources = traced.facts.find(traced.find_weights, value)
    sources = sorted(sources, key=lambda w: is_frozen(trace.weights[w]))
    variables = [trace.weights[source] for source in sources]
    expression = None
    if value not in trace.weights:
        graph = Graph("expression", sources, value, ["tensor"], find_calls_before(value))
        expression = rebuild_model(graph, apply=call_in_layer)

    def make() -> WeightTensor:
        return WeightTensor(
            [tuple(variable.shape) for variable in variables],
            expression,
            weight_dtype=variables[0].dtype.name,
            frozen=[index for index, w in enumerate(variables) if is_frozen(w)],
            regularizers=[trace.regularizers.get(id(w)) for w in variables],
            constraints=[variable.constraint for variable in variables],
            trainable=owner.trainable,
            name=name.rsplit("/", 1)[-1],
        )

    return context.layer(owner, f"weight {name}", make, variables)
