"""The resolved graph: the integer computation of a quantization-aware model.

`resolve.resolve` creates it from a model. Export, simulation, verification and `predict` read it. A
`Value` is a symbolic tensor of the Keras model. A `Tensor` is a tensor of the resolved graph.
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
from keras_qat.training.recurrent import kept_batch


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """Information about the Keras model of a resolved graph.

    Args:
        calls: the calls of the model's Keras layers.
        inputs: names, shapes and structure of the inputs.
        recipe: the recipe of `quantize_model`. None for a model built from other models' layers.
        family: the kernel family that the model's inference reproduces.
        simulates: whether inference uses fake quantization instead of integers.
        target: the target of `quantize_model`, or None.
        packs_int4: whether weights are packed in 4 bits, at inference and in the file.
        states: the variables that stateful recurrent layers keep between calls.
        uncalibrated: names of the tensors that have a quantizer, but no range yet.
        fingerprint: hashes of weights and ranges, which identify files of this model.
        warnings: reasons why the file may differ from the trained model.
        unlike_float: a warning if the original float model computes differently, or "".
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
        return self.recipe is not None and self.recipe.activations.bits == 16

    @property
    def file_family(self) -> KernelFamily:
        """The kernel family of the target. XNNPACK without a target."""
        return XNNPACK if self.target is None else kernel_family(self.target.kernels)

    @property
    def kept_batch(self) -> int | None:
        """The batch size of stateful recurrent layers. None if there are no such layers."""
        return kept_batch(self.states)

    @property
    def fixed_batch(self) -> int | None:
        """The batch size that the model requires. None if it accepts any size."""
        return self.kept_batch or self.inputs.batch_size

    def batch_size(self, examples: int, default: int) -> int:
        """Returns the batch size that the model requires, or `default`.

        Raises a `ValueError` if the number of `examples` is not a multiple of `kept_batch`.
        """
        size = self.kept_batch
        if size is not None and examples % size:
            raise ValueError(
                f"'{self.calls.name}' keeps the states of {size} sequences, so it needs batches of "
                f"{size} examples, not {examples}."
            )
        return self.fixed_batch or default

    def warn(self) -> None:
        """Issues `warnings`. Also warns about small features that quantization would lose."""
        for sentence in (*self.warnings, *explain_losses(self.calls)):
            warn_caller(sentence)


@dataclasses.dataclass(frozen=True, eq=False)
class ResolvedGraph:
    """A quantization-aware model as nodes in the order of computation.

    Args:
        name: the model's name.
        inputs, outputs: map names to tensors, in the model's order.
        nodes: the nodes.
        tensors: maps each value of the model's calls to a tensor.
        values: maps each tensor to a value. A tensor with a fused ReLU maps to the ReLU's output.
        unrounded: maps float outputs to parameters, which a file with integer outputs uses.
        origin: facts about the model for export, simulation and verification.
    """

    name: str
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    nodes: tuple[Node, ...]
    tensors: dict[Value, Tensor]
    values: dict[Tensor, Value]
    unrounded: dict[Tensor, QuantParams] = dataclasses.field(default_factory=dict)
    origin: Origin = dataclasses.field(default_factory=Origin)

    def assume_fixed_batch(self) -> ResolvedGraph:
        """Returns a graph that rounds like a file with a fixed batch size.

        XNNPACK computes a transposed convolution only if the output's size is fixed. Otherwise,
        TFLite computes it with a kernel that rounds differently.
        """
        nodes = tuple(dataclasses.replace(node, sized=True) for node in self.nodes)
        return dataclasses.replace(self, nodes=nodes)

    def __str__(self) -> str:
        """Formats one line per node: operator, quantization parameters, weights, fused ReLU."""
        lines = [f"inputs: {', '.join(map(_describe, self.inputs.values()))}"]
        for node in self.nodes:
            name = node.op.name if node.op else f"float ({node.reason})"
            entries = [f"{node.name}: {name}"]
            if node.attributes:
                entries.append(" ".join(f"{key}={value}" for key, value in node.attributes.items()))
            entries.append("reads " + ", ".join(map(_describe, node.inputs)))
            if node.weights is not None:
                entries.append(str(node.weights))
            if node.maximum is not None:
                entries.append(f"merged ReLU up to {node.maximum:g}")
            entries.append("returns " + ", ".join(map(_describe, node.outputs)))
            lines.append("; ".join(entries))
        return "\n".join([*lines, f"outputs: {', '.join(map(_describe, self.outputs.values()))}"])


def _describe(operand: Operand) -> str:
    if isinstance(operand, Constant):
        return f"constant {operand.q.shape} ({operand.params})"
    kind = operand.dtype if operand.params is None else str(operand.params)
    return f"{operand.name} {list(operand.shape)} ({kind})"
