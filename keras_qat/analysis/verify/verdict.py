"""The verdict of `verify`: whether file and model agree, and whether the model is good.

With labels, a model is good if its accuracy or error is close to the float model's. Without labels,
`RULES` limit how much its outputs may differ. `benchmarks/verdicts` tests the rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from keras_qat.analysis.verify.causes import CLIPPED, explain_loss, find_weakest
from keras_qat.analysis.verify.labels import Use
from keras_qat.analysis.verify.results import OutputReport, TensorReport
from keras_qat.analysis.verify.scores import Score
from keras_qat.training.calibration.lost_values import describe_outliers
from keras_qat.training.readiness import list_some

UNDECIDED = "same"
GOOD = "same and good"
POOR = "same but poor"
OTHER = "not the same"

MEANINGS = {
    UNDECIDED: "the file computes the same as the model, but these examples do not show whether "
    "the model is good",
    GOOD: "the file computes the same as the model, and the model is as good as the float model",
    POOR: "the file computes the same as the model, but the model has low accuracy",
    OTHER: "the file and the model compute different outputs",
}

FLIPS = 0.5, 3.0
"""File and model are the same up to this mean and maximum difference, in LSB."""

OTHER_ROUNDING = 2.0, 12.0
"""The same limits if the file's kernels round differently from `model.predict`. A file with
other weights than the model differs by 14 LSB or more on average."""

LOST_POINTS = 0.02
"""Maximum loss of accuracy of a good file, 0 to 1. See `Score.lost_points` for errors."""

LOST_GAIN = 0.15
"""Maximum `Score.lost_gain` of a good file."""

LOST_CUSTOM = 0.05
"""Maximum `Score.lost_gain` for a custom loss, which has no `Score.lost_points`."""

FEW_LABELS = 20
"""With fewer labels, the verdict is never that a model is no better than guessing."""


class Figures(NamedTuple):
    """Limits for an output without labels, as used in a `Rule`.

    Args:
        sqnr: SQNR against the float model in dB. None for no limit.
        same: share of decisions that are the same in float, 0 to 1. None for no limit. A decision
            is for example the class with the largest score.
        rows: the limits only apply if at least this many decisions were compared.
    """

    sqnr: float | None = None
    same: float | None = None
    rows: int = 0


class Rule(NamedTuple):
    """Decides whether an output without labels is good or poor.

    If the output is neither, `verify` asks for labels.

    Args:
        recognized: which outputs the rule applies to, for the documentation.
        decisions: the decisions that an application makes from the output, such as "classes".
        good: the output is good if it reaches all limits of one of these `Figures`.
        poor: the output is poor if it misses all limits of one of these `Figures`.
    """

    recognized: str
    decisions: str
    good: tuple[Figures, ...]
    poor: tuple[Figures, ...]


CLEAN = Figures(sqnr=25)
"""Good if the power of the quantization noise is at most 0.3 % of the signal."""

PURE = Figures(sqnr=30)
"""Good if the power of the quantization noise is at most 0.1 % of the signal. Then hardly any class
changes."""

RULES: dict[Use, Rule] = {
    "classes": Rule(
        "softmax, an argmax, or compiled with a loss for classes",
        "classes",
        (PURE, Figures(15, 0.98), Figures(5, 0.98, 50)),
        (Figures(12, 0.8, 10), Figures(5, 0.9)),
    ),
    "decisions": Rule(
        "sigmoid, or compiled with a binary loss",
        "decisions",
        (PURE, Figures(15, 0.98)),
        (Figures(12, 0.8, 10), Figures(5, 0.9)),
    ),
    "signals": Rule(
        "the shape of an input image or sequence", "values", (Figures(22),), (Figures(5),)
    ),
    "values": Rule(
        "one linear entry, or compiled with a loss for regression",
        "values",
        (Figures(17),),
        (Figures(5),),
    ),
    "embeddings": Rule(
        "vectors of length 1",
        "nearest neighbours",
        (Figures(17), Figures(10, 0.98, 50)),
        (Figures(5, 0.9),),
    ),
    "classes or values": Rule(
        "everything else",
        "largest entries",
        (CLEAN, Figures(17, 0.97), Figures(12, 0.98, 50)),
        (Figures(12, 0.8, 10), Figures(5, 0.9)),
    ),
}
"""The rule for each kind of output.

