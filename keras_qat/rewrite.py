"""The visitor that clones a model along its plan, with wrappers and quantizers in place."""

from __future__ import annotations

from collections import Counter
from typing import Any

from keras_qat import specs
from keras_qat.keras2.backend import KeepsTrainable, applications_scope, keras, register
from keras_qat.keras2.graph import (
    Call,
    Graph,
    Value,
    clone,
    map_values,
    read,
    rebuild,
    values_in,
)
from keras_qat.keras2.phases import PhasedModel
from keras_qat.kinds import CLIPS, is_left_in_float, kind_of, leave_in_float
from keras_qat.layers import (
    FusedBatchNormalization,
    Quantize,
    QuantizeWeights,
    QuantizeWrapper,
    exact,
)
from keras_qat.layers.scheduled import NEVER, shapes_only
from keras_qat.patterns import Group, is_batch_norm
from keras_qat.plan import Plan, Range
from keras_qat.recipes import Recipe
from keras_qat.schedule import schedule

__all__ = ["PREFIX", "QuantizedModel", "rewrite"]

MOVES = ("move", "linear", "concatenate", "maximum")
"""Kinds whose output holds codes of their inputs."""

PREFIX = "quant_"
"""Goes in front of the name of every layer but the inputs."""


@register
class QuantizedModel(PhasedModel, KeepsTrainable, keras.Model):
    """A functional model that knows what it was made of: float model and recipe."""

    recipe: Recipe
    float_config: dict[str, Any]
    """Configuration of the float model, as `keras.Model.from_config` takes it."""

    def keep_float_config(self, config: dict[str, Any]) -> None:
        """Sets `float_config`, past Keras, which would track every list and dict in it."""
        object.__setattr__(self, "float_config", config)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "recipe": self.recipe.to_config(),
            "float_config": self.float_config,
            "output_names": list(self.output_names),
            "float_layers": [each.name for each in self.layers if is_left_in_float(each)],
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        config = dict(config)
        recipe, output_names = config.pop("recipe"), config.pop("output_names")
        float_config, float_layers = config.pop("float_config"), config.pop("float_layers", [])
        with applications_scope(), shapes_only():
            model = super().from_config(config, custom_objects)
        model.recipe = Recipe.from_config(recipe)
        model.keep_float_config(float_config)
        model.output_names = output_names
        for name in float_layers:
            leave_in_float(model.get_layer(name))
        link(model)
        return model


# Keras' .h5 files name a model's class without the package it was registered in.
keras.utils.get_custom_objects()["QuantizedModel"] = QuantizedModel


def rewrite(plan: Plan) -> QuantizedModel:
    """Builds the quantization-aware model of a plan, with the float model's weights."""
    visitor = _Visitor(plan)
    graph = visitor.visit()
    with shapes_only():
        model = rebuild(graph, QuantizedModel)
    model.recipe = plan.recipe
    model.output_names = graph.output_names
    for layer, weights in visitor.sources.items():
        for new, old in zip(layer.weights, weights, strict=True):
            new.assign(old)
        layer.finalize_state()  # Normalization computes with what it makes of its weights.
    link(model)
    recipe = plan.recipe
    if recipe.quant_delay or recipe.freeze_bn_delay is not None:
        frozen_from = NEVER if recipe.freeze_bn_delay is None else recipe.freeze_bn_delay
        schedule(model, quantize_from=recipe.quant_delay, freeze_from=frozen_from)
    return model


def link(model: QuantizedModel) -> None:
    """Tells each wrapper what quantizes the input and the result of its calls.

    Quantizers behind kernels that round in a way of their own are told the same, and the layer.
    """
    graph = read(model)
    consumers = graph.consumers()
    for call in graph.calls:
        if isinstance(call.layer, QuantizeWrapper):
            ends = _quantizer_of(call.inputs[0]), _quantizer_behind(call.output, consumers)
            call.layer.ends[call.kwargs.get("call", 0)] = ends
        elif "source" in call.kwargs:
            unquantized, *sources = call.inputs
            before, maker = [_quantizer_of(each) for each in sources], unquantized.producer
            if None not in before and maker is not None:
                slot, kernel = call.kwargs["slot"], call.kwargs["kernel"]
                kind, activation = kernel.split()[0], None
                if kind_of(maker) != kind:  # A ReLU, merged into the kernel in front of it.
                    activation, maker = maker.layer, maker.inputs[0].producer
                source = exact.Source(kind, maker, activation, before)
                call.layer.quantizer.sources[slot, kernel] = source


