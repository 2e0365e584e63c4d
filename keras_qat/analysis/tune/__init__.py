"""`tune`: tries ways to quantize a model until the accuracy drops by no more than allowed."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import tempfile
from collections.abc import Callable
from operator import le
from pathlib import Path
from typing import Any

import numpy as np

from keras_qat.analysis.tune.build import Builder, Data, Settings, read_data
from keras_qat.analysis.tune.score import Judge, Metric
from keras_qat.analysis.tune.search import Attempt, Search, climb, shrink
from keras_qat.config.recipe import Recipe
from keras_qat.config.targets import Target
from keras_qat.config.targets.target import settings as read_settings
from keras_qat.export import export_tflite
from keras_qat.keras2.backend import keras, one_at_a_time
from keras_qat.rewriting.quantized_model import QuantizedModel
from keras_qat.training.schedule import is_quantized

__all__ = ["Attempt", "TuneResult", "tune"]


@dataclasses.dataclass(frozen=True)
class TuneResult:
    """The result of `tune`. Prints as a table of attempts.

    Args:
        model: the best quantized model. It is calibrated or trained, but not compiled.
        attempts: all attempts and skipped steps, in order.
        best: the attempt that created `model`.
        metric: the name of the metric.
        float_value: the float model's metric.
        max_drop: the allowed drop of the metric, in points. The table calls it the budget.
        interrupted: whether Ctrl-C ended the search early.
        directory: the directory with the models of all attempts.
        describe: a function that formats a value of the metric, such as 0.9 as "90.00 %".
        temporary: a `tempfile.TemporaryDirectory`, which is deleted together with this result. None
            if you passed `directory`.
    """

    model: QuantizedModel
    attempts: tuple[Attempt, ...]
    best: Attempt
    metric: str
    float_value: float
    max_drop: float
    interrupted: bool
    directory: str
    describe: Callable[[float], str] = dataclasses.field(repr=False, default=str)
    temporary: Any = dataclasses.field(repr=False, default=None)

    @property
    def is_met(self) -> bool:
        """Whether the metric of the best model drops by at most `max_drop`."""
        return self.best.drop is not None and self.best.drop <= self.max_drop

    @property
    def smallest(self) -> tuple[Attempt, ...]:
        """The best compromises of drop, file size and TFLite Micro memory (the Pareto front).

        No other attempt is better in one of these three without being worse in another. The
        smallest file comes first.
        """
        made = [a for a in reversed(self.attempts) if a.drop is not None]
        by_cost = {(a.size or 0, a.drop or 0.0, a.arena or 0): a for a in made}
        beaten = [a for a in by_cost for b in by_cost if a != b and all(map(le, b, a))]
        return tuple(by_cost[cost] for cost in sorted(by_cost.keys() - beaten))

    def export(self, path: str | os.PathLike[str], **options: Any) -> bytes:
        """Writes the best model to a TFLite file, as `export_tflite` does."""
        return export_tflite(self.model, path, **options)

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as JSON data."""
        return {
            "metric": self.metric,
            "float": self.float_value,
            "max_drop": self.max_drop,
            "is_met": self.is_met,
            "interrupted": self.interrupted,
            "best": dataclasses.asdict(self.best),
            "attempts": [dataclasses.asdict(attempt) for attempt in self.attempts],
        }

    def __str__(self) -> str:
        budget = f"allowed drop {self.max_drop:g} points"
        lines = [f"{self.metric}: {self.describe(self.float_value)} in float, {budget}"]
        lines.append(f"{'value':>9}{'drop':>8}{'±':>6}{'bytes':>10}{'s':>6}  step")
        lines += [attempt.format(self.describe) for attempt in self.attempts]
        verdict = "within the budget" if self.is_met else "NOT within the budget"
        lines.append(f"Best: {self.best.settings}: drop {self.best.drop:.2f} points, {verdict}.")
        return "\n".join(lines)


