"""The plan: how each tensor of a model is quantized and why."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

from keras_qat.config.recipe import Recipe
from keras_qat.config.specs import FixedSpec, QuantSpec, Spec
from keras_qat.config.targets.target import Problem, Target, describe_problems
from keras_qat.graph.calls import Call, Graph, Value, flatten_values
from keras_qat.graph.operations import is_operation, name_in_tensorflow
from keras_qat.keras2.backend import keras
from keras_qat.messages import pluralize, show_once
from keras_qat.ops.multiply_accumulates import count_products, describe_share, integer_share
from keras_qat.ops.registry import find_row
from keras_qat.placement.file_outputs import JoinedOutput
from keras_qat.placement.fusion_groups import Group
from keras_qat.placement.settings import NOT_IN_FILE, REQUESTED

INSIDE = "inside, one range for all steps"

MUCH_MEMORY = 1024
"""Plans mention the memory of per-channel scales if the scales need at least this many bytes."""


@dataclasses.dataclass(frozen=True)
class PerGate(QuantSpec):
    """Specification of an LSTM's weights. It prints as "per gate" instead of "per channel"."""

    def __str__(self) -> str:
        return super().__str__().rsplit(" ", 1)[0] + " gate"


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of a plan.

    Args:
        tensor: name of the tensor, such as `dense` or `dense/kernel`.
        layer: class name of the layer.
        role: "input", "weight" or "activation".
        spec: how the tensor is quantized, or None.
        reason: the reason, in a few words.
    """

    tensor: str
    layer: str
    role: str
    spec: Spec | None
    reason: str


@dataclasses.dataclass(eq=False)
class Range:
    """A quantization range and the tensors that share it.

    Args:
        spec: the specification.
        observed: the tensors that determine the range.
        rounded: tensors that are rounded to the range, but do not determine it. An example is the
            output of average pooling.
        rounds: whether training rounds the tensors. False for a float output that only files with
            an integer `output_dtype` round.
    """

    spec: QuantSpec | FixedSpec
    observed: list[Value]
    rounded: list[Value] = dataclasses.field(default_factory=list)
    rounds: bool = True


def join_ranges(ranges: list[Range]) -> Range:
    """Merges the ranges of tensors that must share a range, for example before a concatenation."""
    first, *rest = ranges
    if not rest:
        return first
    specs = [item.spec for item in ranges if isinstance(item.spec, QuantSpec)]
    known = [item.lower_bound for item in specs if item.lower_bound is not None]
    spec = first.spec
    if isinstance(spec, QuantSpec):
        bound = min(known) if len(known) == len(ranges) else None
        symmetric = any(item.symmetric for item in specs)
        off_ties = any(item.off_ties for item in specs) and not symmetric
        spec = dataclasses.replace(spec, lower_bound=bound, symmetric=symmetric, off_ties=off_ties)
    return Range(
        spec,
        [value for item in ranges for value in item.observed],
        [value for item in ranges for value in item.rounded],
    )


@dataclasses.dataclass
class Plan:
    """How each tensor is quantized. A plan prints as a table. `rows` and `to_dict` return data.

    Args:
        recipe: the recipe that the plan follows.
        graph: the lowered model.
        groups: groups of calls. One wrapper replaces each group.
        specs: maps each quantized value to its specification.
        reasons: maps each value to the reason why it is quantized, or why not.
        ranges: the ranges. Each range needs one quantizer.
        weights: maps each group to the specification of its weights, or None.
        float_layers: maps the name of each float layer to the reason.
        left_in_float: the float layers of exported files. With recipe `contrib`, files quantize
            some of the `float_layers`.
        replaced: maps a layer to the class that replaces it.
        weights_only: maps a float call to the specification and the paths of its int8 weights.
        inner: maps each group to the ranges of tensors inside its operator, by name.
        target: the target, or None.
        problems: operators that do not run on the target.
        channel_bytes: bytes that the per-channel scales of dense layers need on the target.
        file_outputs: names of the tensors that files return, or () if they return the model's
            outputs. With names, `graph.outputs` is a pair `(model outputs, list of file outputs)`.
        joined_outputs: outputs that concatenate tensors, which then share a range.
        lost_features: warnings about features that are too small for the range of an input.
    """

    recipe: Recipe
    graph: Graph
    groups: list[Group]
    specs: dict[Value, Spec]
    reasons: dict[Value, str]
    ranges: list[Range]
    weights: dict[Group, QuantSpec | None]
    float_layers: dict[str, str]
    left_in_float: dict[str, str] = dataclasses.field(default_factory=dict)
    replaced: dict[Any, Any] = dataclasses.field(default_factory=dict)
    weights_only: dict[Call, tuple[QuantSpec, tuple[str, ...]]] = dataclasses.field(
        default_factory=dict
    )
    inner: dict[Group, dict[str, QuantSpec]] = dataclasses.field(default_factory=dict)
    target: Target | None = None
    problems: tuple[Problem, ...] = ()
    channel_bytes: int = 0
    file_outputs: tuple[str, ...] = ()
    joined_outputs: tuple[JoinedOutput, ...] = ()
    lost_features: tuple[str, ...] = ()

    @property
    def integer_share(self) -> float | None:
        """Share of the file's multiply-accumulates in integers. None if a size is unknown."""
        return integer_share(self._count_products())

    def _count_products(self) -> list[tuple[bool, int | None]]:
        reasons = self.left_in_float
        return [
            (call.name not in reasons, count_products(call))
            for call in self.graph.calls
            if reasons.get(call.name) != NOT_IN_FILE
        ]

    @property
    def rows(self) -> list[Row]:
        """The lines of the plan, one for each tensor, in the order of computation."""
        inputs = set(flatten_values(self.graph.inputs))
        groups = {group.kernel: group for group in self.groups}
        rows = []
        for value in self.graph.values():
            if value in inputs:
                role, layer = "input", "InputLayer"
            else:
                assert value.producer is not None
                role, layer = "activation", type(value.producer.layer).__name__
                group = groups.get(value.producer)
                if group is not None:
                    rows += self._weight_rows(group)
                    rows += [
                        Row(f"{value.producer.name}/{name}", layer, "activation", spec, INSIDE)
                        for name, spec in self.inner.get(group, {}).items()
                    ]
                if value is value.producer.output:
                    spec, paths = self.weights_only.get(value.producer, (None, ()))
                    rows += [
                        Row(f"{value.producer.name}/{path}", layer, "weight", spec, "in the file")
                        for path in paths
                    ]
            rows.append(Row(value.name, layer, role, self.specs.get(value), self.reasons[value]))
        return rows

    def _weight_rows(self, group: Group) -> list[Row]:
        spec: Spec | None = self.weights[group]
        reason = "kernel" if spec else self.reasons[group.output]
        op = find_row(group.kernel.layer)
        if op is not None and op.is_table and not spec:
            spec, reason = self.specs.get(group.output), "in the range of its output"
        if spec and group.batch_norm:
            reason = f"kernel, folded with {group.batch_norm.name}"
        if op is not None and op.gates > 1 and isinstance(spec, QuantSpec):
            spec = PerGate(**vars(spec))
        name, layer = group.kernel.name, type(group.kernel.layer).__name__
        return [Row(f"{name}/{path}", layer, "weight", spec, reason) for path in group.weights]

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as JSON data."""
        data: dict[str, Any] = {
            "recipe": self.recipe.to_config(),
            "tensors": [
                {**dataclasses.asdict(row), "spec": row.spec and str(row.spec)} for row in self.rows
            ],
            "float_layers": self.float_layers,
            "integer_share": self.integer_share,
            "joined_outputs": {joined.output: joined.parts for joined in self.joined_outputs},
            "lost_features": list(self.lost_features),
        }
        if self.target is not None:
            data["target"] = self.target.name
            data["channel_bytes"] = self.channel_bytes
            data["problems"] = [dataclasses.asdict(problem) for problem in self.problems]
        return data

    def __str__(self) -> str:
        table = [("tensor", "layer", "quantized to", "why")]
        table += [(row.tensor, row.layer, str(row.spec or "-"), row.reason) for row in self.rows]
        widths = [max(len(line[column]) for line in table) for column in range(3)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, [*widths, 0], strict=True))
            for line in table
        ]
        lines.insert(1, "  ".join("-" * width for width in [*widths, 20]))
        counts = f"{pluralize(len(self.groups), 'kernel')}, {pluralize(len(self.ranges), 'range')}"
        if names := self.float_layers:
            count = len({id(call.source) for call in self.graph.calls if call.name in names})
            counts += describe_share(self._count_products(), self.recipe.activations.bits)
            verb = "stays" if count == 1 else "stay"
            parts = f", as {len(names)} operations" if len(names) > count else ""
            counts += f"; {pluralize(count, 'layer')} {verb} in float{parts}: {', '.join(names)}"
        lines.append(f"recipe {self.recipe.name}: {counts}")
        lines += [*map(str, self.joined_outputs), *self.lost_features]
        if self.target is not None:
            lines += describe_problems(self.target, self.problems)
            if self.left_in_float:
                lines.append(
                    "  float layers use the device's math library: their values may differ by one "
                    "step from this machine's"
                )
            if self.channel_bytes >= MUCH_MEMORY:
                lines.append(
                    f"  dense layers keep {self.channel_bytes} bytes in memory for the scales of "
                    f"their channels; recipes.{self.recipe.name}(per_channel=False) avoids this at "
                    f"some cost in accuracy"
                )
        return "\n".join(lines)


def report_float_layers(
    layers: Iterable[tuple[keras.layers.Layer, str]], start: str, advice: str
) -> None:
    """Logs how many layers of each class compute in float. Logs the same text only once.

    Layers that the user's recipe or scope leaves in float are not counted. `layers` has pairs of a
    layer and the reason for float. The message begins with `start` and ends with `advice`.
    """
    unrequested = [(layer, reason) for layer, reason in layers if not reason.startswith(REQUESTED)]
    if not unrequested:
        return
    labels = {id(layer): describe_layer(layer) for layer, _ in unrequested}
    classes = ", ".join(f"{count} {kind}" for kind, count in Counter(labels.values()).most_common())
    reasons = {reason for _, reason in unrequested}
    why = f" ({reasons.pop().removeprefix('in float, ')})" if len(reasons) == 1 else ""
    show_once(
        f"{start} {pluralize(len(labels), 'layer')} in float: {classes}{why}. {advice}", key=classes
    )


def describe_layer(layer: keras.layers.Layer) -> str:
    if is_operation(layer):
        return f"tf.{name_in_tensorflow(layer)}"
    if type(layer) is keras.layers.Activation:
        return str(getattr(layer.activation, "__name__", layer.activation))
    return type(layer).__name__