Regression values need 17 dB. The noise then has 2 % of the signal's power, as in `LOST_POINTS`.
"signals", such as the output of a denoiser, need 22 dB because they differ little from inputs."""

CLEARLY_GOOD = 20.0
"""If all outputs are good and exceed this SQNR in dB, the float model computes few examples."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verdict of `verify`. Prints as a few sentences.

    Args:
        words: "same and good", "same but poor", "not the same", or "same" if the examples do not
            show whether the model is good.
        weakest_layer: the layer that loses most SQNR, if the model may be poor, otherwise "".
        likely_cause: if the verdict is not good, the cause with advice, or "" if it is unknown.
        reason: a sentence with the accuracy or SQNR that decided.
    """

    words: str
    weakest_layer: str = ""
    likely_cause: str = ""
    reason: str = ""

    @property
    def is_same(self) -> bool:
        """Whether file and model have the same outputs."""
        return self.words != OTHER

    @property
    def is_good(self) -> bool:
        """Whether file and model have the same outputs, and the model is good."""
        return self.words == GOOD

    def __str__(self) -> str:
        weakest = f" The weakest layer is {self.weakest_layer}." if self.weakest_layer else ""
        cause = ""
        if self.likely_cause:  # A warning is a complete sentence.
            start, rest = self.likely_cause[:4], self.likely_cause[4:]
            cause = f" The likely cause: {start.replace('The ', 'the ')}{rest}"
        reason = f" {self.reason}" if self.reason else ""
        return f"{self.words.capitalize()}: {MEANINGS[self.words]}.{reason}{weakest}{cause}"


def is_same(outputs: Sequence[OutputReport], rounds_alike: bool) -> bool:
    """Returns True if the outputs of file and model differ only by rounding.

    `rounds_alike` is True if the file's kernels should round exactly as `model.predict` does.
    """
    mean, largest = FLIPS if rounds_alike else OTHER_ROUNDING
    return all(
        output.mean_difference <= mean and output.max_difference <= largest for output in outputs
    )


class Grade(NamedTuple):
    """The grade of one output.

    Args:
        words: as in `Verdict`, for example "same and good". None if the output is nearly the same
            for all examples.
        reason: a sentence with the accuracy or SQNR that decided.
        by_labels: whether labels decided.
        fault: a problem of the float model, or "".
    """

    words: str | None
    reason: str = ""
    by_labels: bool = False
    fault: str = ""


def grade_output(output: OutputReport) -> Grade:
    """Grades an output by its labels. Without enough labels, grades it by `RULES`."""
    labelled = _grade_score(output.name, output.score) if output.score else None
    if labelled and labelled.words != UNDECIDED:
        return labelled
    words = grade_figures(output.use, output.float_sqnr, output.same_decisions, output.decisions)
    if words != UNDECIDED:
        return Grade(words)
    if labelled:
        return Grade(UNDECIDED, labelled.reason)
    figures = [] if output.float_sqnr is None else [f"{output.float_sqnr:.1f} dB"]
    if output.same_decisions is not None:
        figures.append(f"{output.same_decisions:.1%} of the {RULES[output.use].decisions} kept")
    return Grade(
        UNDECIDED,
        f"'{output.name}' has {' and '.join(figures)}, which may or may not be enough. Pass labels "
        f"or targets as y.",
    )


def _grade_score(name: str, score: Score) -> Grade:
    """Grade an output by its labels. The grade is `UNDECIDED` if more labels are needed."""
    reason = f"According to the labels of '{name}': {score}."
    if score.is_guess and score.examples >= FEW_LABELS:
        measure = "accuracy" if score.is_share else "error"
        fault = f"the {measure} of the float model is no better than guessing."
        return Grade(POOR, reason, True, fault)
    limit = LOST_CUSTOM if score.perfect is None else LOST_GAIN
    if score.tells and score.lost_gain <= limit and (score.lost_points or 0.0) <= LOST_POINTS:
        return Grade(GOOD, reason, True)
    if score.tells and score.lost > score.chance:
        return Grade(POOR, reason, True)
    return Grade(UNDECIDED, f"{reason} Pass more labels.")


def grade_figures(use: Use, sqnr: float | None, same: float | None, rows: int) -> str | None:
    """Grades an output by its difference from the float model, with a rule of `RULES`.

    Args:
        use: the kind of output, such as "classes".
        sqnr: the output's SQNR in dB. The result is None if `sqnr` is None.
        same: share of decisions that are the same in float. None without decisions.
        rows: number of decisions.
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
    sqnr = output.float_sqnr
    return sqnr is not None and sqnr > CLEARLY_GOOD and grade_output(output).words == GOOD


