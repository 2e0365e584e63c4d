"""`tune` against a choice by hand, on the networks of `benchmarks.tasks`.

    python -m benchmarks.tune --directory build/tune              # all tasks
    python -m benchmarks.tune detection --minutes 5               # one of them

`tune` gets the training data and fresh examples for validation, with the task's first figure as the
metric. It, plain calibration and what an expert would choose (quantization-aware training, or the
remedy that the task names, the best of both) are scored on the test data, which no step has seen.
"""

from __future__ import annotations

import argparse
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

FRESH = 1000
"""Added to the seed of the validation data."""


def measure_task(task: Task, seed: int, minutes: float, max_drop: float) -> dict[str, Any]:
    """Return the scores of a task: in float, calibrated, chosen by hand, and by `tune`."""
    data = task.data(np.random.default_rng(seed), *task.counts)
    held_out = task.data(np.random.default_rng(FRESH + seed), 1, task.counts[1])
    keras.utils.set_random_seed(seed)
    model = trained(task.model(), task, data, task.epochs[0], task.rate, seed)
    weights = model.get_weights()

    def score(outputs: np.ndarray, examples: Data) -> float:
        return next(iter(task.score(outputs, examples).values()))

    def choose(remedy: Remedy, trains: bool) -> float:
        copy = keras.models.clone_model(model)
        copy.set_weights(weights)
        qat = remedy.quantize(copy)
        keras_qat.calibrate(qat, data.x_train[:CALIBRATION])
        if trains:
            trained(qat, task, data, task.epochs[1], task.rate / 3, seed)
        return score(qat.predict(data.x_test, verbose=0), data)

    def measure(indices: np.ndarray, outputs: np.ndarray) -> float:
        indices = indices.astype(int)
        truth: Any = [held_out.y_test[i] for i in indices]
        if isinstance(held_out.y_test, np.ndarray):
            truth = np.asarray(truth)
        return score(outputs, held_out._replace(x_test=held_out.x_test[indices], y_test=truth))

    by_hand = {"QAT": choose(Remedy(keras_qat.quantize_model), True)}
    for name, remedy in task.remedies.items():
        by_hand |= {f"{name}, {way}": choose(remedy, way == "QAT") for way in ("calibrated", "QAT")}
    started = time.monotonic()
    result = keras_qat.tune(
        model,
        (data.x_train, data.y_train),
        (held_out.x_test, np.arange(len(held_out.x_test))),
        metric=measure,
        max_drop=max_drop,
        minutes=minutes,
        seed=seed,
    )
    taken = (time.monotonic() - started) / 60
    expert = max(by_hand, key=by_hand.__getitem__)
    return {
        "float": score(model.predict(data.x_test, verbose=0), data),
        "calibrated": choose(Remedy(keras_qat.quantize_model), False),
        "expert": f"{by_hand[expert]:.3f} ({expert})",
        "tune": score(result.model.predict(data.x_test, verbose=0), data),
        "chosen": f"{result.best.step}: {result.best.settings}",
        "attempts": sum(attempt.value is not None for attempt in result.attempts),
        "minutes": taken,
    }


def main() -> None:
    """Read the command line, measure, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", metavar="task", help=", ".join(TASKS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--max-drop", type=float, default=0.5)
    parser.add_argument("--directory", type=Path, default=Path("build/tune"))
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in options.tasks or TASKS:
        path = options.directory / f"{name}-{options.seed}.json"
        if not path.exists():
            found = measure_task(TASKS[name], options.seed, options.minutes, options.max_drop)
            path.write_text(json.dumps(found, indent=1))
        rows.append({"task": TASKS[name].title, **json.loads(path.read_text())})
    print("|", " | ".join(rows[0]), "|")
    print("| --- " * len(rows[0]) + "|")
    for row in rows:
        cells = (f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row.values())
        print("|", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
