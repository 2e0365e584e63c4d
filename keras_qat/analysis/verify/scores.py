"""How well an output meets its labels: by accuracy, or by an error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from keras_qat.analysis.verify.labels import Labels
from keras_qat.analysis.verify.uses import MOST_NEIGHBOURS, most_frequent, nearest_labels
from keras_qat.keras2.losses import CompiledLoss

MOST_CHANNELS = 100
"""Channels of an output that are scored one by one; with more they are all of one kind."""

CLEAR = 0.15
"""Part of what can be gained over a guess that chance may explain where a gain has to exceed it."""

DEVIATIONS = 2.0
"""Standard deviations of a mean over the examples that chance explains."""


@dataclasses.dataclass(frozen=True)
class Score:
    """How well the file and the model in float meet the labels of an output.

    Args:
        measure: what is measured: "accuracy", "accuracy of the nearest neighbour", or an error.
        value: what the file reaches.
        float_value: what the model in float reaches.
        guess: what a guess reaches that is the same for all examples.
        perfect: what perfect answers reach; None if that is not known.
        chance: the difference between file and float that chance explains.
        examples: how many examples have labels.
        by_chance: the difference between float and the guess that chance explains.
        channel: the channel of the output that loses most, if they are measured one by one.
        accuracy: the share of right answers in the file; None if errors are measured.
        float_accuracy: the same of the model in float.
    """

    measure: str
    value: float
    float_value: float
    guess: float
    perfect: float | None
    chance: float
    examples: int
    by_chance: float = 0.0
    channel: int | None = None
    accuracy: float | None = None
    float_accuracy: float | None = None

    @property
    def is_share(self) -> bool:
        """Whether it is a share of right answers, and not an error."""
        return "accuracy" in self.measure

    @property
    def _sign(self) -> float:
        return 1.0 if self.is_share else -1.0

    @property
    def gained(self) -> float:
        """What float gains over the guess."""
        return self._sign * (self.float_value - self.guess)

    @property
    def is_guess(self) -> bool:
        """Whether neither file nor float are better than the guess, as many labels show."""
        span = 1.0 if self.perfect is None else abs(self.perfect - self.guess)
        best = self.gained - min(self.lost, 0.0)
        return not self.tells and (best <= 0 or self.by_chance <= CLEAR * span)

    @property
    def tells(self) -> bool:
        """Whether file or float are better than the guess by more than chance explains."""
        best = self.gained - min(self.lost, 0.0)
        return best > self.by_chance or self.value == self.perfect

    @property
    def lost(self) -> float:
        """What the file loses against float."""
        return self._sign * (self.float_value - self.value)

    @property
    def lost_points(self) -> float | None:
        """The loss as a share of all answers, or of the error of the guess."""
        if self.is_share:
            return self.lost
        if self.perfect is None or self.guess <= self.perfect:
            return None
        return self.lost / (self.guess - self.perfect)

    @property
    def lost_gain(self) -> float:
        """The loss as a share of what float gains over the guess."""
        return self.lost / self.gained if self.gained > 0 else 0.0

    def __str__(self) -> str:
        form = ".2%" if self.is_share else ".4g"
        where = "" if self.channel is None else f" of channel {self.channel}"
        return f"{self.measure}{where} {self.value:{form}}, in float {self.float_value:{form}}"


def score(
    name: str,
    labels: Labels,
    exact: np.ndarray,
    values: np.ndarray,
    gates: bool,
    inputs: list[np.ndarray],
) -> Score | None:
    """Returns how well the file and the model in float meet the labels; None if that is not known.

    Args:
        name: the output's name.
        labels: the labels.
        exact: the output that the model computes in float.
        values: the output of the file.
        gates: whether a sigmoid computes it.
        inputs: the examples.

    Raises:
        ValueError: if labels are neither classes nor targets, nor what the model's loss takes.
    """
    if labels.kind == "classes":
        return _of_classes(labels, exact, values)
    if labels.kind == "decisions":
        return _of_decisions(labels.values, exact, values, gates, labels.loss)
    if labels.kind == "neighbours":
        classes = labels.values[:MOST_NEIGHBOURS]
        right, float_right = (
            nearest_labels(y[:MOST_NEIGHBOURS].astype(np.float64), classes) == classes
            for y in (values, exact)
        )
        return _of_right(classes, right, float_right, "accuracy of the nearest neighbour")
    if labels.kind == "values":
        return _of_values(labels, exact, values, inputs)
    result = _of_own_loss(labels, exact, values)
    if result is None:
        raise ValueError(
            f"The labels of '{name}' have the shape {labels.values.shape}, but the output has "
            f"{exact.shape}. Pass classes or targets, or compile the model with a loss that "
            f"computes an error for each example from these labels."
        )
    return result


def _of_classes(labels: Labels, exact: np.ndarray, values: np.ndarray) -> Score | None:
    truth = labels.values
    if exact.dtype.kind in "iub":
        here, there = values.astype(truth.dtype), exact
    else:
        here, there = values.argmax(-1), exact.argmax(-1)
    if labels.is_counted is not None:
        truth, here, there = (y[labels.is_counted] for y in (truth, here, there))
    if not truth.size:
        return None
    return _of_right(truth, here == truth, there == truth)


def _of_decisions(
    truth: np.ndarray,
    exact: np.ndarray,
    values: np.ndarray,
    gates: bool,
    loss: CompiledLoss | None,
) -> Score:
    """Scores answers of yes and no, by the middle of a sigmoid, or zero for logits.

    Without a loss nobody knows whether an output without a sigmoid is a logit, or was trained to
    be 0 or 1: the limit at which the model in float is right more often is taken.
    """
    is_known = gates or (loss is not None and loss.kind != "custom")
    limits = [0.5 if gates else 0.0] if is_known else [0.0, 0.5]
    limit = max(limits, key=lambda limit: np.mean((exact > limit) == truth))
    return _of_right(truth, (values > limit) == truth, (exact > limit) == truth)


def _of_right(
    truth: np.ndarray,
    right: np.ndarray,
    float_right: np.ndarray,
    measure: str = "accuracy",
) -> Score:
    """Scores right answers. If the most frequent one is right as often, each class counts alike."""
    accuracy, float_accuracy = float(right.mean()), float(float_right.mean())
    here, there = (y.astype(np.float64) for y in (right, float_right))
    guess = most_frequent(truth) / truth.size
    classes, inverse, counts = np.unique(truth, return_inverse=True, return_counts=True)
    if float_accuracy <= guess and len(classes) > 1:
        weights = (truth.size / len(classes) / counts)[inverse].reshape(truth.shape)
        here, there, guess = here * weights, there * weights, 1 / len(classes)
        measure = f"balanced {measure}"
    here, there = (y.reshape(len(y), -1).mean(-1) for y in (here, there))
    return Score(
        measure,
        float(here.mean()),
        float(there.mean()),
        float(guess),
        1.0,
        _chance(there - here),
        len(here),
        _chance(there),
        None,
        accuracy,
        float_accuracy,
    )


def _chance(differences: np.ndarray) -> float:
    """Returns the mean of differences that chance explains; infinity for a single one."""
    if len(differences) < 2:
        return float("inf")
    return float(DEVIATIONS * differences.std(ddof=1) / len(differences) ** 0.5)


def _of_values(
    labels: Labels, exact: np.ndarray, values: np.ndarray, inputs: list[np.ndarray]
) -> Score | None:
    truth = labels.values
    errors: Callable[[np.ndarray, np.ndarray], np.ndarray | None] = _squared_errors
    measure = "mean squared error"
    if labels.loss is not None and labels.loss.kind in ("values", "custom"):
        own = labels.loss.per_example
        if own(truth, exact) is not None:
            errors, measure = own, labels.loss.name.replace("_", " ")
    overall = _of_errors(measure, errors, truth, exact, values, inputs)
    channels = truth.shape[-1] if truth.ndim > 1 else 1
    if overall is None or not 1 < channels <= MOST_CHANNELS:
        return overall
    of_channels = []
    for channel in range(channels):
        truth_, exact_, values_ = (y[..., channel] for y in (truth, exact, values))
        of_inputs = [x[..., channel] for x in inputs if x.shape == truth.shape]
        part = _of_errors("mean squared error", _squared_errors, truth_, exact_, values_, of_inputs)
        if part is not None:
            of_channels.append(dataclasses.replace(part, channel=channel))
    worst = max(of_channels, key=lambda part: part.lost_points or 0.0, default=overall)
    return worst if _is_worse(worst, overall) else overall


def _is_worse(channel: Score, overall: Score) -> bool:
    """Whether a channel loses more than chance explains, and than the output does."""
    lost, all_lost = channel.lost_points, overall.lost_points
    return lost is not None and channel.lost > channel.chance and lost > (all_lost or 0.0)


def _squared_errors(truth: np.ndarray, values: np.ndarray) -> np.ndarray:
    differences = np.asarray(values, np.float64) - truth
    return np.square(differences).reshape(len(truth), -1).mean(-1)


def _of_errors(
    measure: str,
    errors: Callable[[np.ndarray, np.ndarray], np.ndarray | None],
    truth: np.ndarray,
    exact: np.ndarray,
    values: np.ndarray,
    inputs: list[np.ndarray],
) -> Score | None:
    count = len(truth)
    mean = truth.mean(0, keepdims=True) if count > 1 else truth.mean()
    answers = [values.reshape(truth.shape), exact, np.broadcast_to(mean, truth.shape), truth]
    computed = [errors(truth, answer.astype(np.float32)) for answer in answers]
    if any(part is None for part in computed):
        return None
    here, there, guessed, perfect = (np.asarray(part) for part in computed)
    guess = float(guessed.mean())
    if count > 1:  # Each example was part of the mean.
        guess *= (count / (count - 1)) ** 2
    for x in inputs:  # A network that cleans its input has to be better than the input.
        unchanged = errors(truth, x.astype(np.float32)) if x.shape == truth.shape else None
        if unchanged is not None and there.mean() < unchanged.mean() < guess:
            guess = float(unchanged.mean())
    chance = _chance(here - there)
    if count == 1 and truth.size > 1:  # The entries of a single example stand for many.
        chance = _chance(np.square(values - truth).ravel() - np.square(exact - truth).ravel())
    return Score(
        measure,
        float(here.mean()),
        float(there.mean()),
        guess,
        float(perfect.mean()),
        chance,
        count,
        _chance(guessed - there),
    )


def _of_own_loss(labels: Labels, exact: np.ndarray, values: np.ndarray) -> Score | None:
    """Scores by a user's own loss. A guess is what the model says of another example."""
    if labels.loss is None:
        return None
    others = np.roll(exact, 1, axis=0)
    computed = [labels.loss.per_example(labels.values, y) for y in (values, exact, others)]
    if any(part is None for part in computed):
        return None
    here, there, guessed = (np.asarray(part) for part in computed)
    return Score(
        labels.loss.name.replace("_", " "),
        float(here.mean()),
        float(there.mean()),
        float(guessed.mean()),
        None,
        _chance(here - there),
        len(here),
        _chance(guessed - there),
    )
