"""Puts the calls inside a traced layer in the place of the layer's call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from keras_qat.graph.calls import Call, Graph, Value, flatten_values, map_values
from keras_qat.graph.operations import is_operation, name_in_tensorflow
from keras_qat.graph.rebuild_model import call_in_layer, rebuild_model
from keras_qat.graph.sizes import fold_known_sizes, set_static_shapes
from keras_qat.helper_layers.operations import WeightTensor
from keras_qat.keras2.backend import allow_any_batch_sizes, layers
from keras_qat.keras2.layers_and_models import list_layers, rename
from keras_qat.lowering.builder import LoweringContext, PartsBuilder, calls_behind
from keras_qat.lowering.inner_names import InnerNames, expression_of, name_of_weight, weights_behind
from keras_qat.lowering.masked_scores import has_constant_mask
from keras_qat.tracing.cannot_trace import CannotTrace
from keras_qat.tracing.compare_traces import NOISE
from keras_qat.tracing.trace_layer import TracedLayer


class TracedCall:
    """A call and the trace of its layer.

    Args:
        call: the call.
        trace: the trace.
        read: the tensors that the call reads, and their masks: the trace's inputs but its weights.
        keeps_weights: whether nothing is computed from weights before they are quantized.

    Raises:
        CannotTrace: if it has complex weights.
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
        """The weights, and the tensors that are computed from them alone, once for all calls."""
        if not keeps_weights:
            self.of_weights = find_computed_weights(graph, trace.weights)


class Inliner:
    """Inlines traced calls, with equal names and the same layers in all calls of a layer.

    Args:
        context: collects the layers that are made.
        anchor: a tensor that the layers read that hold a weight.
        owners: id of a variable that several layers read -> the layer that it belongs to.
    """

    def __init__(self, context: LoweringContext, anchor: Value, owners: Mapping[int, Any]) -> None:
        self.context, self.anchor, self.owners = context, anchor, owners
        self.losses: list[Call] = []
        """Calls that only the losses and metrics of traced layers depend on."""
        self.counts: Counter[Any] = Counter()
        """Layer -> how many of its calls were inlined."""
        self._names: dict[Any, dict[str, Any]] = {}
        self._labels: dict[int, list[str]] = {}

    def inline(self, traced: TracedCall, prefix: str, taken: set[str]) -> list[Call]:
        """Return the calls inside the layer, on the tensors that the call reads and writes.

        Args:
            traced: the call.
            prefix: the beginning of their names.
            taken: names that other calls have already, without the prefix.
        """
        layer = traced.call.layer
        self.counts[layer] += 1
        names = InnerNames(traced.call, prefix, self._names.setdefault(layer, {}), taken)
        within = (*traced.call.within, layer)
        return [call.replace(within=within) for call in _Inlined(self, traced, names).run()]

    def label_shared(self, variable: int, name: str) -> tuple[str, str]:
        """Return the name of a weight that several layers read, and its tensor's in the next call.

        Args:
            variable: id of the variable.
            name: its name if it has none yet.
        """
        labels = self._labels.setdefault(variable, [])
        first = labels[0] if labels else name
        labels.append(f"{first}#{len(labels) + 1}" if labels else first)
        return first, labels[-1]


