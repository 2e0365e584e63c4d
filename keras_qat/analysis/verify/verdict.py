"""The verdict of `verify`: is the file the same as the model, and is the model any good?

Limits are from `benchmarks/verdicts.py`: models that are healthy, and models broken on purpose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from keras_qat.training.calibration.far_values import described
from keras_qat.training.readiness import some

if TYPE_CHECKING:
    from keras_qat.analysis.verify.report import OutputReport, TensorReport

UNDECIDED = "same"
GOOD = "same and good"
POOR = "same but poor"
OTHER = "not the same"

FLIPS = 0.5, 3.0
"""Mean and largest difference to the model, in LSB, that rounding in float layers may make."""

OTHER_ROUNDING = 2.0, 12.0
"""The same where the file's kernels round in another way than the model. Files of other weights
have a mean difference of 14 LSB and more."""

LOW_SQNR, LOWEST_SQNR = 12.0, 5.0
"""Decibels below which an output is poor: if its classes are others too, and in any case."""

CLEARLY_GOOD = 15.0
"""Decibels of some examples from which all of them have more than `LOW_SQNR`."""

LOW_AGREEMENT = 0.9
"""Share of the same classes below which an output of low signal to noise is poor."""

FEWER_RIGHT = 0.02
"""Accuracy that a file may lose against the model in float."""

IDEAL = 50.0
"""Signal to noise, in dB, of a tensor of 8 bits that is quantized well."""

CLIPPED = 0.02
"""Share of a tensor's values beyond its range that is more than outliers."""

COARSE = 4.0
"""Steps of a tensor's range that its values have to differ by; with 4 it has 23 dB."""

SMALL_PART = 1 / 8
"""Part of a range that is too small for a tensor's values."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verdict of `verify`. Prints as a sentence or a few.

    Args:
        words: "same and good", "same but poor" or "not the same"; "same" where the examples do not
            tell whether the model is good.
        weakest_layer: if the model is poor, the layer whose quantization costs most, "" if none
            was found.
        likely_cause: if it is not good, why, and what helps, "" if that is not known.
    """

    words: str
    weakest_layer: str = ""
    likely_cause: str = ""

    @property
    def is_same(self) -> bool:
        """Whether the file computes what the model computes."""
        return self.words != OTHER

    @property
    def is_good(self) -> bool:
        """Whether the file also computes what is wanted."""
        return self.words == GOOD

    def __str__(self) -> str:
        weakest = f" The weakest layer is {self.weakest_layer}." if self.weakest_layer else ""
        cause = ""
        if self.likely_cause:  # Warnings, which are sentences by themselves, serve as causes too.
            start, rest = self.likely_cause[:4], self.likely_cause[4:]
            cause = f" The likely cause: {start.replace('The ', 'the ')}{rest}"
        return f"{self.words.capitalize()}: {MEANINGS[self.words]}.{weakest}{cause}"


MEANINGS = {
    UNDECIDED: "the file computes what the model computes; these examples do not tell whether that "
    "is good",
    GOOD: "the file computes what the model computes, and that is close to the model in float",
    POOR: "the file computes what the model computes, but the model is not good",
    OTHER: "the file computes something other than the model",
}


def is_same(outputs: Sequence[OutputReport], rounds_alike: bool) -> bool:
    """Returns whether the outputs differ from the model's by no more than rounding may."""
    mean, largest = FLIPS if rounds_alike else OTHER_ROUNDING
    return all(
        output.mean_difference <= mean and output.max_difference <= largest for output in outputs
    )


def is_poor(output: OutputReport, examples: int) -> bool:
    """Returns whether an output is far from the model in float, or from its labels."""
    agreement, sqnr = output.float_argmax_agreement, output.float_sqnr
    if output.accuracy is not None and output.float_accuracy is not None:
        differing = 1.0 if agreement is None else 1 - agreement
        by_chance = 2 * (differing / examples) ** 0.5
        lost = output.float_accuracy - output.accuracy
        return lost > max(FEWER_RIGHT, by_chance)
    return is_far(sqnr, agreement)


def is_clearly_good(output: OutputReport) -> bool:
    """Returns whether more examples than those of its figures would find an output good too."""
    return output.float_sqnr is not None and output.float_sqnr > CLEARLY_GOOD


def is_far(sqnr: float | None, agreement: float | None) -> bool:
    """Returns whether an output is far from that in float.

    Args:
        sqnr: its signal to noise in dB; None if it is the same for all examples.
        agreement: share of rows with the same argmax; None for one entry.
    """
    if sqnr is None:
        return False
    has_other_classes = agreement is None or agreement < LOW_AGREEMENT
    return sqnr < LOWEST_SQNR or (sqnr < LOW_SQNR and has_other_classes)


