"""The verdict of `verify`: is the file the same as the model, and is the model any good?

With labels, accuracy or error decides. Without, `RULES` does: what they give is tried in
`benchmarks/verdicts` on models that are healthy, and on models broken on purpose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from keras_qat.analysis.verify.causes import CLIPPED, cause_in, weakest
from keras_qat.analysis.verify.scores import Score
from keras_qat.analysis.verify.uses import Use
from keras_qat.training.calibration.lost_values import describe_outliers
from keras_qat.training.readiness import list_some

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

LOST_POINTS = 0.02
"""Share of all answers, or of the error of a guess, that a file may lose against float."""

LOST_GAIN = 0.15
"""Share that it may lose of what the model in float gains over a guess."""

LOST_OWN = 0.05
"""The same by a user's own loss, of which nobody knows what a perfect answer has."""

FEW_LABELS = 20
"""Labels that are too few to tell that a model guesses."""


class Figures(NamedTuple):
    """Figures of an output without labels that have to be reached together.

    Args:
        sqnr: signal to noise against the model in float, in dB; None if it does not matter.
        same: share of decisions that stay the same, 0 to 1; None if it does not matter.
        rows: how many decisions that share is of, at least.
    """

    sqnr: float | None = None
    same: float | None = None
    rows: int = 0


class Rule(NamedTuple):
    """When an output without labels is good or poor. In between, verify asks for labels.

    Args:
        recognized: how verify knows what the output is used for.
        decision: what has to stay the same.
        good: the output is good if it reaches one of these.
        poor: it is poor if it is below one of these.
    """

    recognized: str
    decision: str
    good: tuple[Figures, ...]
    poor: tuple[Figures, ...]


CLEAN = Figures(sqnr=25)
"""At 25 dB the noise is 0.3 % of the signal, whatever the output is used for."""

PURE = Figures(sqnr=30)
"""At 30 dB, with noise of 0.1 %, classes stay the same. With more noise, as many have to stay the
same as `LOST_POINTS` allows to be lost with labels."""

RULES: dict[Use, Rule] = {
    "classes": Rule(
        "softmax, an argmax, or compiled with a loss for classes",
        "the largest entry",
        (PURE, Figures(15, 0.98), Figures(5, 0.98, 50)),
        (Figures(12, 0.8, 10), Figures(5, 0.9)),
    ),
    "decisions": Rule(
        "sigmoid, or compiled with a binary loss",
        "above or below the middle",
        (PURE, Figures(15, 0.98)),
        (Figures(12, 0.8, 10), Figures(5, 0.9)),
    ),
    "signals": Rule(
        "the shape of an image or sequence that goes in",
        "",
        (Figures(22),),
        (Figures(5),),
    ),
    "values": Rule(
        "one linear entry, or compiled with a loss for regression",
        "",
        (Figures(17),),
        (Figures(5),),
    ),
    "embeddings": Rule(
        "vectors of length 1",
        "the nearest vector is of the same example",
        (Figures(17), Figures(10, 0.98, 50)),
        (Figures(5, 0.9),),
    ),
    "classes or values": Rule(
        "everything else",
        "the largest entry",
        (CLEAN, Figures(17, 0.97), Figures(12, 0.98, 50)),
        (Figures(12, 0.8, 10), Figures(5, 0.9)),
    ),
}
"""What an output is used for -> when it is good or poor without labels. Noise of 17 dB is 2 % of
the signal, what `LOST_POINTS` allows with labels. What changes a signal a little adds to it, so
that the same noise is more of what it changes."""

CLEARLY_GOOD = 20.0
"""Decibels of some good examples from which all of them are good."""

LOW_SQNR = 12.0
"""Decibels below which a part of an output is drowned by the others."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verdict of `verify`. Prints as a sentence or a few.

    Args:
        words: "same and good", "same but poor" or "not the same"; "same" where the examples do not
            tell whether the model is good.
        weakest_layer: if the model is poor, the layer whose quantization costs most, "" if none
            was found.
        likely_cause: if it is not good, why, and what helps, "" if that is not known.
        reason: what decided, in a sentence: the labels, or figures against the model in float.
    """

    words: str
    weakest_layer: str = ""
    likely_cause: str = ""
    reason: str = ""

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
        reason = f" {self.reason}" if self.reason else ""
        return f"{self.words.capitalize()}: {MEANINGS[self.words]}.{reason}{weakest}{cause}"


