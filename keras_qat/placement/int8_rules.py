"""The placement that TFLite's int8 kernels ask for."""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_qat.config.specs import FixedSpec, QuantSpec, SharedSpec, Spec
from keras_qat.frontend.graph import Call, Graph, Value, values_in
from keras_qat.frontend.keras2.backend import keras
from keras_qat.frontend.tf_operations import is_operation
from keras_qat.lowering.recurrent import why_whole
from keras_qat.ops.op import FixedRange, Op, OwnRange, SharedRange
from keras_qat.ops.registry import match, op_of
from keras_qat.ops.weight_tensor import WEIGHT_TENSOR
from keras_qat.ops.weights_only import weights_only
from keras_qat.placement import fusion_groups
from keras_qat.placement.fusion_groups import Group
from keras_qat.placement.layer_settings import Settings
from keras_qat.placement.plan import Plan, Range

__all__ = ["Int8Placement"]

_Embedding = keras.layers.Embedding


class Int8Placement:
    """Decides tensor by tensor, in the order of computation.

    Every float tensor that an int8 kernel reads or writes has a quantizer, unless it never exists
    at run time (the kernel takes a ReLU or a BatchNormalization in) or keeps its input's range.
    The model's inputs and outputs are quantized too, so that they can be integers.
    """

    lowers_activations = True

    def __init__(self, graph: Graph, settings: Settings) -> None:
        self.graph, self.settings = graph, settings
        self.bits = settings.recipe.activations.bits
        self.is_int16 = self.bits == 16
        self.consumers = graph.consumers()
        self.outputs = set(values_in(graph.outputs))
        self.groups = [
            group
            for group in fusion_groups.groups(graph)
            if settings.quantizes(group.kernel) and self.has_kernel(op_of(group.kernel))
        ]
        self.group_of = {call: group for group in self.groups for call in group.calls}
        self.symmetric = _symmetric(graph)
        self.float_layers: dict[str, str] = {}
        self.weights_only: dict[Call, tuple[QuantSpec, tuple[str, ...]]] = {}
        self.specs: dict[Value, Spec] = {}
        self.reasons: dict[Value, str] = {}

    def plan(self) -> Plan:
        """Goes through the tensors in the order of computation."""
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
        )

    def weights_of(self, group: Group) -> QuantSpec | None:
        """How the weights of a group are quantized.

        The entries of an embedding's table are what it gives: they are held in the range of that.
        """
        if isinstance(group.kernel.layer, _Embedding) and not self.is_int16:
            return None
        return self.settings.weights(group.kernel)

    def inside(self, group: Group) -> dict[str, QuantSpec]:
        """The ranges between the parts of an operator: of 8 bits, none of which is learned."""
        op, attributes, _ = match(group.kernel)
        own = self.settings.activations(group.output)
        spec = dataclasses.replace(own, bits=8, observer="moving_average")
        return {
            name: dataclasses.replace(
                spec,
                lower_bound=0.0 if each.non_negative else spec.lower_bound,
                symmetric=each.symmetric or spec.symmetric,
            )
            for name, each in (op.inner(attributes) if op else {}).items()
        }

    def has_kernel(self, op: Op | None) -> bool:
        """Whether kernels that shall compute the model take an operator with its activations."""
        return op is not None and op.has_kernel_for(self.bits, self.settings.family)

    def op(self, call: Call) -> Op | None:
        """The operator of an integer computation, or None for one in float."""
        op = op_of(call)
        if op is None or not self.has_kernel(op):
            return None
        in_group = call in self.group_of
        if op.is_weighted:
            return op if in_group else None
        return op if in_group or self.settings.quantizes(call) else None

    def leave_in_float(self, call: Call) -> None:
        """Notes that a call computes in float, and which of its weights are quantized still."""
        self.float_layers[call.name] = self.why_float(call)
        paths = weights_only(call.layer) if self.settings.quantizes(call) else ()
        if paths:
            self.weights_only[call] = self.settings.weights(call), paths
            self.float_layers[call.name] += "; its weights are int8"

    def why_float(self, call: Call) -> str:
        """The reason why a call computes in float."""
        reason = self.settings.why_not(call)
        if reason is not None:
            return reason
        op, _, refusal = match(call)
        if op is not None:
            others = [f"kernels={each!r}" for each in op.families.get(self.bits, ())]
            only = f", but with {' or '.join(others)}" if others else ""
            return f"no int16 kernel for {_label(call.layer)}{only}"
        rule = f"no int8 rule for {_label(call.layer)}"
        if call.name in self.graph.closed:
            return f"{rule}, and it cannot be opened: {self.graph.closed[call.name]}"
        if refusal := refusal or why_whole(call):
            return f"{rule}: {refusal}"
        return f"{rule} with a mask" if any(value.masked for value in call.inputs) else rule

    def decide(self, value: Value) -> tuple[Spec | None, str]:
        """The specification of a tensor, and why."""
        call = value.producer
        own = self.settings.activations(value)
        if value in self.symmetric:
            own = dataclasses.replace(own, symmetric=True)
        op = self.op(call) if call else None
        if call and op is None and (value.is_float or any(v.is_float for v in call.inputs)):
            self.leave_in_float(call)
        if not value.is_float:
            return None, f"holds {value.dtype}"
        if any(isinstance(each.layer, _Embedding) for each in self.consumers[value]):
            return None, "indices"
        if call is None or op is None:
            if call is None:
                if known := self.converted_to(value):
                    found = FixedSpec(known.minimum, known.maximum, own.bits)
                    return found, "input of the model, read in a fixed range"
                own = dataclasses.replace(own, off_ties=own.bits == 8 and not own.symmetric)
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
            return FixedSpec(*limits, own.bits), f"{op.name} has a fixed range"
        if isinstance(output, SharedRange):
            sources = [each for each in call.inputs if each in self.specs]
            if not sources:
                return None, "its input is in float"
            joinable = all(self.has_own_range(each) for each in sources)
            fixed = {self.fixed_range(each) for each in sources}
            if joinable or (len(fixed) == 1 and isinstance(next(iter(fixed)), FixedSpec)):
                return SharedSpec(sources[0].name, output.rounds), f"{op.name} keeps it"
        if op.clips and self.follows_pooling(call):
            spec = SharedSpec(call.inputs[0].name, rounds=True)
            return spec, "merged into pooling, which keeps it"
        if isinstance(output, OwnRange) and output.non_negative:
            own = dataclasses.replace(own, lower_bound=0.0)
        return own, f"output of {op.name}"

    def decide_in_float(self, value: Value, own: Spec, reason: str) -> tuple[Spec | None, str]:
        """What a call in float gives: quantized for the sake of what comes next, or not at all."""
        if not self.is_read_by_int8(value):
            return None, reason
        readers = [each.name for each in self.consumers[value] if self.op(each)]
        role = f"input of {readers[0]}" if readers else "output of the model"
        return own, f"{role}; {reason}"

    def converted_to(self, value: Value) -> FixedRange | None:
        """The fixed range that all readers of a tensor convert it to, if they do."""
        found = {
            op.converts.get(call.inputs.index(value)) if op else None
            for call in self.consumers[value]
            for op in [self.op(call)]
        }
        return found.pop() if len(found) == 1 else None

    def is_read_by_int8(self, value: Value) -> bool:
        """Whether a tensor that is not made by an int8 kernel has to be quantized all the same."""
        at_the_ends = value in self.outputs or value.producer is None
        is_whole_model = self.settings.in_scope is None
        return any(map(self.op, self.consumers[value])) or (at_the_ends and is_whole_model)

    def merges_into_activation(self, value: Value, op: Op) -> bool:
        """Whether the runtime computes the activation behind this tensor together with it."""
        readers = self.consumers[value]
        if not op.takes_clip or isinstance(op.output, SharedRange):
            return False
        if value in self.outputs or len(readers) != 1:
            return False
        reader = self.op(readers[0])
        return reader is not None and reader.clips

    def follows_pooling(self, call: Call) -> bool:
        """Whether an activation is computed by pooling, whose kernels have one range."""
        (value,) = call.inputs
        op = self.op(value.producer) if value.producer is not None else None
        if op is None or not op.takes_clip or not isinstance(op.output, SharedRange):
            return False
        is_read_here_only = value not in self.outputs and len(self.consumers[value]) == 1
        return is_read_here_only and value in self.specs

    def fixed_range(self, value: Value) -> Spec:
        """The fixed specification that a tensor has, if any, also through layers that keep it."""
        spec = self.specs[value]
        if isinstance(spec, SharedSpec):
            assert value.producer is not None
            sources = [each for each in value.producer.inputs if each in self.specs]
            return self.fixed_range(sources[0])
        return spec

    def has_own_range(self, value: Value) -> bool:
        """Whether the range of a tensor can grow to hold another one's values."""
        spec = self.specs.get(value)
        if isinstance(spec, SharedSpec):
            assert value.producer is not None
            sources = [each for each in value.producer.inputs if each.is_float]
            return all(map(self.has_own_range, sources))
        return isinstance(spec, QuantSpec)

    def ranges(self) -> list[Range]:
        """One range for each set of tensors that `SharedSpec`s join, in order of computation."""
        range_of: dict[Value, Range] = {}
        for value, spec in self.specs.items():
            if not isinstance(spec, SharedSpec):
                range_of[value] = Range(spec, [value])
                continue
            assert value.producer is not None
            sources = [range_of[each] for each in value.producer.inputs if each in range_of]
            joined = _join(list(dict.fromkeys(sources)))
            joined.rounded += [value] if spec.rounds else []
            range_of.update({each: joined for each, r in range_of.items() if r in sources})
            range_of[value] = joined
        found = list(dict.fromkeys(range_of.values()))
        for each in found:
            makers = [value.producer and op_of(value.producer) for value in each.observed]
            if isinstance(each.spec, QuantSpec) and set(makers) == {WEIGHT_TENSOR}:
                each.spec = dataclasses.replace(  # As they are.
                    each.spec, ema_decay=0.0, observer="moving_average"
                )
        return found


