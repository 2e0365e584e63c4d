"""The search of `tune`: tries settings in order, and saves each result in a directory.

An attempt quantizes the model with certain settings, and scores the result. The budget is the
allowed drop of the metric.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from keras_qat.analysis.diagnose import diagnose
from keras_qat.analysis.plan import plan
from keras_qat.analysis.tune.build import Builder, Settings
from keras_qat.analysis.tune.score import Score
from keras_qat.config import recipes
from keras_qat.export import export_tflite
from keras_qat.io.atomic_files import write_contents
from keras_qat.keras2.backend import keras
from keras_qat.messages import silent
from keras_qat.rewriting.quantized_model import QuantizedModel
from keras_qat.tflite.interpreter import Refusal
from keras_qat.tflite.micro_interpreter import MicroInterpreter

EPOCHS = 5
ENOUGH = 256
"""Training without labels needs at least this many examples. `diagnose` reads at most this many."""

DROP, SIZE = attrgetter("drop"), attrgetter("size")

NOTABLE = 0.5
"""An attempt with about the same metric is better if its SQNR is higher by this many dB."""


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One line of the table that `tune` prints.

    Args:
        step: the name of the step.
        settings: the functions that were called, such as "calibrate, bias_correction".
        value: the metric. None if the step was skipped.
        drop: how much worse the metric is than the float model's, in points. None if skipped.
        margin: uncertainty of the drop: the 95 % confidence interval is `drop` ± `margin`.
        size: bytes of the file. None if the step was skipped.
        arena: bytes of memory that TFLite Micro needs. None for other runtimes, or if it cannot run
            the file.
        seconds: duration of the attempt.
        outcome: "kept", "kept: " and a reason, "not better", "smaller", or why it was skipped.
    """

    step: str
    settings: str
    value: float | None = None
    drop: float | None = None
    margin: float | None = None
    size: int | None = None
    arena: int | None = None
    seconds: float = 0.0
    outcome: str = ""

    def format(self, show: Callable[[float], str]) -> str:
        """Return the line of the table. `show` formats the metric, such as 0.9 as "90.00 %"."""
        if self.value is None:
            return f"{'-':>9}{'':>30}  {self.step}: skipped: {self.outcome}"
        margin = "" if self.margin is None else f"{self.margin:.2f}"
        return (
            f"{show(self.value):>9}{self.drop:8.2f}{margin:>6}{self.size:10}{self.seconds:6.0f}  "
            f"{self.step}: {self.settings} ({self.outcome})"
        )


