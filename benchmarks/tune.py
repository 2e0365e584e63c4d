"""`tune` against a choice by hand, on the networks of `benchmarks.tasks` and two harder ones.

    python -m benchmarks.tune --directory build/tune              # all tasks
    python -m benchmarks.tune detection --minutes 5               # one of them
    python -m benchmarks.tune --smaller sound sensor text         # files a quarter smaller

The float model is trained until more training hardly raises its score. `tune` gets the training
data and fresh examples for validation, with the task's first figure as the metric. Everything is
scored on test data that no step has seen.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

import keras_qat
from benchmarks.tasks.__main__ import TASKS
from benchmarks.tasks.runner import CALIBRATION, trained
from benchmarks.tasks.task import Data, Remedy, Task
from keras_qat.keras2.backend import keras

FRESH_VALIDATION, FRESH_TEST = 1000, 2000
"""Added to the seed of the validation and of the test data."""

EPOCHS = 60
"""Epochs of the float model, so that training with quantization is not just more training."""

DRAWS = 50
"""Draws of test examples for the interval of a difference."""


def add_outliers(data: Data) -> Data:
    """Return the data with every hundredth training example 20 times as large."""
    x = data.x_train.copy()
    x[::100] *= 20
    return data._replace(x_train=x, y_train=x if data.y_train is data.x_train else data.y_train)


HARDER = {
    "outliers": ("anomaly", "anomalies, outliers in the training data", add_outliers),
}
"""Name -> the task, a title, and what changes the data."""


@dataclasses.dataclass
class Case:
    """A trained float model with the data to quantize it and to score it."""

    task: Task
    model: Any
    data: Data
    held_out: Data
    seed: int

    def copy_model(self) -> Any:
        """Return a copy of the float model."""
        copy = keras.models.clone_model(self.model)
        copy.set_weights(self.model.get_weights())
        return copy

    def score(self, outputs: np.ndarray, data: Data | None = None) -> float:
        """Return the first figure of the task, on the test data by default."""
        return next(iter(self.task.score(outputs, data or self.data).values()))

    def predict(self, model: Any) -> np.ndarray:
        """Return the outputs for the test data."""
        return model.predict(self.data.x_test, verbose=0)

    def choose(self, remedy: Remedy, trains: bool) -> np.ndarray:
        """Return the outputs of a model that is quantized by hand."""
        qat = remedy.quantize(self.copy_model())
        keras_qat.calibrate(qat, self.data.x_train[:CALIBRATION])
        if trains:
            trained(qat, self.task, self.data, self.task.epochs[1], self.task.rate / 3, self.seed)
        return self.predict(qat)

    def tune(self, **settings: Any) -> Any:
        """Return the result of `tune`, with the task's figure on fresh data as the metric."""

        def measure(indices: np.ndarray, outputs: np.ndarray) -> float:
            return self.score(outputs, take(self.held_out, indices.astype(int)))

        return keras_qat.tune(
            self.model,
            (self.data.x_train, self.data.y_train),
            (self.held_out.x_test, np.arange(len(self.held_out.x_test))),
            metric=measure,
            seed=self.seed,
            **settings,
        )

    def measure_margin(self, first: np.ndarray, second: np.ndarray) -> float:
        """Return half the 95 % interval of the difference of two scores, by drawing examples."""
        generator, count = np.random.default_rng(0), len(self.data.x_test)
        differences = []
        for _ in range(DRAWS):
            rows = generator.integers(0, count, count)
            drawn = take(self.data, rows)
            differences.append(self.score(first[rows], drawn) - self.score(second[rows], drawn))
        return 1.96 * float(np.std(differences))


def take(data: Data, rows: np.ndarray) -> Data:
    """Return the data with only some test examples."""
    truth: Any = [data.y_test[row] for row in rows]
    if isinstance(data.y_test, np.ndarray):
        truth = np.asarray(truth)
    return data._replace(x_test=data.x_test[rows], y_test=truth)


def make_case(name: str, seed: int) -> Case:
    """Return a task's data and its trained float model."""
    base, title, change_data = HARDER.get(name, (name, "", None))
    task = TASKS[base]
    task = dataclasses.replace(task, title=title or task.title)
    train, test = task.counts

    def make_data(fresh: int, train: int, test: int) -> Data:
        return task.data(np.random.default_rng(fresh + seed), train, test)

    test_data = make_data(FRESH_TEST, 2, 4 * test)
    data = make_data(0, train, 2)._replace(x_test=test_data.x_test, y_test=test_data.y_test)
    keras.utils.set_random_seed(seed)
    model = trained(task.model(), task, data, max(EPOCHS, task.epochs[0]), task.rate, seed)
    data = data if change_data is None else change_data(data)
    return Case(task, model, data, make_data(FRESH_VALIDATION, 2, 2 * test), seed)