class _Inlined:
    """One call that is inlined."""

    def __init__(self, inliner: Inliner, traced: TracedCall, names: InnerNames) -> None:
        self.inliner, self.traced, self.names = inliner, traced, names
        self.parts = PartsBuilder(traced.call, inliner.context)
        count = inliner.counts[traced.call.layer]
        self.mark = f"#{count}" if count > 1 else ""
        graph, call, trace = traced.graph, traced.call, traced.trace
        self.tensors = dict(zip(flatten_values(graph.inputs), traced.read, strict=False))
        """Value inside the layer -> the tensor in its place."""
        self.ends = list(
            zip(flatten_values(graph.outputs), flatten_values(call.outputs), strict=False)
        )
        for value, output in self.ends:
            output.shape = value.shape if len(value.shape) == len(output.shape) else output.shape
            output.rows = value.rows
        self.outputs = dict(reversed(self.ends))  # Of a tensor that is returned twice, the first.
        # Inside the layer, a tensor may carry another mask than outside.
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
            if self._tensor_of(value) is not output:
                self._return(value, output, index)
        return self.parts.calls

    def _add(self, inner: Call, calls: list[Call]) -> None:
        values = flatten_values(inner.outputs)
        if self.traced.of_weights.issuperset(values):
            return
        args, kwargs = map_values(self._tensor_of, (inner.args, inner.kwargs))
        gives_output = not self.outputs.keys().isdisjoint(values)
        name = self.names.name(inner, (args, kwargs), gives_output)
        for value in values:
            label = name + self.mark + value.name.removeprefix(inner.name)
            tensor = Value(label, value.shape, value.dtype, None, value.masked, value.rows)
            self.tensors[value] = self.direct.get(value) or tensor
        outputs = map_values(self.tensors.__getitem__, inner.outputs)
        layer, source = inner.layer, None
        if is_operation(layer):
            source, part = self.traced.call.source, f"{name_in_tensorflow(layer)} {name}"
            rename(layer, name.rsplit("/", 1)[-1])
            layer = self.inliner.context.keep(self.traced.call.layer, part, layer)
        calls.append(Call(layer, args, kwargs, outputs, name, source=source))

    def _tensor_of(self, value: Value) -> Value:
        """Return the tensor in the place of a value; weights become tensors when first used."""
        if value in self.tensors:
            return self.tensors[value]
        traced, trace = self.traced, self.traced.trace
        name = self.names.unique(name_of_weight(value, trace), expression_of(value, trace))
        variable, label = id(trace.weights.get(value)), name + self.mark
        owner = self.inliner.owners.get(variable)
        if owner is not None:
            name, label = self.inliner.label_shared(variable, name)
        layer = _make_weight_tensor(value, traced, self.inliner.context, name, owner)
        tensor = self.direct.get(value) or Value(label, tuple(value.shape), value.dtype)
        self.tensors[value] = tensor
        call = Call(layer, (self.inliner.anchor,), {}, tensor, name, source=traced.call.source)
        self.parts.calls.append(call)
        return tensor

    def _return(self, value: Value, output: Value, index: int) -> None:
        """Add an identity, because a layer returns its input, or a tensor twice."""
        call = self.traced.call
        identity = self.parts.new(f"output_{index}", layers.Activation, "linear")
        is_taken = index > 0 or self.names.gave_output
        name = f"{call.name}/output_{index}" if is_taken else call.name
        new = Call(identity, (self.tensors[value],), {}, output, name, source=call.source)
        self.parts.calls.append(new)


def find_computed_weights(graph: Graph, weights: Mapping[Value, Any]) -> set[Value]:
    """Return the weights, and the tensors to compute from them alone before they are quantized.

    The result takes the place of the weight, so at most one tensor for each weight may have other
    consumers. Layers with weights or noise stay calls, and so do masks.
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
    value: Value, traced: TracedCall, context: LoweringContext, name: str, owner: Any
) -> Any:
    """Return the layer, made once, that holds a weight or a tensor computed from weights.

    Args:
        value: the tensor in the trace.
        traced: the call.
        context: keeps the layer.
        name: its name.
        owner: the layer that the weight belongs to, if other layers read it; else None.
    """
    trace, owner = traced.trace, traced.call.layer if owner is None else owner
    inside = [inner for inner in list_layers(owner)[1:] if not inner.trainable]
    frozen = {id(variable) for inner in inside for variable in inner.weights}
    known = {id(variable) for variable in owner.weights}

    def is_frozen(variable: Any) -> bool:
        if id(variable) not in known:  # Of an object that Keras does not know.
            return True
        return not variable.trainable or id(variable) in frozen

    # As Keras lists them: those that train first.
    sources = sorted(weights_behind(value, trace), key=lambda w: is_frozen(trace.weights[w]))
    variables = [trace.weights[source] for source in sources]
    expression = None
    if value not in trace.weights:
        graph = Graph("expression", sources, value, ["tensor"], calls_behind(value))
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