@one_at_a_time
def tune(
    model: keras.Model,
    train: object,
    validation: object,
    *,
    max_drop: float = 0.5,
    metric: Metric | None = None,
    target: str | Target | None = None,
    recipe: str | Recipe | None = None,
    minutes: float = 10,
    max_size: int | None = None,
    min_bits: int | None = None,
    directory: str | os.PathLike[str] | None = None,
    seed: int = 0,
    verbose: int = 1,
) -> TuneResult:
    """Finds the simplest way to quantize a model without losing more accuracy than allowed.

    It tries these steps in order, until the metric drops by at most `max_drop`:

    1. `calibrate`.
    2. `bias_correction`.
    3. `calibrate` with other methods.
    4. If an output concatenates tensors: a file that returns these tensors instead.
    5. `learn_rounding`.
    6. Sensitive layers in float.
    7. Training.
    8. 16-bit activations.

    Each attempt is scored on the validation data, with the integer outputs of the exported file.

    Args:
        model: a float model, as for `quantize_model`. It is not changed.
        train: training data: `(x, y)` or `x` as arrays, a `tf.data.Dataset`, or a
            `keras.utils.Sequence`. Without labels, the float model's outputs are the targets.
        validation: data of the same type as `train`, but with other examples. Without labels, the
            score is the agreement with the float model's outputs.
        max_drop: the allowed drop of the metric in points. With 0.5, an accuracy of 90.0 % may drop
            to 89.5 %. For a metric that is not between 0 and 1, it is a percentage of the float
            model's value.
        metric: a function `metric(labels, predictions)`. Better predictions must return larger
            values. The default is the first metric of the compiled model, or its loss.
        target: the device or runtime for the file, as in `quantize_model`.
        recipe: the recipe for the first step; by default the target's, or "int8".
        minutes: after this time, no new step starts and a training stops early. A second call with
            the same `directory` repeats a training that was stopped.
        max_size: maximum size of the file in bytes. With it, `tune` also tries 4-bit weights. It
            returns the attempt with the smallest drop among files of at most this size.
        min_bits: minimum bits of weights, 4 or 8. With 4, `tune` also tries 4-bit weights and
            returns the smallest file with an allowed drop.
        directory: where to save the model of each attempt. A second call with the same arguments
            reuses these attempts. The default is a temporary directory.
        seed: the seed for training and for learned rounding.
        verbose: 1 prints each attempt.

    Returns:
        The best model and a table of attempts. Ctrl-C returns the best model so far.

    Raises:
        ValueError: if the model is already quantized, an argument is out of range, or there is no
            metric for the labels. Also if most validation examples are training examples.

    Example:
        >>> result = keras_qat.tune(model, (x_train, y_train), (x_test, y_test), max_drop=0.5)
        >>> print(result)
        >>> result.export("model.tflite")
    """
    if is_quantized(model):
        raise ValueError(f"'{model.name}' is quantized already: pass the float model to tune.")
    if not max_drop >= 0:
        raise ValueError(
            f"max_drop={max_drop}: pass the allowed drop in points, 0 or more, such as 0.5."
        )
    if not minutes > 0:
        raise ValueError(f"minutes={minutes}: pass a positive number of minutes, such as 10.")
    if max_size is not None and max_size <= 0:
        raise ValueError(f"max_size={max_size}: pass a file size in bytes that is greater than 0.")
    if min_bits not in (None, 4, 8):
        raise ValueError(f"min_bits={min_bits}: pass 4 or 8. Files store 5 to 7 bits as 8 bits.")
    train_data, held_out = read_data(model, train), read_data(model, validation)
    _check_held_out(train_data, held_out)
    chosen, _, known_target = read_settings(recipe, None, target)
    judge = Judge(model, held_out.x, held_out.y, metric)
    builder = Builder(model, known_target, train_data, judge, seed, minutes)
    temporary = None if directory else tempfile.TemporaryDirectory(prefix="keras_qat_tune_")
    folder = Path(temporary.name if temporary else os.fspath(directory or ""))
    folder.mkdir(parents=True, exist_ok=True)
    identity = _identify_search(builder, held_out, judge.name)
    search = Search(builder, Settings(chosen), max_drop, folder, identity, verbose)
    interrupted = False
    try:
        climb(search)
        if max_size is not None or (min_bits or 8) < 8:
            shrink(search, max_size)
    except KeyboardInterrupt:
        interrupted = True
    if search.best_score is None:
        raise KeyboardInterrupt("tune was interrupted before its first attempt ended.")
    best = search.choose(max_size, smallest=min_bits is not None)
    return TuneResult(
        search.load(best), tuple(search.attempts), best, judge.name, judge.float_value, max_drop,
        interrupted, str(folder), judge.describe, temporary,
    )  # fmt: skip


def _check_held_out(train: Data, held_out: Data) -> None:
    seen, examples = set(_hash_examples(train)), _hash_examples(held_out)
    same, count = sum(example in seen for example in examples), len(examples)
    if 2 * same > count:
        raise ValueError(
            f"{same} of {count} validation examples are also in the training data, so they cannot "
            f"judge the result. Pass other data as validation."
        )


def _hash_examples(data: Data) -> list[int]:
    examples = zip(*data.x, strict=True)
    return [hash(b"".join(np.asarray(x).tobytes() for x in example)) for example in examples]


def _identify_search(builder: Builder, held_out: Data, metric: str) -> str:
    """Return a hash that names the files of this search, to find them in a later call."""
    arrays = [x for data in (builder.train, held_out) for x in (*data.x, *(data.y or ()))]
    target = builder.target and builder.target.name
    digest = hashlib.sha256(repr((builder.model.name, target, metric, builder.seed)).encode())
    for array in (*builder.model.get_weights(), *arrays):
        digest.update(repr((array.dtype, array.shape)).encode())
        is_text = array.dtype == object
        digest.update(repr(array.tolist()).encode() if is_text else array.tobytes())
    return digest.hexdigest()
