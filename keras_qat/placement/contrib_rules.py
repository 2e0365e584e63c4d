"""Quantizes the same tensors as `tf.contrib.quantize` (the original), with the same rules.

A rule matches a pattern of operations, such as Conv2D, bias and ReLU. The first rule that matches
wins. In this module, a *layer* is a Conv2D, DepthwiseConv2D or Dense with its bias or its folded
BatchNormalization. A *bypass* is an Add after a layer, as in a residual network.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator
from typing import Any

from keras_qat.config.specs import QuantSpec, Spec
from keras_qat.graph.calls import Call, Graph, Value, is_batch_norm
from keras_qat.graph.facts import solve
from keras_qat.helper_layers.keras_variants import FusedBatchNormalization
from keras_qat.keras2.backend import keras
from keras_qat.ops.op import FixedRange, SharedRange
from keras_qat.ops.registry import find_op, match
from keras_qat.placement.fusion_groups import Group, find_groups
from keras_qat.placement.plan import Plan, Range
from keras_qat.placement.settings import Settings

KERNELS = {keras.layers.Conv2D, keras.layers.DepthwiseConv2D, keras.layers.Dense}
"""Layers that the original quantizes."""

CLIPS = {"relu", "relu6", "relu_n"}
"""Kinds of ReLU: without a maximum, with the maximum 6, with another maximum."""

ACTIVATIONS = {"relu", "relu6", "linear"}
"""Activations that rules match after a layer."""

MERGES = {"add": "AddV2", "multiply": "Mul"}
"""Operations with two inputs that a rule quantizes, and their names in TensorFlow 1."""

PASSES = {"Reshape", "Flatten", "MaxPooling2D", "GlobalMaxPooling2D", "Dropout"}
"""Layers that only move values, so a rule looks at their input instead."""


class ContribPlacement:
    """Decides which tensors are quantized. Rules for layers precede those for Add and Multiply."""

    lowers_activations = False

    def __init__(self, graph: Graph, settings: Settings) -> None:
        self.graph, self.settings = graph, settings
        self.in_scope = settings.quantizes
        self.consumers = graph.consumers()
        self.groups = [
            group
            for group in find_groups(graph, folds_bias=False, affine=False)
            if type(group.kernel.layer) in KERNELS
        ]
        self.group_of = {call: group for group in self.groups for call in group.calls}
        self.matched: set[Call] = set()
        self.considered: set[Value] = set()
        self.weights: dict[Group, QuantSpec | None] = dict.fromkeys(self.groups)
        self.specs: dict[Value, Spec] = {}
        self.reasons: dict[Value, str] = {}

    def plan(self) -> Plan:
        for rule in (
            self.match_post_activation_bypass,
            self.match_activation,
            self.match_final_layer,
            self.match_stage_of_separable,
            self.match_merge,
        ):
            for call in self.graph.calls:
                rule(call)
        for value in self.graph.values():
            self.reasons.setdefault(value, "no rule of tf.contrib.quantize")
        return Plan(
            recipe=self.settings.recipe,
            graph=self.graph,
            groups=[group for group in self.groups if self.weights[group] or group.batch_norm],
            specs=self.specs,
            reasons=self.reasons,
            ranges=[Range(spec, [value]) for value, spec in self.specs.items()],  # type: ignore
            weights=self.weights,
            float_layers=self.float_layers(),
            replaced={
                call.layer: FusedBatchNormalization
                for call in self.graph.calls
                if is_batch_norm(call) and len(call.output.shape) == 2
            },
        )

    # The rules, in order.

    def match_post_activation_bypass(self, add: Call) -> None:
        """Quantizes the activation and the Add in `layer -> activation -> Add`."""
        if self.kind(add) != "add":
            return
        for value in reversed(add.inputs):  # The original looks at the second input first.
            activation = value.producer
            if activation and self.kind(activation) in ACTIVATIONS:
                layer, bypass = self.find_layer_before(activation)
                if layer is not None:
                    self.quantize_layer(layer, activation, bypass, add)
                    return

    def match_activation(self, activation: Call) -> None:
        """Quantizes the activation in `layer -> activation`.

        In `layer -> Add -> activation`, also quantizes the output of the layer.
        """
        if self.kind(activation) not in ACTIVATIONS:
            return
        layer, bypass = self.find_layer_before(activation)
        readers = self.consumers[activation.output]
        is_normalized = len(readers) == 1 and is_batch_norm(readers[0])
        if layer is not None and not (self.kind(activation) == "linear" and is_normalized):
            self.quantize_layer(layer, activation, bypass)

    def match_final_layer(self, call: Call) -> None:
        """Quantizes a layer that no earlier rule matched, such as the last layer of a model."""
        layer = self.find_biased_layer(call.output) if call.outputs is not None else None
        if layer is not None:
            self.quantize_layer(layer, call)

    def match_stage_of_separable(self, call: Call) -> None:
        """Quantizes a layer without bias that another layer reads, as inside a SeparableConv2D."""
        if self.kind(call) != "kernel" or not call.inputs:
            return
        producer = call.inputs[0].producer
        if producer and self.kind(producer) == "kernel" and self.is_raw(producer):
            self.quantize_layer(producer, producer)

    def match_merge(self, merge: Call) -> None:
        """Quantizes an Add or Multiply that reads a quantized tensor."""
        if solve(merge, self.has_quantized_input) and self.in_scope(merge):
            # The original has no symmetric range here.
            spec = dataclasses.replace(
                self.settings.activations(merge.output), symmetric=False, initial_range=(-6.0, 6.0)
            )
            self.quantize(merge.output, spec, f"activation_{MERGES[str(self.kind(merge))]}_quant")

    def float_layers(self) -> dict[str, str]:
        """Returns the layers that int8 runtimes must compute in float, as `{name: reason}`."""
        reasons = {}
        for call in self.graph.calls:
            kind, group = self.kind(call), self.group_of.get(call)
            if group is not None:
                if self.weights[group] is None:
                    reasons[call.name] = "kernel not quantized"
            elif kind is None or kind == "affine":
                reasons[call.name] = f"no range for {type(call.layer).__name__}"
            elif not self.has_implied_range(call) and call.output not in self.specs:
                readers = self.consumers[call.output]
                clips = [reader for reader in readers if self.kind(reader) in CLIPS | {"linear"}]
                if not clips or not all(reader.output in self.specs for reader in readers):
                    reasons[call.name] = "its output is not quantized"
        return reasons

    # Helpers of the rules.

    def has_implied_range(self, call: Call) -> bool:
        """Returns True if the output needs no quantizer, such as the output of a Reshape."""
        op = find_op(call)
        if op is None or (op.is_weighted and self.kind(call) != "kernel"):
            return False
        is_implied = isinstance(op.output, (SharedRange, FixedRange)) or not call.output.is_float
        return is_implied or op.falls_back_to_input_range or self.kind(call) == "kernel"

    def kind(self, call: Call) -> str | None:
        """Returns "kernel" for a layer, and a name such as "relu6" or "add" for others."""
        op, attributes, _ = match(call)
        if op is None:
            return None
        if op.is_affine:
            return "affine"
        if op.is_weighted:
            return "kernel" if type(call.layer) in KERNELS else None
        if op.clips:
            return {math.inf: "relu", 6.0: "relu6"}.get(attributes["maximum"], "relu_n")
        return op.name

    def is_raw(self, kernel: Call) -> bool:
        """Returns True for a layer without bias and without folded BatchNormalization."""
        return not kernel.layer.use_bias and self.group_of[kernel].batch_norm is None

    def find_biased_layer(self, value: Value) -> Call | None:
        """Returns a layer if `value` is its output after the bias. Otherwise returns None.

        A folded BatchNormalization counts as bias. So does an Add after a layer without bias.
        """
        call = value.producer
        if call is None:
            return None
        kind = self.kind(call)
        if kind == "kernel" and call.layer.use_bias:
            return call
        if is_batch_norm(call) and call in self.group_of:
            return self.group_of[call].kernel
        if kind == "add":
            for term in call.inputs:
                producer = term.producer
                if producer and self.kind(producer) == "kernel" and self.is_raw(producer):
                    return producer
        return None

    def find_layer_before(self, activation: Call) -> tuple[Call | None, Call | None]:
        """Returns the layer before an activation, and an Add between them. Either can be None."""
        value = activation.inputs[0]
        layer, producer = self.find_biased_layer(value), value.producer
        if layer is not None or producer is None:
            return layer, None
        if self.kind(producer) == "kernel":
            return producer, None
        biased = map(
            self.find_biased_layer, producer.inputs if self.kind(producer) == "add" else ()
        )
        layer = next(filter(None, biased), None)
        return layer, producer if layer else None

    def quantize_layer(
        self,
        layer: Call,
        activation: Call,
        bypass: Call | None = None,
        bypass_after: Call | None = None,
    ) -> None:
        """Quantizes the weights and the outputs of a layer, unless a rule has already matched it.

        `bypass` is an Add before the activation. `bypass_after` is an Add after the activation.
        """
        if layer in self.matched:
            return
        self.matched.add(layer)
        own = self.settings.activations(layer.output)
        merged = dataclasses.replace(own, initial_range=(-6.0, 6.0))
        group = self.group_of[layer]
        if self.in_scope(layer):
            self.weights[group] = self.settings.weights(layer, folded=bool(group.batch_norm))
        self.quantize(activation.output, own, "act_quant", [activation])
        if bypass is not None:
            biased = group.batch_norm.output if group.batch_norm else layer.output
            self.quantize(biased, merged, "conv_quant", [layer, *self.consumers[biased]])
            if not self.feeds(bypass, ACTIVATIONS):
                scope = [bypass, *self.consumers[bypass.output]]
                self.quantize(bypass.output, merged, "add_quant", scope)
        if bypass_after is not None and not self.feeds(bypass_after, {"relu", "relu6"}):
            self.quantize(
                bypass_after.output, merged, "post_activation_bypass_quant", [bypass_after]
            )

    def quantize(
        self, value: Value, spec: QuantSpec, reason: str, scope: list[Call] | None = None
    ) -> None:
        """Adds a quantizer to a tensor, unless the tensor or a reshaped copy of it already has one.

        Does nothing if the user excludes a call of `scope` from quantization.
        """
        self.considered.add(value)
        starts_at_zero = spec.initial_range == (0.0, 6.0)
        if starts_at_zero and value.producer and self.kind(value.producer) in CLIPS:
            spec = dataclasses.replace(spec, lower_bound=0.0)
        if all(self.in_scope(call) for call in scope or []) and not self.is_followed(value):
            self.specs[value] = spec
            self.reasons[value] = reason

    def feeds(self, call: Call, kinds: set[str]) -> bool:
        return any(self.kind(reader) in kinds for reader in self.consumers[call.output])

    def is_followed(self, value: Value) -> bool:
        """Returns whether a tensor has a quantizer, directly or after a reshape."""
        return value in self.specs or any(
            self.is_followed(reader.output)
            for reader in self.consumers[value]
            if type(reader.layer).__name__ in ("Reshape", "Flatten")
            or self.kind(reader) == "linear"
        )

    def has_quantized_input(self, merge: Call) -> Generator[Call, Any, bool]:
        """Returns True if an Add or Multiply reads a quantized tensor, and no rule matched it."""
        if self.kind(merge) not in MERGES or merge.output in self.considered:
            return False
        readers = self.consumers[merge.output]
        if len(readers) == 1 and self.kind(readers[0]) in ("relu", "relu6"):
            return False
        for value in map(self.trace_back, merge.inputs):
            if value in self.specs:
                return True
            if value.producer and self.kind(value.producer) in MERGES:
                producers = [x.producer for x in value.producer.inputs]
                for call in producers:
                    if call is not None and (yield call):
                        return True
        return False

    def trace_back(self, value: Value) -> Value:
        """Follows a tensor back through layers that only move values, such as a Reshape."""
        while value not in self.specs and (call := value.producer):
            if type(call.layer).__name__ not in PASSES and self.kind(call) != "linear":
                break
            value = call.inputs[0]
        return value