def _quantizer_of(value: Value) -> Any:
    """What a tensor of a quantization-aware model was last quantized by, or None."""
    while value.producer is not None:
        layer = value.producer.layer
        if isinstance(layer, Quantize):
            return layer.quantizer
        if isinstance(layer, QuantizeWrapper):
            return layer.output_quantizer
        if kind_of(value.producer) not in MOVES:
            return None
        value = value.producer.inputs[0]
    return None


def _quantizer_behind(value: Value, consumers: dict[Value, list[Call]]) -> Any:
    """What rounds a wrapper's output: itself, or the only layer behind it or behind its ReLU."""
    layer = value.producer.layer if value.producer else None
    if isinstance(layer, QuantizeWrapper) and layer.output_quantizer is not None:
        return layer.output_quantizer
    if len(consumers[value]) != 1:
        return None
    (reader,) = consumers[value]
    if kind_of(reader) in CLIPS:
        return _quantizer_behind(reader.output, consumers)
    return reader.layer.quantizer if isinstance(reader.layer, Quantize) else None


class _Visitor:
    """Makes the calls of the quantization-aware model from those of the float model."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        # With the original's placement, files quantize more than its quantizers say.
        self.float_layers = () if plan.recipe.placement == "contrib" else plan.float_layers
        self.counts = plan.graph.call_counts()
        self.group_of = {call: group for group in plan.groups for call in group.calls}
        self.range_of = {
            value: each for each in plan.ranges for value in each.observed + each.rounded
        }
        self.weights_only = {call.layer: how for call, how in plan.weights_only.items()}
        self.layers: dict[Any, Any] = {}
        self.quantizers: dict[Range, Quantize] = {}
        self.sources: dict[Any, list[Any]] = {}
        """New layer -> the weights that it starts from."""
        self.calls: list[Call] = []
        self.emitted: Counter[Any] = Counter()
        """New layer -> how many of the calls are its."""
        self.current: dict[Value, Value] = {}
        """Value of the plan -> the value that takes its place."""

    def visit(self) -> Graph:
        graph = self.plan.graph
        inputs = map_values(self._copy, graph.inputs)
        for value in values_in(graph.inputs):
            self._quantize(value)
        for call in graph.calls:
            group = self.group_of.get(call)
            if group is None:
                self._emit(self._clone(call), call, call)
            elif call is group.calls[-1]:
                self._emit(self._wrap(group), group.kernel, call)
        outputs = map_values(self.current.__getitem__, graph.outputs)
        calls, self.calls = self.calls, []
        for call in graph.aside:
            self._emit(self._clone(call), call, call)
        return Graph(graph.name, inputs, outputs, graph.output_names, calls, aside=self.calls)

    def _copy(self, value: Value) -> Value:
        self.current[value] = Value(value.name, value.shape, value.dtype)
        return self.current[value]

    def _emit(self, layer: Any, reads: Call, writes: Call) -> None:
        """`layer` on what `reads` reads, in place of what `writes` computes.

        A wrapper's calls have their number from the second on, as it has other ranges in each.
        """
        args, kwargs = map_values(self.current.__getitem__, (reads.args, reads.kwargs))
        if isinstance(layer, QuantizeWrapper) and self.emitted[layer]:
            kwargs["call"] = self.emitted[layer]
        self.calls.append(
            Call(layer, args, kwargs, map_values(self._copy, writes.outputs), layer.name)
        )
        self.emitted[layer] += 1
        for value in values_in(writes.outputs):
            self._quantize(value)

    def _clone(self, call: Call) -> Any:
        """A copy of a layer that is not wrapped: one for all of its calls."""
        if call.layer not in self.layers:
            layer = inner = clone(call.layer, name=PREFIX + call.name)
            spec, paths = self.weights_only.get(call.layer, (None, ()))
            if paths:
                inner = clone(call.layer)
                layer = QuantizeWeights(
                    inner, dict.fromkeys(paths, ()), spec, name=PREFIX + call.name
                )
            contrib = self.plan.recipe.placement == "contrib"
            if contrib and is_batch_norm(call) and len(call.output.shape) == 2:
                layer = inner = FusedBatchNormalization.from_config(layer.get_config())
            self.layers[call.layer] = layer
            self._start_from(inner, call.layer)
        if call.name in self.float_layers:
            leave_in_float(self.layers[call.layer])
        return self.layers[call.layer]

    def _wrap(self, group: Group) -> QuantizeWrapper:
        """The wrapper of a group: one for all calls of its kernel layer."""
        layer = group.kernel.layer
        if layer not in self.layers:
            inner = [each and clone(each.layer) for each in (group.kernel, group.batch_norm)]
            self.layers[layer] = QuantizeWrapper(
                inner[0],
                group.weights,
                self.plan.weights[group],
                batch_norm=inner[1],
                batch_norm_frozen=bool(
                    group.batch_norm and group.batch_norm.kwargs.get("training") is False
                ),
                fold=self.plan.recipe.fold,
                activation=group.activation and clone(group.activation.layer),
                output_spec=self._spec_inside(group.output),
                tensor=group.output.name,
                name=PREFIX + group.kernel.name,
            )
            for call, new in zip((group.kernel, group.batch_norm), inner, strict=True):
                if call is not None:
                    self._start_from(new, call.layer)
        return self.layers[layer]

    def _start_from(self, new: Any, old: Any) -> None:
        self.sources[new] = self.plan.graph.weights.get(old, old.weights)

    def _spec_inside(self, value: Value) -> specs.QuantSpec | specs.FixedSpec | None:
        """The specification of a wrapper's own output quantizer.

        None if the range is shared, by several tensors or by several calls of the layer: then a
        layer of its own quantizes.
        """
        found = self.range_of.get(value)
        if found is None or len(found.observed + found.rounded) > 1:
            return None
        group = self.group_of.get(value.producer) if value.producer else None
        if group is None or self.counts[group.kernel.layer] > 1:
            return None
        return found.spec

    def _quantize(self, value: Value) -> None:
        """Puts a `Quantize` layer behind a value, if it has a range that no wrapper holds."""
        found = self.range_of.get(value)
        if found is None or self._spec_inside(value) is not None:
            return
        # TensorFlow's scopes take neither the mark of a call nor that of an output.
        name = value.name.replace("#", "_call").replace(":", "_output") + "_quant"
        if found not in self.quantizers:
            self.quantizers[found] = Quantize(
                found.spec,
                slots=len(found.observed),
                tensors=tuple(each.name for each in found.observed),
                name=name,
            )
        slot = found.observed.index(value) if value in found.observed else None
        unquantized, kwargs = self.current[value], {"slot": slot, **self._kernel(value, found)}
        outputs = self._copy(value)
        self.calls.append(Call(self.quantizers[found], (unquantized,), kwargs, outputs, name))

    def _source_bits(self, value: Value) -> int | None:
        """The bits of the tensor, if it has a range: its own, or that of what it was moved from."""
        while value not in self.range_of:
            if value.producer is None or kind_of(value.producer) not in MOVES:
                return None
            value = value.producer.inputs[0]
        return self.range_of[value].spec.bits

    def _kernel(self, value: Value, found: Range) -> dict[str, Any]:
        """What a quantizer has to know of the kernel in front of it, to compute as that does."""
        call, bits = value.producer, found.spec.bits
        kernels = exact.KERNELS.get(bits)
        if kernels is None or self.plan.recipe.placement == "contrib":
            return {}
        # Averages, which are rounded in a way of their own, come from kernels only.
        by_itself = {} if value in found.rounded else {"kernel": exact.NEAREST}
        if call is None:
            return by_itself
        kind = kind_of(call)
        if kind in CLIPS and call.inputs[0] not in self.range_of:  # One operation at run time.
            call = call.inputs[0].producer or call
            kind = kind_of(call)
        known = all(self._source_bits(each) == bits for each in call.inputs)
        if not known or kind not in kernels or call.name in self.float_layers:
            return by_itself
        tensors = [self.current[each] for each in call.inputs]
        return {"source": tensors, "kernel": f"{kind} {call.name}"}