def weakest(tensors: Iterable[TensorReport], all_vary: bool) -> TensorReport | None:
    """Returns the tensor that loses most of the signal that its inputs have.

    Args:
        tensors: the tensors, in order.
        all_vary: whether all outputs vary with the examples. What is the same for all of them is
            then no fault, as positions that are added.
    """
    sqnr_of: dict[str, float | None] = {}
    losses: list[tuple[float, TensorReport]] = []
    for tensor in tensors:
        before = [sqnr_of[name] for name in tensor.reads if name in sqnr_of]
        if tensor.sqnr is None and all_vary:
            continue
        sqnr_of[tensor.name] = tensor.sqnr
        if None not in before:
            best = min([IDEAL, *filter(None, before)])
            losses.append((np.inf if tensor.sqnr is None else best - tensor.sqnr, tensor))
    return max(losses, key=lambda loss: loss[0], default=(0.0, None))[1]


def cause_in(tensor: TensorReport) -> str:
    """Says why a tensor loses so much of its signal, and what helps."""
    (low, high), (lowest, highest) = tensor.range, tensor.float_range
    ends, values = f"{low:.4g} to {high:.4g}", f"{lowest:.4g} to {highest:.4g}"
    if tensor.sqnr is None:
        return (
            "in float too it is the same for all examples: its weights, or the data, say nothing."
        )
    if tensor.clipped > CLIPPED:
        advice = (
            "Calibrate with data like these, and after the last change of weights."
            if tensor.reads
            else "Scale these as in training, or calibrate with data like these."
        )
        return (
            f"{tensor.clipped:.0%} of its values lie beyond its range, {ends}: in float they are "
            f"{values}. {advice}"
        )
    step = (high - low) / (2**tensor.bits - 1)
    if tensor.spread > COARSE * step:
        return ""
    if tensor.bits < 8:
        return f"it has {tensor.bits} bits. Train the model with them, or give it more."
    if highest - lowest < SMALL_PART * (high - low):
        advice = "Calibrate with data that is scaled as in training and has no outliers"
        shared = ", or bring the larger numbers that share its range to its size" * bool(
            tensor.reads
        )
        return f"its range is {ends}, but its values are {values}. {advice}{shared}."
    return (
        f"its range is {ends}, whose steps of {step:.3g} are too coarse for values that differ by "
        f"{tensor.spread:.3g}. Keep outliers and marks for missing numbers out of the data, or "
        f"give it 16 bits."
    )


def judge(
    outputs: Sequence[OutputReport],
    examples: int,
    rounds_alike: bool,
    doubts: Sequence[str],
    faulty: list[str],
    faults: Sequence[str],
    drowned: Sequence[str],
    look_inside: Callable[[], Sequence[TensorReport]],
) -> Verdict:
    """Returns the verdict.

    Args:
        outputs: the outputs' figures.
        examples: how many examples there are.
        rounds_alike: whether the file's kernels round as the model does.
        doubts: why the file may not be the model's, a sentence each.
        faulty: names of layers that the file computes in another way, as far as that is known.
        faults: what is wrong with the model in float, a sentence each.
        drowned: outputs that are poor in parts, a sentence each.
        look_inside: compares the tensors inside. It is called if the model is poor.
    """
    if not is_same(outputs, rounds_alike) or faulty:
        of_layers = [f"the file computes {some(faulty)} in another way."] if faulty else []
        return Verdict(OTHER, likely_cause=next(iter([*doubts, *of_layers]), ""))
    if not faults and not any(is_poor(output, examples) for output in outputs):
        if drowned:
            return Verdict(POOR, likely_cause=drowned[0])
        is_known = any(output.float_sqnr is not None for output in outputs)
        return Verdict(GOOD if is_known else UNDECIDED)
    tensors = look_inside()
    tensor = weakest(tensors, all(output.float_sqnr is not None for output in outputs))
    if tensor is None or (faults and tensor.sqnr is not None):
        return Verdict(POOR, likely_cause=next(iter(faults), ""))
    if not faults and tensor.clipped <= CLIPPED:
        for first in tensors:
            if first.far is not None:
                cause = described(first.far, *first.range, first.bits)
                return Verdict(POOR, first.name, cause)
    return Verdict(POOR, tensor.name, [*faults, cause_in(tensor)][0])