def _label(layer: Any) -> str:
    """A layer's class; of an activation or operation its own name."""
    if is_operation(layer):
        return f"tf.{layer.symbol}"
    if type(layer) is keras.layers.Activation:
        return str(getattr(layer.activation, "__name__", layer.activation))
    return type(layer).__name__


def _symmetric(graph: Graph) -> set[Value]:
    """What operators read that ask for a symmetric range, and what that was.

    XNNPACK multiplies two tensors as matrices if the right-hand side's zero point is 0. In
    TensorFlow's interpreter it also takes others, and computes as if it were 0.
    """
    found: set[Value] = set()
    for call in graph.calls:
        op = op_of(call)
        found.update(call.inputs[place] for place in (op.symmetric if op else ()))
    for call in reversed(graph.calls):
        op = op_of(call)
        keeps_range = op is not None and isinstance(op.output, SharedRange)
        if keeps_range and found.intersection(values_in(call.outputs)):
            found.update(call.inputs)
    return found


def _join(ranges: list[Range]) -> Range:
    """One range for the tensors of several. Its lower bound holds for all of them."""
    first, *others = ranges
    if not others:
        return first
    specs = [each.spec for each in ranges if isinstance(each.spec, QuantSpec)]
    known = [each.lower_bound for each in specs if each.lower_bound is not None]
    spec = first.spec
    if isinstance(spec, QuantSpec):
        bound = min(known) if len(known) == len(ranges) else None
        symmetric = any(each.symmetric for each in specs)
        off_ties = any(each.off_ties for each in specs) and not symmetric
        spec = dataclasses.replace(spec, lower_bound=bound, symmetric=symmetric, off_ties=off_ties)
    return Range(
        spec,
        [value for each in ranges for value in each.observed],
        [value for each in ranges for value in each.rounded],
    )
