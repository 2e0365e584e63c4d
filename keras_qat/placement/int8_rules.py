"""Decides how tensors are quantized for TFLite's int8 and int16 kernels.

An *integer call* is quantized and runs an integer kernel. All other calls are *float calls*.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any, NamedTuple

import numpy as np

from keras_qat.config.specs import FixedSpec, QuantSpec, SharedSpec, Spec
from keras_qat.graph.calls import Call, Graph, Value, flatten_values
from keras_qat.graph.facts import solve
from keras_qat.helper_layers.operations import WeightTensor
from keras_qat.keras2.backend import layers
from keras_qat.lowering.recurrent import find_float_reason
from keras_qat.ops.op import FixedRange, Op, OwnRange, SharedRange
from keras_qat.ops.registry import find_op, match, weights_only
from keras_qat.placement.exact_values import (
    COMPUTES_INDICES,
    FINDS_NUMBER,
    converts_in_float,
    find_index_calls,
    is_table,
    makes_bools,
    may_be_labels,
)
from keras_qat.placement.file_outputs import find_joined_outputs
from keras_qat.placement.fusion_groups import Group, find_groups
from keras_qat.placement.plan import Plan, Range, describe_layer, join_ranges
from keras_qat.placement.settings import BY_RECIPE, Settings
from keras_qat.placement.symmetric_ranges import center_at_zero, find_symmetric


class Decision(NamedTuple):
    """How a tensor is quantized, and the reason. `spec` is None if it is not quantized."""

    spec: Spec | None
    reason: str


class Int8Placement:
    """Decides how each tensor is quantized, in the order of computation.

    Each float tensor that an int8 kernel reads or writes has a quantizer. Inputs and outputs of the
    model have quantizers, too. Tensors that do not exist at run time, such as the input of a fused
    ReLU, have no quantizer. Outputs that share the range of an input have no quantizer either.
    """

    lowers_activations = True

    def __init__(self, graph: Graph, settings: Settings) -> None:
        self.graph, self.settings = graph, settings
        self.bits = settings.recipe.activations.bits
        self.is_int16 = self.bits == 16
        self.consumers, self.single_consumers = graph.consumers(), graph.find_single_consumers()
        ends = flatten_values(graph.outputs)
        self.outputs = {value for value in ends if value.producer not in settings.not_in_file}
        self.groups = [
            group
            for group in find_groups(graph)
            if settings.quantizes(group.kernel) and self.has_kernel(find_op(group.kernel))
            if group.kernel.name not in graph.in_float
        ]
        self.group_of = {call: group for group in self.groups for call in group.calls}
        self.index_calls: set[Call] = set()
        self.index_calls = find_index_calls(
            graph.calls, self.consumers, self.outputs, self.get_op, settings.recipe.without_float
        )
        self.symmetric = find_symmetric(graph)
        self.float_layers: dict[str, str] = {}
        self.weights_only: dict[Call, tuple[QuantSpec, tuple[str, ...]]] = {}
        self.specs: dict[Value, Spec] = {}
        self.roots: dict[Value, frozenset[Spec | None]] = {}
        self.unrounded: set[Value] = set()  # Only an `output_dtype` rounds these outputs.

    def plan(self) -> Plan:
        self.record_float_calls()
        reasons: dict[Value, str] = {}
        for value in self.graph.values():
            spec, reasons[value] = self.decide(value)
            if spec is not None:
                self.specs[value] = spec
        return Plan(
            recipe=self.settings.recipe,
            graph=self.graph,
            groups=self.groups,
            specs=self.specs,
            reasons=reasons,
            ranges=self.collect_ranges(),
            weights={  # A table has the range of its output.
                group: None if is_table(group.kernel) else self.settings.weights(group.kernel)
                for group in self.groups
            },
            float_layers=self.float_layers,
            left_in_float=self.float_layers,
            weights_only=self.weights_only,
            inner={group: self.find_inner_ranges(group) for group in self.groups},
            joined_outputs=find_joined_outputs(v for v in self.outputs if v in self.specs),
        )

    def find_inner_ranges(self, group: Group) -> dict[str, QuantSpec]:
        """Returns the specifications of tensors inside an operator, such as the sums in a GRU.

        An initial state may be negative. If the call reads one, the ranges include negative values,
        even for a ReLU.
        """
        op, attributes, _ = match(group.kernel)
        has_state = any(value.dtype != "bool" for value in group.kernel.inputs[1:])
        own = self.settings.activations(group.output)
        spec = dataclasses.replace(own, bits=8, observer="moving_average")
        return {
            name: dataclasses.replace(
                spec,
                lower_bound=0.0 if inner.non_negative and not has_state else spec.lower_bound,
                symmetric=inner.symmetric or spec.symmetric,
            )
            for name, inner in (op.inner(attributes) if op else {}).items()
        }

    def has_kernel(self, op: Op | None) -> bool:
        """Returns whether the kernel family has a kernel with the recipe's bits."""
        return op is not None and op.has_kernel_for(self.bits, self.settings.family)

    def get_op(self, call: Call) -> Op | None:
        """Returns the operator of an integer call. Returns None for a float call."""
        op = find_op(call)
        if op is None or not self.has_kernel(op) or call in self.index_calls:
            return None
        if self.is_int16 and not op.accepts_wide(call):
            return None
        if call.name in self.graph.in_float:
            return None
        is_integer = call in self.group_of or (not op.is_weighted and self.settings.quantizes(call))
        return op if is_integer else None

    def record_float_calls(self) -> None:
        """Fills `float_layers` (reasons) and `weights_only` (float calls with int8 weights)."""
        for call in self.graph.calls:
            outputs = flatten_values(call.outputs)
            values = [*outputs, *call.inputs]
            has_float = any(value.is_float or value.is_complex for value in values)
            if not outputs or not has_float or self.get_op(call) is not None:
                continue
            self.float_layers[call.name] = self.explain_float(call)
            paths = weights_only(call.layer) if self.settings.quantizes(call) else ()
            if paths:
                self.weights_only[call] = self.settings.weights(call), paths
                self.float_layers[call.name] += "; its weights are int8"

    def explain_float(self, call: Call) -> str:
        reason = self.settings.find_reason(call)
        if reason is not None:
            return reason
        if call in self.index_calls:
            return FINDS_NUMBER if type(call.source) is layers.Masking else COMPUTES_INDICES
        if call.name in self.graph.in_float:
            return self.graph.in_float[call.name]
        op, _, refusal = match(call)
        if op is not None:
            families = [f"kernels={family!r}" for family in op.only_families(self.bits)]
            only = f", but with {' or '.join(families)}" if families else ""
            return f"no int16 kernel for {describe_layer(call.layer)}{only}"
        rule = f"no int8 rule for {describe_layer(call.layer)}"
        if call.name in self.graph.opaque:
            return f"{rule}, and it cannot be traced: {self.graph.opaque[call.name]}"
        if refusal := refusal or find_float_reason(call):
            return f"{rule}: {refusal}"
        return f"{rule} with a mask" if any(value.masked for value in call.inputs) else rule

    def decide(self, value: Value) -> Decision:
        """Decides how a tensor is quantized. Tensors upstream must be decided first."""
        call = value.producer
        if not value.is_float:
            why = self.float_layers.get(call.name) if call and value.is_complex else None
            return Decision(None, f"holds {value.dtype}" + (f"; {why}" if why else ""))
        if self.is_index(value):
            return Decision(None, "indices")
        own = self.settings.activations(value)
        if value in self.symmetric:
            own = dataclasses.replace(own, symmetric=True)
        if call is None:
            return self.decide_input(value, own)
        op = self.get_op(call)
        if op is None:
            return self.decide_float_result(value, own, self.float_layers[call.name])
        return self.decide_integer_result(value, own, call, op)

    def decide_input(self, value: Value, own: QuantSpec) -> Decision:
        if known := self.find_conversion(value):
            fixed = FixedSpec(known.minimum, known.maximum, own.bits)
            return Decision(fixed, "input of the model, converted to a fixed range")
        if reason := self.explain_exact_input(value):
            return Decision(None, f"input of the model; {reason}")
        if not self.is_read_by_file(value):
            return Decision(None, "input of the model that its file does not use")
        if may_be_labels(value, self.graph, self.get_op):
            return Decision(None, "input of the model that only float layers read")
        if not self.is_read_by_int8(value):
            return Decision(None, "input of the model")
        off_ties = own.bits <= 8 and not own.symmetric
        return Decision(dataclasses.replace(own, off_ties=off_ties), "input of the model")

    def decide_float_result(self, value: Value, own: QuantSpec, reason: str) -> Decision:
        """Decides how the output of a float call is quantized.

        It is quantized if integer calls read it or files return it. `own` is the recipe's
        specification.
        """
        if not self.is_read_by_int8(value):
            return Decision(None, reason)
        if reason == BY_RECIPE and self.only_reaches_outputs(value):
            return self.decide_unrounded(value, own, reason)
        readers = [reader.name for reader in self.consumers[value] if self.get_op(reader)]
        role = f"input of {readers[0]}" if readers else "output of the model"
        return Decision(own, f"{role}; {reason}")

    def decide_unrounded(self, value: Value, own: QuantSpec, reason: str) -> Decision:
        """Decides about an output that stays in float, but may be exported as int8.

        Training does not round the output of the model. It only observes a range, for exports with
        an integer `output_dtype`.
        """
        if value not in self.outputs or self.settings.in_scope is not None:
            return Decision(None, reason)
        self.unrounded.add(value)
        return Decision(own, f"output of the model, quantized only on request; {reason}")

    def decide_integer_result(self, value: Value, own: QuantSpec, call: Call, op: Op) -> Decision:
        group = self.group_of.get(call)
        if group and value is not group.output:
            return Decision(None, f"inside {group.kernel.name}")
        if self.merges_into_activation(value, op):
            return Decision(None, f"merged into {self.consumers[value][0].name}")
        output = op.output
        if isinstance(output, FixedRange):
            limits = output.wide if self.is_int16 else (output.minimum, output.maximum)
            if self.settings.recipe.activations.symmetric and not self.is_int16:
                limits = center_at_zero(*limits)
            return Decision(FixedSpec(*limits, own.bits), f"{op.name} has a fixed range")
        if isinstance(output, SharedRange):
            sources = [source for source in _get_sources(call) if source in self.specs]
            if not sources:
                return self.decide_unrounded(value, own, "its input is in float")
            found = (solve(source, self.find_roots, self.roots) for source in sources)
            roots = frozenset[Spec | None]().union(*found)
            is_fixed = len(roots) == 1 and all(isinstance(spec, FixedSpec) for spec in roots)
            if is_fixed or all(isinstance(spec, QuantSpec) for spec in roots):
                shared = SharedSpec(sources[0].name, output.rounds)
                return Decision(shared, f"{op.name} keeps it")
        if op.clips and self.follows_pooling(call):
            shared = SharedSpec(call.inputs[0].name, rounds=True)
            return Decision(shared, "merged into pooling, which keeps the range")
        if isinstance(output, OwnRange) and output.non_negative:
            own = dataclasses.replace(own, lower_bound=0.0)
        return Decision(own, f"output of {op.name}")

    def is_index(self, value: Value) -> bool:
        """Returns whether a float tensor contains indices, such as token ids.

        Examples are the input of an Embedding, and an input that is only converted to integers.
        """
        readers = [call for call in self.consumers[value] if type(call.layer) is not WeightTensor]
        if any(map(is_table, readers)):
            return True
        others = [
            call
            for call in readers
            if call not in self.index_calls and not converts_in_float(call, self.get_op(call))
        ]
        is_input = value.producer is None and value not in self.outputs
        return is_input and len(others) < len(readers) and all(map(makes_bools, others))

    def explain_exact_input(self, value: Value) -> str | None:
        """Returns a reason if all consumers need an input that is not rounded, otherwise None."""
        reasons = [
            self.graph.in_float.get(call.name)
            for call in self.consumers[value]
            if type(call.layer) is not WeightTensor
        ]
        return reasons[0] if reasons and all(reasons) else None

    def find_conversion(self, value: Value) -> FixedRange | None:
        """Returns a fixed range if all consumers convert a tensor to it. Otherwise returns None.

        For example, a GRU converts its initial state to a fixed range.
        """
        ranges = {
            op.converts.get(call.inputs.index(value)) if op else None
            for call in self.consumers[value]
            for op in [self.get_op(call)]
        }
        return ranges.pop() if len(ranges) == 1 else None

    def only_reaches_outputs(self, value: Value) -> bool:
        """Returns True if integer calls only move a tensor's values, as a Reshape does."""
        return all(
            isinstance(op.output, SharedRange)
            and all(map(self.only_reaches_outputs, flatten_values(call.outputs)))
            for call in self.consumers[value]
            if (op := self.get_op(call))
        )

    def is_read_by_int8(self, value: Value) -> bool:
        """Returns whether an integer call reads the tensor.

        Without a scope, also returns True for inputs and outputs of files.
        """
        is_input = value.producer is None and self.is_read_by_file(value)
        is_end = value in self.outputs or is_input
        readers = self.consumers[value]
        return any(map(self.get_op, readers)) or (is_end and self.settings.in_scope is None)

    def is_read_by_file(self, value: Value) -> bool:
        """Returns True if a tensor is used by exported files, or not used at all.

        Labels and sample weights are used only by losses, which files do not contain.
        """
        readers = self.consumers[value]
        return not readers or not self.settings.not_in_file.issuperset(readers)

    def merges_into_activation(self, value: Value, op: Op) -> bool:
        """Returns whether `value` is followed by a ReLU that is fused into `op`."""
        if not op.can_merge_relu or isinstance(op.output, SharedRange):
            return False
        reader = self.single_consumers.get(value)
        reader_op = None if reader is None else self.get_op(reader)
        return reader_op is not None and reader_op.clips

    def follows_pooling(self, call: Call) -> bool:
        """Returns whether an activation is fused into a pooling, so both share a range."""
        (value,) = call.inputs
        op = self.get_op(value.producer) if value.producer is not None else None
        if op is None or not op.can_merge_relu or not isinstance(op.output, SharedRange):
            return False
        return value in self.single_consumers and value in self.specs

    def find_roots(self, value: Value) -> Generator[Value, Any, frozenset[Spec | None]]:
        """Follows `SharedSpec`s upstream. Returns the specifications of the tensors at the ends."""
        spec = self.specs.get(value)
        if not isinstance(spec, SharedSpec):
            return frozenset({spec})
        assert value.producer is not None
        roots: frozenset[Spec | None] = frozenset()
        for source in _get_sources(value.producer):
            if source.is_float:
                roots |= yield source
        return roots

    def collect_ranges(self) -> list[Range]:
        """Returns the model's ranges. A tensor with a `SharedSpec` has the range of its inputs."""
        range_of: dict[Value, Range] = {}
        for value, spec in self.specs.items():
            if not isinstance(spec, SharedSpec):
                range_of[value] = Range(spec, [value], rounds=value not in self.unrounded)
                continue
            assert value.producer is not None
            sources = [range_of[x] for x in _get_sources(value.producer) if x in range_of]
            op = find_op(value.producer)
            is_constant = op is not None and op.is_constant
            if is_constant and np.any(constant := value.producer.layer.number):  # Ranges contain 0.
                bound = min(0.0, float(np.min(constant)))
                own = dataclasses.replace(self.settings.activations(value), lower_bound=bound)
                sources.append(Range(own, [value]))
            joined = join_ranges(list(dict.fromkeys(sources)))
            joined.rounded += [value] if spec.rounds and not is_constant else []
            range_of.update({other: joined for other, r in range_of.items() if r in sources})
            range_of[value] = joined
        ranges = list(dict.fromkeys(range_of.values()))
        for shared in ranges:
            only_weights = all(map(_comes_from_weights, shared.observed))
            if isinstance(shared.spec, QuantSpec) and shared.observed and only_weights:
                # The range of weights is their current minimum and maximum.
                shared.spec = dataclasses.replace(
                    shared.spec, ema_decay=0.0, observer="moving_average"
                )
        return ranges


def _get_sources(call: Call) -> list[Value]:
    """Return the inputs that share a range with the output.

    If the output is the first input, as in Dropout at inference, other inputs do not count.
    """
    op = find_op(call)
    return call.inputs[:1] if op is not None and op.alias else call.inputs


def _comes_from_weights(value: Value) -> bool:
    op = None if value.producer is None else find_op(value.producer)
    return op is not None and op.reads_only_weights
