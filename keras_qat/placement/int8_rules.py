"""Placement for TFLite's int8 kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable
from typing import Any

import numpy as np

from keras_qat.config.specs import FixedSpec, QuantSpec, SharedSpec, Spec
from keras_qat.graph.calls import Call, Graph, Value, flatten_values
from keras_qat.graph.facts import solve
from keras_qat.helper_layers.operations import WeightTensor
from keras_qat.keras2.backend import layers
from keras_qat.lowering.recurrent import find_float_reason
from keras_qat.ops.op import FixedRange, Op, OwnRange, SharedRange
from keras_qat.ops.registry import find_op, match, weights_only
from keras_qat.placement import fusion_groups
from keras_qat.placement.exact_inputs import may_be_labels
from keras_qat.placement.file_outputs import joined_outputs
from keras_qat.placement.float_notice import describe_layer
from keras_qat.placement.fusion_groups import Group
from keras_qat.placement.index_arithmetic import (
    COMPUTES_INDICES,
    FINDS_NUMBER,
    compares,
    cuts_in_float,
    index_calls,
    is_table,
)
from keras_qat.placement.layer_settings import BY_RECIPE, Settings
from keras_qat.placement.plan import Plan, Range, join_ranges


class Int8Placement:
    """Decides tensor by tensor, in the order of computation.

    Every float tensor that an int8 kernel reads or writes gets a quantizer. Exceptions are tensors
    that do not exist at run time, as before a fused ReLU, and those that keep their input's range.
    The model's inputs and outputs are quantized too, so that they can be integers.
    """

    lowers_activations = True

    def __init__(self, graph: Graph, settings: Settings) -> None:
        self.graph, self.settings = graph, settings
        self.bits = settings.recipe.activations.bits
        self.is_int16 = self.bits == 16
        self.consumers, self.single_consumers = (
            graph.consumers(),
            graph.find_single_consumers(),
        )
        ends = flatten_values(graph.outputs)
        self.outputs = {value for value in ends if value.producer not in settings.behind}
        self.groups = [
            group
            for group in fusion_groups.groups(graph)
            if settings.quantizes(group.kernel) and self.has_kernel(find_op(group.kernel))
            if group.kernel.name not in graph.in_float
        ]
        self.group_of = {call: group for group in self.groups for call in group.calls}
        self.index_calls: set[Call] = set()
        self.index_calls = index_calls(
            graph.calls, self.consumers, self.outputs, self.op, settings.recipe.without_float
        )
        self.symmetric = _symmetric(graph)
        self.float_layers: dict[str, str] = {}
        self.weights_only: dict[Call, tuple[QuantSpec, tuple[str, ...]]] = {}
        self.specs: dict[Value, Spec] = {}
        self.reasons: dict[Value, str] = {}
        self.roots: dict[Value, frozenset[Spec | None]] = {}
        self.unrounded: set[Value] = set()  # Outputs in float; files may round them.

    def plan(self) -> Plan:
        """Decides tensors in the order of computation."""
        for value in self.graph.values():
            spec, self.reasons[value] = self.decide(value)
            if spec is not None:
                self.specs[value] = spec
        return Plan(
            recipe=self.settings.recipe,
            graph=self.graph,
            groups=self.groups,
            specs=self.specs,
            reasons=self.reasons,
            ranges=self.ranges(),
            weights={group: self.weights_of(group) for group in self.groups},
            float_layers=self.float_layers,
            left_in_float=self.float_layers,
            weights_only=self.weights_only,
            inner={group: self.inside(group) for group in self.groups},
            joined_outputs=joined_outputs(v for v in self.outputs if v in self.specs),
        )

    def weights_of(self, group: Group) -> QuantSpec | None:
        """Returns how the weights of a group are quantized.

        The entries of an embedding's table are what it gives: they are held in the range of
        that.
        """
        if is_table(group.kernel):
            return None
        return self.settings.weights(group.kernel)

    def inside(self, group: Group) -> dict[str, QuantSpec]:
        """Returns the ranges inside an operator, which have 8 bits and are not learned."""
        op, attributes, _ = match(group.kernel)
        own = self.settings.activations(group.output)
        spec = dataclasses.replace(own, bits=8, observer="moving_average")
        return {
            name: dataclasses.replace(
                spec,
                lower_bound=0.0 if inner.non_negative else spec.lower_bound,
                symmetric=inner.symmetric or spec.symmetric,
            )
            for name, inner in (op.inner(attributes) if op else {}).items()
        }

    def has_kernel(self, op: Op | None) -> bool:
        """Returns whether the chosen kernels compute an operator with these activations."""
        return op is not None and op.has_kernel_for(self.bits, self.settings.family)

    def op(self, call: Call) -> Op | None:
        """Returns the operator of a call computed in integers; None for a call in float."""
        op = find_op(call)
        if op is None or not self.has_kernel(op) or call in self.index_calls:
            return None
        if call.name in self.graph.in_float:
            return None
        in_group = call in self.group_of
        if op.is_weighted:
            return op if in_group else None
        return op if in_group or self.settings.quantizes(call) else None

    def leave_in_float(self, call: Call) -> None:
        """Records that a call computes in float, and which of its weights are still quantized."""
        self.float_layers[call.name] = self.why_float(call)
        paths = weights_only(call.layer) if self.settings.quantizes(call) else ()
        if paths:
            self.weights_only[call] = self.settings.weights(call), paths
            self.float_layers[call.name] += "; its weights are int8"

    def why_float(self, call: Call) -> str:
        """Returns the reason why a call computes in float."""
        reason = self.settings.why_not(call)
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
            return f"{rule}, and it cannot be opened: {self.graph.opaque[call.name]}"
        if refusal := refusal or find_float_reason(call):
            return f"{rule}: {refusal}"
        return f"{rule} with a mask" if any(value.masked for value in call.inputs) else rule

    def decide(self, value: Value) -> tuple[Spec | None, str]:
        """Returns the specification of a tensor, and the reason."""
        call = value.producer
        own = self.settings.activations(value)
        if value in self.symmetric:
            own = dataclasses.replace(own, symmetric=True)
        op = self.op(call) if call else None
        numbers = [value, *call.inputs] if call and op is None else []
        if call and any(number.is_float or number.is_complex for number in numbers):
            self.leave_in_float(call)
        if not value.is_float:
            return None, f"holds {value.dtype}"
        if self.is_index(value):
            return None, "indices"
        if call is None or op is None:
            if call is None:
                if known := self.converted_to(value):
                    fixed_spec = FixedSpec(known.minimum, known.maximum, own.bits)
                    return fixed_spec, "input of the model, read in a fixed range"
                if reason := self.why_read_in_float(value):
                    return None, f"input of the model; {reason}"
                own = dataclasses.replace(own, off_ties=own.bits <= 8 and not own.symmetric)
                if not self.is_read_by_file(value):
                    return None, "input of the model that its file does not compute with"
                if may_be_labels(value, self.graph, self.op):
                    return None, "input of the model that only layers in float read"
                return (own if self.is_read_by_int8(value) else None), "input of the model"
            return self.decide_in_float(value, own, self.float_layers[call.name])
        group = self.group_of.get(call)
        if group and value is not group.output:
            return None, f"inside {group.kernel.name}"
        if self.merges_into_activation(value, op):
            return None, f"merged into {self.consumers[value][0].name}"
        output = op.output
        if isinstance(output, FixedRange):
            limits = output.wide if self.is_int16 else (output.minimum, output.maximum)
            if self.settings.recipe.activations.symmetric and not self.is_int16:
                limits = _around_zero(*limits)
            return FixedSpec(*limits, own.bits), f"{op.name} has a fixed range"
        if isinstance(output, SharedRange):
            sources = [source for source in _sources(call) if source in self.specs]
            if not sources:
                return self.decide_unrounded(value, own, "its input is in float")
            roots = self.roots_of(sources)
            is_fixed = len(roots) == 1 and all(isinstance(spec, FixedSpec) for spec in roots)
            if is_fixed or all(isinstance(spec, QuantSpec) for spec in roots):
                return SharedSpec(sources[0].name, output.rounds), f"{op.name} keeps it"
        if op.clips and self.follows_pooling(call):
            spec = SharedSpec(call.inputs[0].name, rounds=True)
            return spec, "merged into pooling, which keeps it"
        if isinstance(output, OwnRange) and output.non_negative:
            own = dataclasses.replace(own, lower_bound=0.0)
        return own, f"output of {op.name}"

    def decide_in_float(self, value: Value, own: Spec, reason: str) -> tuple[Spec | None, str]:
        """Decides on the output of a call in float: quantized only if an integer call reads it."""
        if not self.is_read_by_int8(value):
            return None, reason
        if reason == BY_RECIPE and self.reaches_outputs_alone(value):
            return self.decide_unrounded(value, own, reason)
        readers = [reader.name for reader in self.consumers[value] if self.op(reader)]
        role = f"input of {readers[0]}" if readers else "output of the model"
        return own, f"{role}; {reason}"

    def decide_unrounded(self, value: Value, own: Spec, reason: str) -> tuple[Spec | None, str]:
        """Decides on a tensor that stays in float up to the outputs: only these know a range."""
        if value not in self.outputs or self.settings.in_scope is not None:
            return None, reason
        self.unrounded.add(value)
        return own, f"output of the model, of integers on request alone; {reason}"

    def reaches_outputs_alone(self, value: Value) -> bool:
        """Returns whether operators in integers do nothing with a tensor but to move its values."""
        return all(
            isinstance(op.output, SharedRange)
            and len(call.inputs) == 1
            and all(map(self.reaches_outputs_alone, flatten_values(call.outputs)))
            for call in self.consumers[value]
            if (op := self.op(call))
        )

    def is_index(self, value: Value) -> bool:
        """Returns whether real numbers become indices; all that may be done else is compare them.

        Tokens are often real numbers, and a mask says which of them are 0.
        """
        readers = [call for call in self.consumers[value] if type(call.layer) is not WeightTensor]
        if any(map(is_table, readers)):
            return True
        others = [
            call
            for call in readers
            if call not in self.index_calls and not cuts_in_float(call, self.op(call))
        ]
        of_input = value.producer is None and value not in self.outputs
        return of_input and len(others) < len(readers) and all(map(compares, others))

    def why_read_in_float(self, value: Value) -> str | None:
        """Returns the reason if all readers of an input must not read quantized values."""
        readers = [call for call in self.consumers[value] if type(call.layer) is not WeightTensor]
        reasons = [self.graph.in_float.get(call.name) for call in readers]
        return reasons[0] if reasons and all(reasons) else None

    def converted_to(self, value: Value) -> FixedRange | None:
        """Returns the fixed range that all readers convert a tensor to, if there is one."""
        ranges = {
            op.converts.get(call.inputs.index(value)) if op else None
            for call in self.consumers[value]
            for op in [self.op(call)]
        }
        return ranges.pop() if len(ranges) == 1 else None

    def is_read_by_int8(self, value: Value) -> bool:
        """Returns whether a tensor from outside int8 operators has to be quantized."""
        readers = self.consumers[value]
        is_input = value.producer is None and self.is_read_by_file(value)
        at_the_ends = value in self.outputs or is_input
        is_whole_model = self.settings.in_scope is None
        return any(map(self.op, readers)) or (at_the_ends and is_whole_model)

    def is_read_by_file(self, value: Value) -> bool:
        """Tell whether a tensor has a consumer other than losses and calls after the outputs.

        Labels and sample weights that only losses read keep their exact values in training.
        """
        readers = self.consumers[value]
        return not readers or not self.settings.behind.issuperset(readers)

    def merges_into_activation(self, value: Value, op: Op) -> bool:
        """Returns whether the next activation is fused into the operator of this tensor."""
        if not op.can_merge_relu or isinstance(op.output, SharedRange):
            return False
        reader = self.op(self.single_consumers[value]) if value in self.single_consumers else None
        return reader is not None and reader.clips

    def follows_pooling(self, call: Call) -> bool:
        """Returns whether an activation is fused into pooling, whose kernels have one range."""
        (value,) = call.inputs
        op = self.op(value.producer) if value.producer is not None else None
        if op is None or not op.can_merge_relu or not isinstance(op.output, SharedRange):
            return False
        return value in self.single_consumers and value in self.specs

    def roots_of(self, values: Iterable[Value]) -> frozenset[Spec | None]:
        """Returns specifications of tensors, traced back through operators that keep a range."""
        return frozenset().union(*(solve(value, self.find_roots, self.roots) for value in values))

    def find_roots(self, value: Value) -> Generator[Value, Any, frozenset[Spec | None]]:
        """Find the specifications of one tensor, which is decided already."""
        spec = self.specs.get(value)
        if not isinstance(spec, SharedSpec):
            return frozenset({spec})
        assert value.producer is not None
        roots: frozenset[Spec | None] = frozenset()
        for source in _sources(value.producer):
            if source.is_float:
                roots |= yield source
        return roots

    def ranges(self) -> list[Range]:
        """Returns one range for each set of tensors that `SharedSpec`s join."""
        range_of: dict[Value, Range] = {}
        for value, spec in self.specs.items():
            if not isinstance(spec, SharedSpec):
                range_of[value] = Range(spec, [value], rounds=value not in self.unrounded)
                continue
            assert value.producer is not None
            sources = [range_of[x] for x in _sources(value.producer) if x in range_of]
            op = find_op(value.producer)
            is_constant = op is not None and op.is_constant
            if is_constant and np.any(number := value.producer.layer.number):  # 0 is in all.
                bound = min(0.0, float(np.min(number)))
                own = dataclasses.replace(self.settings.activations(value), lower_bound=bound)
                sources.append(Range(own, [value]))
            joined = join_ranges(list(dict.fromkeys(sources)))
            joined.rounded += [value] if spec.rounds and not is_constant else []
            range_of.update({other: joined for other, r in range_of.items() if r in sources})
            range_of[value] = joined
        ranges = list(dict.fromkeys(range_of.values()))
        for shared in ranges:
            of_weights = all(map(_is_of_weights, shared.observed))
            if isinstance(shared.spec, QuantSpec) and shared.observed and of_weights:
                # The range of weights is their current minimum and maximum.
                shared.spec = dataclasses.replace(
                    shared.spec, ema_decay=0.0, observer="moving_average"
                )
        return ranges


def _sources(call: Call) -> list[Value]:
    """Returns the tensors that a call brings together; what is read in training only is none."""
    op = find_op(call)
    return call.inputs[:1] if op is not None and op.alias else call.inputs


def _around_zero(minimum: float, maximum: float) -> tuple[float, float]:
    """Returns a range of 256 levels with the zero point 0 that holds a range of 256 levels."""
    limit = max(-minimum, maximum * 256 / 255)
    return -limit, limit * 127 / 128


def _symmetric(graph: Graph) -> set[Value]:
    """Returns the values that need a symmetric range, traced back through operators that keep it.

    XNNPACK multiplies two matrices only if the right-hand side's zero point is 0. In TensorFlow's
    interpreter it accepts other zero points, but computes as if they were 0.
    """
    values: set[Value] = set()
    for call in graph.calls:
        op = find_op(call)
        values.update(call.inputs[index] for index in (op.symmetric if op else ()))
    for call in reversed(graph.calls):
        op = find_op(call)
        keeps_range = op is not None and isinstance(op.output, SharedRange)
        if keeps_range and values.intersection(flatten_values(call.outputs)):
            values.update(call.inputs)
    return values


def _is_of_weights(value: Value) -> bool:
    """Returns whether a tensor is computed from weights alone."""
    op = None if value.producer is None else find_op(value.producer)
    return op is not None and op.reads_only_weights