@dataclasses.dataclass(frozen=True)
class Findings:
    """Problems that `verify` found. All fields except `faulty` hold complete sentences.

    Args:
        mismatches: signs that the file was not exported from the current model.
        faulty: names of layers that the file computes differently. Empty without `per_layer`.
        faults: problems of the float model.
        small_channels: outputs with channels that are too small for the output's range.
        excess: inputs with many values outside their range.
        lost: inner tensors with values too small for their range, for example in a Concatenate.
    """

    mismatches: Sequence[str]
    faulty: Sequence[str]
    faults: Sequence[str]
    small_channels: Sequence[str]
    excess: Sequence[str]
    lost: Sequence[str]


def judge(
    outputs: Sequence[OutputReport],
    rounds_alike: bool,
    found: Findings,
    look_inside: Callable[[], Sequence[TensorReport]],
) -> Verdict:
    """Returns the verdict. Calls `look_inside` if the cause may be in an inner layer."""
    if not is_same(outputs, rounds_alike) or found.faulty:
        causes = list(found.mismatches)
        causes += [f"the file computes {list_some(list(found.faulty))} differently."] * bool(
            found.faulty
        )
        return Verdict(OTHER, likely_cause=_first(causes))
    grades = [grade_output(output) for output in outputs]
    telling = [grade for grade in grades if grade.words is not None]
    by_labels = bool(telling) and all(grade.by_labels for grade in telling)
    faults = [] if by_labels else [*found.faults]
    excess = [] if by_labels else found.excess
    fault = _first([*faults, *(grade.fault for grade in grades if grade.fault)])
    reasons = {grade.words: grade.reason for grade in reversed(grades)}
    is_poor = bool(fault) or POOR in reasons
    if not is_poor and found.small_channels:
        return Verdict(POOR, likely_cause=found.small_channels[0])
    if not is_poor and UNDECIDED not in reasons:
        if not telling or excess:
            return Verdict(UNDECIDED, likely_cause=_first(excess))
        return Verdict(GOOD, reason=reasons[GOOD])
    words = POOR if is_poor else UNDECIDED
    reason = reasons.get(words, "")
    tensors = look_inside()
    weakest = find_weakest(tensors, all(output.float_sqnr is not None for output in outputs))
    if weakest is None or (fault and weakest.sqnr is not None):
        return Verdict(words, likely_cause=fault, reason=reason)
    if not fault and found.lost and not found.mismatches:
        return Verdict(words, weakest.name, found.lost[0], reason)
    if not fault and weakest.clipped <= CLIPPED:
        for tensor in tensors:
            if tensor.far is not None:
                cause = describe_outliers(tensor.far, *tensor.range, tensor.bits)
                return Verdict(words, tensor.name, cause, reason)
    return Verdict(words, weakest.name, fault or explain_loss(weakest), reason)


def _first(sentences: Sequence[str]) -> str:
    return next(iter(sentences), "")