MEANINGS = {
    UNDECIDED: "the file computes the same as the model, but these examples do not show whether "
    "the model is good",
    GOOD: "the file computes the same as the model, and the model is as good as the float model",
    POOR: "the file computes the same as the model, but the model has low accuracy",
    OTHER: "the file and the model compute different outputs",
}


def is_same(outputs: Sequence[OutputReport], rounds_alike: bool) -> bool:
    """Returns whether the outputs differ from the model's by no more than rounding may."""
    mean, largest = FLIPS if rounds_alike else OTHER_ROUNDING
    return all(
        output.mean_difference <= mean and output.max_difference <= largest for output in outputs
    )


class Grade(NamedTuple):
    """The grade of one output.

    Args:
        words: as of a verdict; None if the output does not vary.
        reason: what decided, a sentence.
        by_labels: whether labels did.
        fault: what is wrong with the model in float.
    """

    words: str | None
    reason: str = ""
    by_labels: bool = False
    fault: str = ""


def grade(output: OutputReport) -> Grade:
    """Grades an output: by its labels, or without labels that tell by `RULES`."""
    labelled = grade_score(output.name, output.score) if output.score else None
    if labelled and labelled.words != UNDECIDED:
        return labelled
    words = grade_figures(output.use, output.float_sqnr, output.same_decisions, output.decisions)
    if words != UNDECIDED:
        return Grade(words)
    if labelled:
        return Grade(UNDECIDED, labelled.reason)
    figures = [] if output.float_sqnr is None else [f"{output.float_sqnr:.1f} dB"]
    if output.same_decisions is not None:
        figures.append(f"{output.same_decisions:.1%} of the {DECISIONS[output.use]} kept")
    return Grade(
        UNDECIDED,
        f"'{output.name}' has {' and '.join(figures)}, which may or may not be enough. Pass labels "
        f"or targets as y.",
    )


DECISIONS: dict[Use, str] = {
    "classes": "classes",
    "decisions": "decisions",
    "signals": "values",
    "values": "values",
    "embeddings": "nearest neighbours",
    "classes or values": "largest entries",
}
"""What an output is used for -> the decisions that it leads to."""


def grade_score(name: str, score: Score) -> Grade:
    """Grades an output by its labels. Undecided if there are too few of them to tell."""
    if score.is_guess and score.examples >= FEW_LABELS:
        measure = "accuracy" if score.is_share else "error"
        fault = f"the {measure} of the float model is no better than guessing."
        return Grade(POOR, f"According to the labels of '{name}': {score}.", True, fault)
    limit = LOST_OWN if score.perfect is None else LOST_GAIN
    points = score.lost_points
    if score.tells and score.lost_gain <= limit and (points or 0.0) <= LOST_POINTS:
        return Grade(GOOD, f"According to the labels of '{name}': {score}.", True)
    if score.tells and score.lost > score.chance:
        return Grade(POOR, f"According to the labels of '{name}': {score}.", True)
    return Grade(UNDECIDED, f"According to the labels of '{name}': {score}. Pass more labels.")


def grade_figures(use: Use, sqnr: float | None, same: float | None, rows: int) -> str | None:
    """Grades an output by how near it is to the model in float.

    Args:
        use: what it is used for.
        sqnr: its signal to noise in dB; None if the examples do not tell.
        same: share of decisions that stay the same; None if there are none.
        rows: how many decisions there are.

    Returns:
        A word of the verdict; None if the output is the same for all examples.
    """
    if sqnr is None:
        return None
    rule = RULES[use]
    if any(
        sqnr >= (least.sqnr or 0.0)
        and (least.same is None or (not least.rows if same is None else same >= least.same))
        and rows >= least.rows
        for least in rule.good
    ):
        return GOOD
    if any(
        sqnr < (limit.sqnr or 0.0)
        and (limit.same is None or same is None or same < limit.same)
        and (not limit.rows or (same is not None and rows >= limit.rows))
        for limit in rule.poor
    ):
        return POOR
    return UNDECIDED


