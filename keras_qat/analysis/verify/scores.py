"""Computes how well an output matches its labels: an accuracy or an error.

A guess is the best answer that ignores the input, such as the most frequent class or the mean
target. The gain is the improvement of the float model over the guess, in accuracy or error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from keras_qat.analysis.verify.labels import (
    MOST_NEIGHBOURS,
    Labels,
    count_most_frequent,
    find_nearest_labels,
)
from keras_qat.keras2.losses import CompiledLoss

MOST_CHANNELS = 100
"""If a regression output has at most this many channels, each is also scored separately."""

CLEAR = 0.15
"""Maximum uncertainty of the gain, to call a model no better than a guess. The unit is the gain of
a perfect model."""

DEVIATIONS = 2.0
"""Differences of up to this many standard errors may be due to chance."""

MSE = "mean squared error"

Errors = Callable[[NDArray, NDArray], NDArray | None]
"""A function `(labels, predictions)` that returns each example's error, or None if it fails."""


@dataclasses.dataclass(frozen=True)
class Score:
    """How well the file and the float model match the labels of an output.

    Args:
        measure: the quantity: "accuracy", "accuracy of the nearest neighbour", or an error.
        value: the file's accuracy or error.
        float_value: the float model's accuracy or error.
        guess: the accuracy or error of the best answer that ignores the input, such as the most
            frequent class.
        perfect: the accuracy or error of a model that is always right. None if unknown.
        chance: uncertainty of the difference between file and float model (two standard errors).
        examples: number of examples with labels.
        by_chance: uncertainty of the difference between float model and guess.
        channel: the index of the channel that is scored, because it loses most. None if all
            channels are scored together.
        accuracy: the file's share of right answers. None if errors are measured.
        float_accuracy: the float model's share of right answers.
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
        """Whether the score is an accuracy. Otherwise, it is an error."""
        return "accuracy" in self.measure

    @property
    def _sign(self) -> float:
        return 1.0 if self.is_share else -1.0

    @property
    def gained(self) -> float:
        """The gain: by how much the float model is better than `guess`."""
        return self._sign * (self.float_value - self.guess)

    @property
    def is_guess(self) -> bool:
        """Whether neither the file nor the float model is better than a guess. See `CLEAR`."""
        span = 1.0 if self.perfect is None else abs(self.perfect - self.guess)
        best = self.gained - min(self.lost, 0.0)
        return not self.tells and (best <= 0 or self.by_chance <= CLEAR * span)

    @property
    def tells(self) -> bool:
        """Whether the file or the float model is significantly better than `guess`."""
        best = self.gained - min(self.lost, 0.0)
        return best > self.by_chance or self.value == self.perfect

    @property
    def lost(self) -> float:
        """By how much the file is worse than the float model."""
        return self._sign * (self.float_value - self.value)

    @property
    def lost_points(self) -> float | None:
        """The loss of accuracy. For an error, the loss divided by the gain of a perfect model."""
        if self.is_share:
            return self.lost
        if self.perfect is None or self.guess <= self.perfect:
            return None
        return self.lost / (self.guess - self.perfect)

    @property
    def lost_gain(self) -> float:
        """`lost / gained`: 0.1 means that quantization loses 10 % of the gain over the guess."""
        return self.lost / self.gained if self.gained > 0 else 0.0

    def __str__(self) -> str:
        form = ".2%" if self.is_share else ".4g"
        channel = "" if self.channel is None else f" of channel {self.channel}"
        return f"{self.measure}{channel} {self.value:{form}}, in float {self.float_value:{form}}"


def score_output(
    name: str,
    labels: Labels,
    exact: NDArray,
    values: NDArray,
    has_sigmoid: bool,
    inputs: list[NDArray],
) -> Score | None:
    """Returns how well an output matches its labels, in the float model and in the file."""
    truth = labels.values
    if labels.kind == "classes":
        return _score_classes(labels, exact, values)
    if labels.kind == "decisions":
        return _score_decisions(truth, exact, values, has_sigmoid, labels.loss)
    if labels.kind == "neighbours":
        classes = truth[:MOST_NEIGHBOURS]
        right, float_right = (
            find_nearest_labels(y[:MOST_NEIGHBOURS].astype(np.float64), classes) == classes
            for y in (values, exact)
        )
        return _score_answers(classes, right, float_right, "accuracy of the nearest neighbour")
    if labels.kind == "values":
        return _score_values(labels, exact, values, inputs)
    result = _score_custom_loss(labels, exact, values)
    if result is None:
        raise ValueError(
            f"The labels of '{name}' have the shape {truth.shape}, but the output has "
            f"{exact.shape}. Pass classes or targets, or compile the model with a loss that "
            f"computes an error for each example from these labels."
        )
    return result


def _score_classes(labels: Labels, exact: NDArray, values: NDArray) -> Score | None:
    truth = labels.values
    if exact.dtype.kind in "iub":
        in_file, in_float = values.astype(truth.dtype), exact
    else:
        in_file, in_float = values.argmax(-1), exact.argmax(-1)
    if labels.is_counted is not None:
        truth, in_file, in_float = (y[labels.is_counted] for y in (truth, in_file, in_float))
    if not truth.size:
        return None
    return _score_answers(truth, in_file == truth, in_float == truth)


def _score_decisions(
    truth: NDArray, exact: NDArray, values: NDArray, has_sigmoid: bool, loss: CompiledLoss | None
) -> Score:
    """Score yes-or-no answers. The threshold is 0.5 for a sigmoid, or 0 for logits.

    If it is unknown whether an output holds logits, both thresholds are tried. The one with the
    higher accuracy of the float model is used.
    """
    is_known = has_sigmoid or (loss is not None and loss.kind != "custom")
    limits = [0.5 if has_sigmoid else 0.0] if is_known else [0.0, 0.5]
    limit = max(limits, key=lambda limit: np.mean((exact > limit) == truth))
    return _score_answers(truth, (values > limit) == truth, (exact > limit) == truth)


def _score_answers(
    truth: NDArray, right: NDArray, float_right: NDArray, measure: str = "accuracy"
) -> Score:
    """Score right answers by their share, the accuracy.

    If always guessing the most frequent class is as accurate, use the balanced accuracy.
    """
    accuracy, float_accuracy = float(right.mean()), float(float_right.mean())
    in_file, in_float = (y.astype(np.float64) for y in (right, float_right))
    guess = count_most_frequent(truth) / truth.size
    classes, inverse, counts = np.unique(truth, return_inverse=True, return_counts=True)
    if float_accuracy <= guess and len(classes) > 1:
        weights = (truth.size / len(classes) / counts)[inverse].reshape(truth.shape)
        in_file, in_float, guess = in_file * weights, in_float * weights, 1 / len(classes)
        measure = f"balanced {measure}"
    in_file, in_float = (y.reshape(len(y), -1).mean(-1) for y in (in_file, in_float))
    return Score(
        *(measure, float(in_file.mean()), float(in_float.mean()), float(guess), 1.0),
        *(_bound_chance(in_float - in_file), len(in_file), _bound_chance(in_float)),
        accuracy=accuracy,
        float_accuracy=float_accuracy,
    )


def _bound_chance(differences: NDArray) -> float:
    """Return how large the mean of `differences` may be by chance."""
    if len(differences) < 2:
        return float("inf")
    return float(DEVIATIONS * differences.std(ddof=1) / len(differences) ** 0.5)


def _score_values(
    labels: Labels, exact: NDArray, values: NDArray, inputs: list[NDArray]
) -> Score | None:
    truth = labels.values
    errors: Errors = _compute_squared_errors
    measure = MSE
    if labels.loss is not None and labels.loss.kind in ("values", "custom"):
        compiled = labels.loss.per_example
        if compiled(truth, exact) is not None:
            errors, measure = compiled, labels.loss.name.replace("_", " ")
    overall = _score_errors(measure, errors, [truth, exact, values], inputs)
    channels = truth.shape[-1] if truth.ndim > 1 else 1
    if overall is None or not 1 < channels <= MOST_CHANNELS:
        return overall
    scores = []
    for channel in range(channels):
        of_channel = [y[..., channel] for y in (truth, exact, values)]
        own_inputs = [x[..., channel] for x in inputs if x.shape == truth.shape]
        score = _score_errors(MSE, _compute_squared_errors, of_channel, own_inputs)
        if score is not None:
            scores.append(dataclasses.replace(score, channel=channel))
    worst = max(scores, key=lambda score: score.lost_points or 0.0, default=overall)
    is_clear = worst.lost_points is not None and worst.lost > worst.chance
    is_worse = is_clear and (worst.lost_points or 0.0) > (overall.lost_points or 0.0)
    return worst if is_worse else overall


def _compute_squared_errors(truth: NDArray, values: NDArray) -> NDArray:
    differences = np.asarray(values, np.float64) - truth
    return np.square(differences).reshape(len(truth), -1).mean(-1)


def _score_errors(
    measure: str, errors: Errors, arrays: Sequence[NDArray], inputs: list[NDArray]
) -> Score | None:
    """Score by errors. `arrays` is `[targets, outputs of the float model, outputs of the file]`."""
    truth, exact, values = arrays
    count = len(truth)
    mean = truth.mean(0, keepdims=True) if count > 1 else truth.mean()
    answers = [values.reshape(truth.shape), exact, np.broadcast_to(mean, truth.shape), truth]
    computed = [errors(truth, answer.astype(np.float32)) for answer in answers]
    if any(error is None for error in computed):
        return None
    in_file, in_float, guessed, perfect = (np.asarray(error) for error in computed)
    guess = float(guessed.mean())
    if count > 1:  # Each example contributes to the mean.
        guess *= (count / (count - 1)) ** 2
    for x in inputs:  # The guess of a denoiser is its input.
        unchanged = errors(truth, x.astype(np.float32)) if x.shape == truth.shape else None
        if unchanged is not None and in_float.mean() < unchanged.mean() < guess:
            guess = float(unchanged.mean())
    score = _compare_errors(measure, in_file, in_float, guessed)
    score = dataclasses.replace(score, guess=guess, perfect=float(perfect.mean()))
    if count == 1 and truth.size > 1:  # With a single example, its entries count as examples.
        squares = np.square(values - truth).ravel() - np.square(exact - truth).ravel()
        score = dataclasses.replace(score, chance=_bound_chance(squares))
    return score


def _compare_errors(measure: str, in_file: NDArray, in_float: NDArray, guessed: NDArray) -> Score:
    """Create a score from the errors of each example in the file, the float model and a guess."""
    means = float(in_file.mean()), float(in_float.mean()), float(guessed.mean())
    chance, by_chance = _bound_chance(in_file - in_float), _bound_chance(guessed - in_float)
    return Score(measure, *means, None, chance, len(in_file), by_chance)


def _score_custom_loss(labels: Labels, exact: NDArray, values: NDArray) -> Score | None:
    """Score by a custom loss. The guess is the float model's output for the previous example."""
    if labels.loss is None:
        return None
    others = np.roll(exact, 1, axis=0)
    computed = [labels.loss.per_example(labels.values, y) for y in (values, exact, others)]
    if any(error is None for error in computed):
        return None
    return _compare_errors(labels.loss.name.replace("_", " "), *map(np.asarray, computed))
