"""The plan: what happens to each tensor of a model and why, decided before anything is built."""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_qat.config.recipes import Recipe
from keras_qat.config.specs import FixedSpec, QuantSpec, Spec
from keras_qat.config.targets.problem import Problem, described
from keras_qat.config.targets.target import Target
from keras_qat.frontend.graph import Call, Graph, Value, values_in
from keras_qat.frontend.keras2.backend import keras
from keras_qat.placement.fusion_groups import Group

__all__ = ["Plan", "Range", "Row"]


INSIDE = "inside, one range for all steps"


@dataclasses.dataclass(frozen=True)
class PerGate(QuantSpec):
    """How the weights of an LSTM are quantized."""

    def __str__(self) -> str:
        return super().__str__().rsplit(" ", 1)[0] + " gate"


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a plan.

    Args:
        tensor: the tensor's name: that of the layer that makes it, or `layer/weight`.
        layer: class name of that layer.
        role: "input", "weight" or "activation".
        spec: how it is quantized, or None.
        reason: why, in a few words.
    """

    tensor: str
    layer: str
    role: str
    spec: Spec | None
    reason: str


@dataclasses.dataclass(eq=False)
class Range:
    """A range and the tensors that have it.

    Args:
        spec: the specification.
        observed: the tensors whose values make the range.
        rounded: further tensors that are rounded to it, without being observed.
    """

    spec: QuantSpec | FixedSpec
    observed: list[Value]
    rounded: list[Value] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Plan:
    """What happens to each tensor of a model: prints as a table, `rows` and `to_dict` are its data.

    Args:
        recipe: the recipe it follows.
        graph: the model, lowered.
        groups: the calls that become one wrapper.
        specs: how each value is quantized; a value that is missing stays as it is computed.
        reasons: why, for every value.
        ranges: the quantizers of the values: one for all values that share a range.
        weights: how the weights of each group are quantized, None for not at all.
        float_layers: name of each layer that computes in float -> why.
        left_in_float: those of them that files compute in float whatever ranges there are. With
            the original's placement files quantize more than its quantizers say.
        replaced: layer -> the class of the layer that takes its place.
        weights_only: calls of those whose weights are quantized all the same -> their paths.
        inner: the ranges inside of a group's kernel, by name.
        target: where the file is to run, if that was asked for.
        problems: what of it does not run there.
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

    @property
    def rows(self) -> list[Row]:
        """One row for each tensor, in the order of computation."""
        inputs = set(values_in(self.graph.inputs))
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
        if isinstance(group.kernel.layer, keras.layers.Embedding) and not spec:
            spec, reason = self.specs.get(group.output), "in the range of what it gives"
        if spec and group.batch_norm:
            reason = f"kernel, folded with {group.batch_norm.name}"
        if isinstance(group.kernel.layer, keras.layers.LSTM) and isinstance(spec, QuantSpec):
            spec = PerGate(**vars(spec))
        name, layer = group.kernel.name, type(group.kernel.layer).__name__
        return [Row(f"{name}/{each}", layer, "weight", spec, reason) for each in group.weights]

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON data."""
        return {
            "recipe": self.recipe.to_config(),
            "tensors": [
                {**dataclasses.asdict(row), "spec": row.spec and str(row.spec)} for row in self.rows
            ],
            "float_layers": self.float_layers,
            **self._of_target(),
        }

    def _of_target(self) -> dict[str, Any]:
        if self.target is None:
            return {}
        problems = [dataclasses.asdict(each) for each in self.problems]
        return {"target": self.target.name, "problems": problems}

    def __str__(self) -> str:
        table = [("tensor", "layer", "quantized to", "why")]
        table += [(row.tensor, row.layer, str(row.spec or "-"), row.reason) for row in self.rows]
        widths = [max(len(line[column]) for line in table) for column in range(3)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, [*widths, 0], strict=True))
            for line in table
        ]
        lines.insert(1, "  ".join("-" * width for width in [*widths, 20]))
        counts = f"{len(self.groups)} kernels, {len(self.ranges)} ranges"
        if self.float_layers:
            names = ", ".join(self.float_layers)
            counts += f"; {len(self.float_layers)} layers stay in float: {names}"
        lines.append(f"recipe {self.recipe.name}: {counts}")
        if self.target is not None:
            lines += described(self.target, self.problems)
        return "\n".join(lines)