def is_clearly_good(output: OutputReport) -> bool:
    """Returns whether more examples than those of its figures would find an output good too."""
    sqnr = output.float_sqnr
    return sqnr is not None and sqnr > CLEARLY_GOOD and grade(output).words == GOOD


def judge(
    outputs: Sequence[OutputReport],
    rounds_alike: bool,
    doubts: Sequence[str],
    faulty: list[str],
    faults: Sequence[str],
    drowned: Sequence[str],
    cut_off: Sequence[str],
    lost: Sequence[str],
    look_inside: Callable[[], Sequence[TensorReport]],
) -> Verdict:
    """Returns the verdict.

    Args:
        outputs: the outputs' figures.
        rounds_alike: whether the file's kernels round as the model does.
        doubts: why the file may not be the model's, a sentence each.
        faulty: names of layers that the file computes in another way, as far as that is known.
        faults: what is wrong with the model in float, a sentence each.
        drowned: outputs without labels that are poor in parts, a sentence each.
        cut_off: inputs of which many values are beyond their range, a sentence each.
        lost: features and joined tensors that ranges lose, a sentence each.
        look_inside: compares the tensors inside. It is called if the model is poor.
    """
    if not is_same(outputs, rounds_alike) or faulty:
        of_layers = [f"the file computes {list_some(faulty)} differently."] if faulty else []
        return Verdict(OTHER, likely_cause=next(iter([*doubts, *of_layers]), ""))
    grades = [grade(output) for output in outputs]
    telling = [result for result in grades if result.words is not None]
    by_labels = bool(telling) and all(result.by_labels for result in telling)
    if by_labels:
        faults = cut_off = ()
    reasons = {result.words: result.reason for result in reversed(grades)}
    fault = next(iter([*faults, *(result.fault for result in grades if result.fault)]), "")
    if not fault and not drowned and not {POOR, UNDECIDED} & reasons.keys():
        if not telling or cut_off:
            return Verdict(UNDECIDED, likely_cause=next(iter(cut_off), ""))
        return Verdict(GOOD, reason=reasons[GOOD])
    if not fault and POOR not in reasons and drowned:
        return Verdict(POOR, likely_cause=drowned[0])
    words = POOR if fault or POOR in reasons else UNDECIDED
    reason = reasons.get(words, "")
    tensors = look_inside()
    tensor = weakest(tensors, all(output.float_sqnr is not None for output in outputs))
    if tensor is None or (fault and tensor.sqnr is not None):
        return Verdict(words, likely_cause=fault, reason=reason)
    if not fault and lost and not doubts:
        return Verdict(words, tensor.name, lost[0], reason)
    if not fault and tensor.clipped <= CLIPPED:
        for first in tensors:
            if first.far is not None:
                cause = describe_outliers(first.far, *first.range, first.bits)
                return Verdict(words, first.name, cause, reason)
    return Verdict(words, tensor.name, fault or cause_in(tensor), reason)


def rules_table() -> str:
    """Returns `RULES` as a table in Markdown."""
    lines = [
        "| the output holds | recognized by | good if | poor if |",
        "| --- | --- | --- | --- |",
    ]
    for use, rule in RULES.items():
        good = ", or ".join(_least(figures, DECISIONS[use]) for figures in rule.good)
        poor = ", or ".join(_below(figures, DECISIONS[use]) for figures in rule.poor)
        lines.append(f"| {use} | {rule.recognized} | {good} | {poor} |")
    return "\n".join(lines)


def _least(figures: Figures, decisions: str) -> str:
    return f"{figures.sqnr:g} dB{_and_same(figures, decisions)}"


def _below(figures: Figures, decisions: str) -> str:
    return f"below {figures.sqnr:g} dB{_and_same(figures, decisions)}"


def _and_same(figures: Figures, decisions: str) -> str:
    if figures.same is None:
        return ""
    of_rows = f" (of {figures.rows} or more)" if figures.rows else ""
    return f" and {100 * figures.same:g} % of the {decisions}{of_rows}"
