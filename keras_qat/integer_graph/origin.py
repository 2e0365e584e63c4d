"""Facts about the model that a resolved graph was made from, for later steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from keras_qat.arithmetic.kernel_families import XNNPACK, KernelFamily, kernel_family
from keras_qat.config.recipe import Recipe
from keras_qat.config.targets.target import Target, get_target
from keras_qat.graph.calls import Graph
from keras_qat.io.inputs import Inputs, get_inputs
from keras_qat.messages import warn_caller
from keras_qat.tflite.metadata import compute_fingerprint
from keras_qat.training.calibration.lost_values import lost_parts
from keras_qat.training.quantizers import activation_quantizers
from keras_qat.training.readiness import (
    describe_difference,
    untrained,
)
from keras_qat.training.recurrent import (
    kept_batch,
    states_of,
)
from keras_qat.training.schedule import recipe_of


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
        for sentence in (*self.warnings, *lost_parts(self.calls)):
            warn_caller(sentence)


def origin_of(model: Any, calls: Graph) -> Origin:
    """Reads the facts about a quantization-aware model that its calls do not tell."""
    recipe = recipe_of(model)
    uncalibrated = {
        name
        for quantizer in activation_quantizers(model)
        if not quantizer.calibrated
        for name in quantizer.quantizes
    }
    unlike_float = describe_difference(model)
    return Origin(
        calls=calls,
        inputs=get_inputs(model),
        recipe=recipe,
        family=kernel_family(getattr(model, "kernels", XNNPACK.name)),
        simulates=getattr(model, "simulates", True),
        target=get_target(model),
        packs_int4=getattr(model, "pack_int4", False),
        states=states_of(model),
        uncalibrated=frozenset(uncalibrated),
        fingerprint=compute_fingerprint(model),
        warnings=tuple(filter(None, [unlike_float, *untrained(model, calls)])),
        unlike_float=unlike_float,
    )