def measure_choice(case: Case, minutes: float, max_drop: float) -> dict[str, Any]:
    """Return the scores of a task: in float, calibrated, chosen by hand, and by `tune`."""
    plain = Remedy(keras_qat.quantize_model)
    calibrated = case.choose(plain, trains=False)
    by_hand = {"calibrated": calibrated, "QAT": case.choose(plain, trains=True)}
    for name, remedy in case.task.remedies.items():
        by_hand[f"{name}, calibrated"] = case.choose(remedy, trains=False)
        by_hand[f"{name}, QAT"] = case.choose(remedy, trains=True)
    expert = max(by_hand, key=lambda name: case.score(by_hand[name]))
    started = time.monotonic()
    result = case.tune(max_drop=max_drop, minutes=minutes)
    minutes = (time.monotonic() - started) / 60
    outputs = case.predict(result.model)

    def compare(other: np.ndarray) -> str:
        margin = case.measure_margin(outputs, other)
        return f"{case.score(outputs) - case.score(other):+.2f} ± {margin:.2f}"

    return {
        "float": f"{case.score(case.predict(case.model)):.2f}",
        "calibrated": f"{case.score(calibrated):.2f}",
        "by hand": f"{case.score(by_hand[expert]):.2f} ({expert})",
        "tune": f"{case.score(outputs):.2f}",
        "tune - calibrated": compare(calibrated),
        "tune - by hand": compare(by_hand[expert]),
        "chosen": f"{result.best.step}: {result.best.settings}",
        "attempts": str(sum(attempt.value is not None for attempt in result.attempts)),
        "minutes": f"{minutes:.1f}",
    }


def measure_smaller(case: Case, minutes: float, max_drop: float) -> dict[str, Any]:
    """Return the scores of files a quarter smaller than int8, and of 4-bit weights everywhere."""
    full = case.choose(Remedy(keras_qat.quantize_model), trains=False)
    size = len(keras_qat.export_tflite(_quantize(case, keras_qat.recipes.int8())))
    result = case.tune(max_drop=max_drop, minutes=minutes, max_size=size * 3 // 4)
    found = case.predict(result.model)
    qat = _quantize(case, keras_qat.recipes.int4_weights())
    qat.pack_int4 = True
    keras_qat.learn_rounding(qat, case.data.x_train[:CALIBRATION], verbose=0)
    uniform = {"learned rounding": (case.predict(qat), len(keras_qat.export_tflite(qat)))}
    rate = case.task.rate / 3
    trained(qat, case.task, case.data, case.task.epochs[1], rate, case.seed)
    uniform["QAT"] = case.predict(qat), len(keras_qat.export_tflite(qat))
    best = max(uniform, key=lambda name: case.score(uniform[name][0]))
    outputs, bytes_of_uniform = uniform[best]
    margin = case.measure_margin(found, outputs)
    return {
        "float": f"{case.score(case.predict(case.model)):.2f}",
        "int8": f"{case.score(full):.2f}, {size} bytes",
        "4 bits everywhere": f"{case.score(outputs):.2f}, {bytes_of_uniform} bytes ({best})",
        "tune": f"{case.score(found):.2f}, {result.best.size} bytes",
        "difference": f"{case.score(found) - case.score(outputs):+.2f} ± {margin:.2f}",
        "chosen": f"{result.best.step}: {result.best.settings}",
    }


def _quantize(case: Case, recipe: keras_qat.recipes.Recipe) -> Any:
    qat = keras_qat.quantize_model(case.copy_model(), recipe)
    x = case.data.x_train[:CALIBRATION]
    keras_qat.calibrate(qat, x, method="minmax" if recipe.name == "int8" else "mse")
    return qat


def main() -> None:
    """Read the command line, measure, and print a Markdown table."""
    names = [*TASKS, *HARDER]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", metavar="task", help=", ".join(names))
    parser.add_argument("--smaller", action="store_true", help="look for smaller files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--max-drop", type=float, default=0.3)
    parser.add_argument("--directory", type=Path, default=Path("build/tune"))
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    measure = measure_smaller if options.smaller else measure_choice
    rows = []
    for name in options.tasks or names:
        path = options.directory / f"{measure.__name__}-{name}-{options.seed}.json"
        if not path.exists():
            case = make_case(name, options.seed)
            found = {"task": case.task.title, **measure(case, options.minutes, options.max_drop)}
            path.write_text(json.dumps(found, indent=1))
        rows.append(json.loads(path.read_text()))
    print("|", " | ".join(rows[0]), "|")
    print("| --- " * len(rows[0]) + "|")
    for row in rows:
        print("|", " | ".join(row.values()), "|")


if __name__ == "__main__":
    main()