class Search:
    """The state of a search: the best settings so far, and all attempts.

    Args:
        builder: creates models from settings.
        first: the settings of the first attempt.
        max_drop: allowed drop of the metric, in points.
        directory: where attempts are saved.
        identity: a hash of the model, the data and the arguments. Names of files depend on it.
        verbose: 1 prints each attempt. A terminal also shows the current attempt while it runs.
    """

    def __init__(
        self,
        builder: Builder,
        first: Settings,
        max_drop: float,
        directory: Path,
        identity: str,
        verbose: int,
    ) -> None:
        self.builder, self.first, self.max_drop = builder, first, max_drop
        self.model, self.target = builder.model, builder.target
        self.directory, self.identity, self.verbose = directory, identity, verbose
        self.shows_progress = bool(verbose) and sys.stdout.isatty()
        self.attempts: list[Attempt] = []
        self.best = first
        self.best_score: Score | None = None
        self.best_attempt: Any = None
        self._saved: dict[Attempt, Path] = {}

    @functools.cached_property
    def concatenated_tensors(self) -> tuple[str, ...]:
        """Names of tensors that the model concatenates to an output, such as boxes and scores.

        Concatenated tensors share one range. The file is more accurate if it returns them
        separately.
        """
        found = plan(self.model, self.first.recipe, target=self.target).joined_outputs
        return tuple(part for joined in found for part in joined.parts)

    @property
    def is_met(self) -> bool:
        return self.best_score is not None and self.best_score.drop <= self.max_drop

    @property
    def is_late(self) -> bool:
        """Whether the time is used up. The first attempt always runs."""
        return bool(self._saved) and time.monotonic() > self.builder.deadline

    def load(self, attempt: Attempt) -> QuantizedModel:
        return keras.models.load_model(self._saved[attempt], compile=False)

    def skip(self, step: str, reason: str) -> None:
        self._record(Attempt(step, "", outcome=reason))

    def attempt(self, step: str, settings: Settings, outcome: str = "") -> Attempt:
        """Build, score and save a model. If an earlier call of `tune` saved the result, read it.

        Args:
            step: the name of the step.
            settings: how to quantize the model.
            outcome: a word for the table, such as "smaller". By default, "kept" or "not better".
        """
        self._show_progress(step, settings)
        start = time.monotonic()
        key = hashlib.sha256(f"{self.identity}{settings!r}".encode()).hexdigest()[:16]
        model_path, data_path = self.directory / f"{key}.keras", self.directory / f"{key}.json"
        if data_path.exists():
            figures = json.loads(data_path.read_text("utf-8"))
        else:
            with silent(), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                qat = self.builder.build(settings)
                score, contents = self.builder.judge.score(qat), export_tflite(qat)
                qat.save(model_path)
            seconds = round(time.monotonic() - start, 1)
            arena = _measure_arena(qat, contents)
            figures = {"score": score, "size": len(contents), "arena": arena, "seconds": seconds}
            if not self.builder.is_cut_short:  # A second call repeats training that was cut short.
                write_contents(json.dumps(figures), data_path)
        score = Score(*figures.pop("score"))
        outcome = outcome or self._compare(score, settings)
        margin = score.margin if np.isfinite(score.margin) else None
        scored = settings.describe(), score.value, score.drop, margin
        attempt = Attempt(step, *scored, outcome=outcome, **figures)
        self._saved[attempt] = model_path
        if outcome.startswith("kept"):
            self.best, self.best_score, self.best_attempt = settings, score, attempt
        self._record(attempt)
        return attempt

    def choose(self, max_size: int | None, smallest: bool) -> Attempt:
        """Return the attempt that `tune` returns to the user.

        Args:
            max_size: maximum size of the file in bytes, or None.
            smallest: True for the smallest file within the budget. False for the first one.
        """
        attempts: list[Any] = list(self._saved)
        if max_size is not None:
            fitting = [a for a in attempts if a.size <= max_size]
            return min(fitting, key=DROP) if fitting else min(attempts, key=SIZE)
        within = [a for a in attempts if a.drop <= self.max_drop]
        if not within:
            return min(attempts, key=DROP)
        return min(within, key=SIZE) if smallest else within[0]

    def _compare(self, score: Score, settings: Settings) -> str:
        """Return "kept" (or "kept: " and a reason) for the best attempt so far, or "not better"."""
        best = self.best_score
        if best is None:
            return "kept"
        if score.drop <= self.max_drop < best.drop:
            return "kept: within the budget"
        is_noise = abs(score.drop - best.drop) <= min(max(score.margin, best.margin), 100.0)
        if is_noise and not settings.epochs:
            if score.noise > best.noise + NOTABLE:
                return "kept: nearer to float, and the metric differs only by noise"
            return "not better"
        return "kept" if score.drop < best.drop else "not better"

    def _show_progress(self, step: str, settings: Settings) -> None:
        builder, score = self.builder, self.best_score
        used = 1 - (builder.deadline - time.monotonic()) / (60 * builder.minutes)
        best = "" if score is None else f", best {builder.judge.describe(score.value)}"
        line = f"[{'=' * min(10, round(10 * used)):10}] {step}: {settings.describe()}{best}"
        if self.shows_progress:
            print(line[: shutil.get_terminal_size().columns - 1], end="", flush=True)

    def _record(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)
        if self.shows_progress:
            print("\r\033[K", end="")
        if self.verbose:
            print(attempt.format(self.builder.judge.describe), flush=True)


def _measure_arena(qat: QuantizedModel, contents: bytes) -> int | None:
    if qat.kernels != MicroInterpreter.kernels:
        return None
    with contextlib.suppress(ImportError, Refusal, ValueError):
        return MicroInterpreter(contents).arena_size()
    return None


Propose = Callable[[Search], Iterable[Settings]]


@dataclasses.dataclass(frozen=True)
class Rung:
    """One step of `tune`.

    Args:
        name: its name in the table.
        propose: function that returns the settings to try.
        find_obstacle: function that returns why to skip the step, or "" to try it.
    """

    name: str
    propose: Propose
    find_obstacle: Callable[[Search], str] = lambda _: ""


