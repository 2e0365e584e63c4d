"""The resolved graph: what a quantization-aware model computes in integers.

`resolve.resolve` makes it from a model. Export, simulation, verification and the model's own
inference read it, and derive none of it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from keras_qat.arithmetic.kernel_families import XNNPACK, KernelFamily, kernel_family
from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.config.recipe import Recipe
from keras_qat.config.targets.target import Target
from keras_qat.graph.calls import Graph, Value
from keras_qat.io.inputs import Inputs
from keras_qat.messages import warn_caller
from keras_qat.ops.node import Constant, Node, Operand, Tensor
from keras_qat.training.calibration.lost_values import explain_losses
from keras_qat.training.recurrent import (
    kept_batch,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """The model of a resolved graph, as it was when the graph was made.

    Without arguments: a graph that belongs to no model.

    Args:
        calls: the model's calls, which compute it in float or with fake quantization.
        inputs: names, shapes and structure of the data it takes.
        recipe: what it was quantized with; None for a model made of parts of others.
        family: the kernel family whose rounding it has at inference.
        simulates: whether it computes with fake quantization at inference, not in integers.
        target: where its file is to run; None if `quantize_model` was not told.
        packs_int4: whether it computes with weights packed in 4 bits, as its file then does.
        states: the variables that its recurrent layers keep from one call to the next.
        uncalibrated: names of the tensors whose quantizers have no range yet.
        fingerprint: digests of its weights and ranges, by which a file is recognised.
        warnings: sentences that say why its file may not compute what it was trained to.
        unlike_float: one of them, if the float model that it was made from computes otherwise.
    """

    calls: Graph = dataclasses.field(default_factory=lambda: Graph("", [], [], [], []))
    inputs: Inputs = dataclasses.field(default_factory=lambda: Inputs("", [], None))
    recipe: Recipe | None = None
    family: KernelFamily = XNNPACK
    simulates: bool = False
    target: Target | None = None
    packs_int4: bool = False
    states: Sequence[Any] = ()
    uncalibrated: frozenset[str] = frozenset()
    fingerprint: Mapping[str, str] = dataclasses.field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    unlike_float: str = ""

    @property
    def is_16_bit(self) -> bool:
        """Whether activations have 16 bits."""
        return self.recipe is not None and self.recipe.activations.bits == 16

    @property
    def file_family(self) -> KernelFamily:
        """The kernel family that runs the model's file."""
        return XNNPACK if self.target is None else kernel_family(self.target.kernels)

    @property
    def kept_batch(self) -> int | None:
        """Number of sequences whose states the model keeps; None without states."""
        return kept_batch(self.states)

    @property
    def fixed_batch(self) -> int | None:
        """The batch size of the model's states or inputs; None for any."""
        return self.kept_batch or self.inputs.batch_size

    def batch_size(self, examples: int, default: int) -> int:
        """Returns how many examples to run at a time.

        Raises:
            ValueError: if a model that keeps states cannot take as many examples.
        """
        size = self.kept_batch
        if size is not None and examples % size:
            raise ValueError(
                f"'{self.calls.name}' keeps the states of {size} sequences, so it takes {size} "
                f"examples at a time, not {examples}."
            )
        return self.fixed_batch or default

    def warn(self) -> None:
        """Shows `warnings` and what the ranges lose, at the line that called the verb."""
        for sentence in (*self.warnings, *explain_losses(self.calls)):
            warn_caller(sentence)


@dataclasses.dataclass(frozen=True, eq=False)
class ResolvedGraph:
    """A quantization-aware model as nodes in the order in which they compute.

    Args:
        name: the model's name.
        inputs, outputs: by name, in the model's order.
        nodes: the nodes.
        tensors: value of the model's calls -> the tensor that holds it.
        values: tensor -> the value it holds, behind its quantizer and the ReLU merged into it.
        unrounded: output in float -> its parameters in files whose outputs are to be integers.
        origin: all that later verbs need to know of the model, which they do not ask again.
    """

    name: str
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    nodes: tuple[Node, ...]
    tensors: dict[Value, Tensor]
    values: dict[Tensor, Value]
    unrounded: dict[Tensor, QuantParams] = dataclasses.field(default_factory=dict)
    origin: Origin = dataclasses.field(default_factory=Origin)

    def sized(self) -> ResolvedGraph:
        """Returns the graph with the rounding of a file whose batch size is known."""
        nodes = tuple(dataclasses.replace(node, sized=True) for node in self.nodes)
        return dataclasses.replace(self, nodes=nodes)

    def __str__(self) -> str:
        """Formats a line for each node: operator, quantization parameters, weights, merged ReLU."""
        lines = [f"inputs: {', '.join(map(_described, self.inputs.values()))}"]
        for node in self.nodes:
            name = node.op.name if node.op else f"float ({node.reason})"
            parts = [f"{node.name}: {name}"]
            if node.attributes:
                parts.append(" ".join(f"{key}={value}" for key, value in node.attributes.items()))
            parts.append("reads " + ", ".join(map(_described, node.inputs)))
            if node.weights is not None:
                parts.append(str(node.weights))
            if node.maximum is not None:
                parts.append(f"merged ReLU up to {node.maximum:g}")
            parts.append("gives " + ", ".join(map(_described, node.outputs)))
            lines.append("; ".join(parts))
        return "\n".join([*lines, f"outputs: {', '.join(map(_described, self.outputs.values()))}"])


def _described(operand: Operand) -> str:
    if isinstance(operand, Constant):
        return f"constant {operand.q.shape} ({operand.params})"
    kind = operand.dtype if operand.params is None else str(operand.params)
    return f"{operand.name} {list(operand.shape)} ({kind})"
