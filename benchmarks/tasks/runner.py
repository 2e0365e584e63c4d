"""Runs a task for one seed, and makes the table of many runs."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import keras_qat
from benchmarks.tasks.task import Data, Remedy, Task
from keras_qat.keras2.backend import keras
from keras_qat.messages import pluralize

BATCH, CALIBRATION = 32, 128
Figures = dict[str, float]


def trained(model: Any, task: Task, data: Data, epochs: int, rate: float, seed: int) -> Any:
    """Returns the model, trained with a learning rate that falls to zero along a cosine."""
    keras.utils.set_random_seed(seed)
    steps = epochs * -(-len(data.x_train) // BATCH)
    schedule = keras.optimizers.schedules.CosineDecay(rate, steps)
    model.compile(keras.optimizers.Adam(schedule), task.loss)
    model.fit(data.x_train, data.y_train, batch_size=BATCH, epochs=epochs, verbose=0)
    return model


def of_file(qat: Any, task: Task, data: Data, decode: Callable[..., np.ndarray]) -> Figures:
    """Scores the file of a quantization-aware model, with `same`: the codes that equal its own."""
    contents = keras_qat.export_tflite(qat, output_dtype="float32")
    outputs: Any = keras_qat.TFLiteModel(contents).predict(data.x_test)
    report = keras_qat.verify(qat, contents, data.x_test[:64])
    figures = task.score(decode(*(outputs if isinstance(outputs, list) else [outputs])), data)
    return {**figures, "same": 100 * report.identical}


def of_tfmot(model: Any, task: Task, data: Data, seed: int) -> Figures:
    """Scores the file of tfmot's quantization-aware training."""
    from tensorflow_model_optimization.quantization.keras import quantize_model

    qat = trained(quantize_model(model), task, data, task.epochs[1], task.rate / 3, seed)
    converter = tf.lite.TFLiteConverter.from_keras_model(qat)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    outputs: Any = keras_qat.TFLiteModel(converter.convert()).predict(data.x_test)
    return task.score(outputs, data)


def count_rows(task: Task) -> list[str]:
    """Returns the names of what is measured."""
    remedies = [f"{name}, {way}" for name in task.remedies for way in ("calibrated", "QAT")]
    return ["float", "float, trained on", "calibrated", "QAT", *remedies, "tfmot QAT"]


def run(task: Task, seed: int, kept: dict[str, Figures], keep: Callable[[], object]) -> None:
    """Measures the rows of a task that `kept` lacks; calls `keep` behind each.

    All rows begin with the same float model; those that train go on for as many epochs.
    """
    data = task.data(np.random.default_rng(seed), *task.counts)
    keras.utils.set_random_seed(seed)
    model = trained(task.model(), task, data, task.epochs[0], task.rate, seed)
    weights = model.get_weights()

    def fresh() -> Any:
        copy = keras.models.clone_model(model)
        copy.set_weights(weights)
        return copy

    def on(other: Any) -> Any:
        return trained(other, task, data, task.epochs[1], task.rate / 3, seed)

    def measured(remedy: Remedy, trains: bool) -> Figures:
        qat = remedy.quantize(fresh())
        keras_qat.calibrate(qat, data.x_train[:CALIBRATION])
        return of_file(on(qat) if trains else qat, task, data, remedy.decode)

    def predicted(other: Any) -> Figures:
        return task.score(other.predict(data.x_test, verbose=0), data)

    plain = Remedy(keras_qat.quantize_model)
    rows: dict[str, Callable[[], Figures]] = {
        "float": lambda: predicted(model),
        "float, trained on": lambda: predicted(on(fresh())),
        "calibrated": lambda: measured(plain, False),
        "QAT": lambda: measured(plain, True),
    }
    for name, remedy in task.remedies.items():
        rows[f"{name}, calibrated"] = partial(measured, remedy, False)
        rows[f"{name}, QAT"] = partial(measured, remedy, True)
    if importlib.util.find_spec("tensorflow_model_optimization"):
        rows["tfmot QAT"] = lambda: of_tfmot(fresh(), task, data, seed)
    for name, measure in rows.items():
        if name in kept:
            continue
        try:
            kept[name] = measure()
        except (RuntimeError, ValueError, AttributeError) as error:
            if name != "tfmot QAT":
                raise
            kept[name] = {}
            print(f"{task.title}: tfmot refuses: {str(error).splitlines()[0][:120]}")
        keep()


def measure(name: str, task: Task, seeds: Iterable[int], directory: Path) -> None:
    """Measures a task for some seeds. Every row is kept: a run that was cut short goes on."""
    directory.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        path = directory / f"{name}-{seed}.json"
        kept = json.loads(path.read_text()) if path.exists() else {}
        if any(row not in kept for row in count_rows(task)):
            run(task, seed, kept, partial(_keep, path, kept))


def _keep(path: Path, kept: dict[str, Figures]) -> None:
    path.write_text(json.dumps(kept, indent=1))
    print(path.stem, *list(kept.items())[-1], flush=True)


def table(name: str, task: Task, directory: Path) -> str:
    """Returns the figures of a task as a Markdown table: mean and spread over the seeds.

    Seeds whose run was cut short are left out.
    """
    runs = [json.loads(path.read_text()) for path in sorted(directory.glob(f"{name}-*.json"))]
    runs = [run for run in runs if len(run) == max(map(len, runs))]
    figures = [key for key in runs[0]["float"] if key != "same"] if runs else []
    title = f"{task.title}, {pluralize(len(runs), 'seed')}"
    lines = [f"| {title} | {' | '.join(figures)} | same codes |"]
    lines.append("| --- " * (len(figures) + 2) + "|")
    for row in count_rows(task):
        of_row = [run[row] for run in runs if run.get(row)]
        cells = [_spread([one[key] for one in of_row if key in one]) for key in (*figures, "same")]
        if any(cells):
            lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    """Returns the mean and, of several, half the distance of the extremes."""
    if not values:
        return ""
    digits = 1 if max(map(abs, values)) >= 10 else 3
    spread = f" ± {np.ptp(values) / 2:.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{spread}"