def _change(*changes: dict[str, Any]) -> Propose:
    """Return a function that changes fields of the best settings, once for each of `changes`."""
    return lambda search: [dataclasses.replace(search.best, **change) for change in changes]


def _explain_outputs(search: Search) -> str:
    return "" if search.concatenated_tensors else "no output is concatenated from different tensors"


def _explain_training(search: Search) -> str:
    train = search.builder.train
    is_enough = train.y is not None or len(train.x[0]) >= ENOUGH
    return "" if is_enough else "train holds neither labels nor enough examples"


def _explain_rounding(search: Search) -> str:
    recipe = search.best.recipe
    bits = [recipe.weights.bits, *(override.weight_bits or 8 for override in recipe.overrides)]
    return "" if min(bits) < 8 else "learned rounding hardly improves weights of 8 bits"


def _explain_float(search: Search) -> str:
    target = search.target
    return f"{target.title} cannot compute in float" if target and not target.has_float else ""


def _explain_16_bits(search: Search) -> str:
    target, name = search.target, search.best.recipe.name
    if name != "int8":
        return f"there is no {name} recipe with 16-bit activations"
    return f"{target.title} has no 16-bit activations" if target and not target.has_int16 else ""


def _end_before_outputs(search: Search) -> list[Settings]:
    return [dataclasses.replace(search.best, outputs=search.concatenated_tensors)]


def _spare_layers(search: Search) -> Iterator[Settings]:
    """Propose to keep the most sensitive layer in float, and then several sensitive layers."""
    base, x = search.best, search.builder.train.take(ENOUGH)
    layers = list(diagnose(search.load(search.best_attempt), x).layers)
    for count in sorted({1, len(layers)}) if layers else ():
        recipe = base.recipe
        for name in layers[:count]:
            recipe = recipe.override(name, quantize=False)
        yield dataclasses.replace(base, recipe=recipe)


def _use_16_bits(search: Search) -> list[Settings]:
    recipe = dataclasses.replace(recipes.int16x8(), overrides=search.first.recipe.overrides)
    return [dataclasses.replace(search.first, recipe=recipe)]


ROUNDED = {"method": "mse", "learns_rounding": True, "corrects_bias": False}

LADDER = (
    Rung("ranges from data", _change({})),
    Rung("corrected biases", _change({"corrects_bias": True})),
    Rung("other ranges", _change({"method": "mse"}, {"method": "percentile"})),
    Rung("file ends before concatenated outputs", _end_before_outputs, _explain_outputs),
    Rung("learned rounding", _change(ROUNDED), _explain_rounding),
    Rung("sensitive layers in float", _spare_layers, _explain_float),
    Rung("training", _change({"epochs": EPOCHS}), _explain_training),
    Rung("16-bit activations", _use_16_bits, _explain_16_bits),
)
"""The steps of `tune`, in order. 16-bit activations come last because they make files slower."""


def climb(search: Search) -> None:
    """Try the steps in order until one meets the budget."""
    for rung in LADDER:
        if search.is_met:
            return
        reason = "no time is left" if search.is_late else rung.find_obstacle(search)
        if reason:
            search.skip(rung.name, reason)
        for settings in () if reason else rung.propose(search):
            search.attempt(rung.name, settings)
            if search.is_met or search.is_late:
                break


def shrink(search: Search, max_size: int | None) -> None:
    """Try 4-bit weights: first with 8 bits in the first and last layers, then in all layers."""
    base = search.best
    for end_bits in (8, None):
        step = "4-bit weights, 8 bits in the first and last layers" if end_bits else "4-bit weights"
        if search.is_late:
            search.skip(step, "no time is left")
            return
        weights = dataclasses.replace(base.recipe.weights, bits=4)
        recipe = dataclasses.replace(
            base.recipe, weights=weights, end_bits=end_bits, unpacked_bits=8
        )
        changes: dict[str, Any] = {**ROUNDED, "packs": True, "epochs": 0}
        smaller = dataclasses.replace(base, recipe=recipe, **changes)
        attempt: Any = search.attempt(step, smaller, "smaller")
        trains = attempt.drop > search.max_drop and not _explain_training(search)
        if trains and not search.is_late:
            attempt = search.attempt(step, dataclasses.replace(smaller, epochs=EPOCHS), "smaller")
        if attempt.drop > search.max_drop if max_size is None else attempt.size <= max_size:
            return
