"""Tests the tasks of benchmarks.tasks: their metrics on known answers, and each in small."""

import dataclasses

import numpy as np
import pytest

from benchmarks.tasks import detection, photographs, shapes, signals
from benchmarks.tasks.__main__ import TASKS
from benchmarks.tasks.runner import count_rows, run, table
from benchmarks.tasks.task import Data, Task
from tests.helpers import rng


def small(task: Task, train: int = 64, test: int = 32) -> Task:
    """Returns a task with few examples and an epoch."""
    return dataclasses.replace(task, counts=(train, test), epochs=(1, 1))


def truth_of(data: Data) -> np.ndarray:
    """Returns the outputs of a detector that knows the answers."""
    outputs = np.zeros((len(data.y_test), detection.CELLS**2, 4 + detection.CLASSES))
    for output, drawn in zip(outputs, data.y_test, strict=True):
        for cell, (kind, box) in enumerate(drawn):
            output[cell, :4], output[cell, 4 + kind] = box, 0.9
    return outputs


def test_mean_average_precision():
    data = detection.detection_data(rng(), 2, 40)
    outputs = truth_of(data)
    assert set(detection.mean_average_precision(outputs, data).values()) == {100.0}
    outputs[..., :4] += 1.5  # In pixels, of boxes of 10 to 24.
    figures = detection.mean_average_precision(outputs, data)
    assert figures["mAP50"] > 90 > figures["mAP75"] > figures["mAP90"] == 0


def test_average_precision_counts_a_shape_once_and_false_alarms():
    box = (8.0, 8.0, 24.0, 24.0)
    outputs = np.zeros((1, 3, 7))
    outputs[0, :, :4] = [box, (30, 30, 44, 44), (9, 8, 25, 24)]
    outputs[0, :, 4] = [0.6, 0.9, 0.5]
    # The false alarm has the highest score. The second hit overlaps the first and is suppressed.
    assert detection.average_precision(outputs, [[(0, box)]], 0, 0.5) == pytest.approx(0.5)


def test_targets_are_what_the_loss_wants():
    data = detection.detection_data(rng(), 8, 1)
    outputs = data.y_train[..., :7] * 0.9998 + 0.0001
    outputs[..., :4] = data.y_train[..., :4]
    assert np.max(detection.loss(data.y_train, outputs)) < 0.01


def test_intersection_over_union_of_pixels():
    truth = np.array([[0, 1, 2, 3]])
    data = Data(truth, truth, truth, truth)
    assert shapes.mean_iou(np.eye(4)[truth], data) == {"mIoU": 100.0}
    assert shapes.mean_iou(np.eye(4)[np.array([[0, 1, 2, 2]])], data) == {"mIoU": 62.5}


def test_area_under_the_curve():
    x = np.zeros((4, 2))
    data = Data(x, x, x, np.array([0, 1, 0, 1]))
    errors = np.array([1.0, 4.0, 2.0, 3.0])[:, None] * np.ones(2)
    assert signals.auc(errors, data) == {"AUC": 100.0}
    assert signals.auc(errors[[1, 0, 3, 2]], data) == {"AUC": 0.0}
    assert signals.auc(np.ones((4, 2)), data) == {"AUC": 50.0}


def test_peak_signal_to_noise():
    y = np.full((2, 4), 0.5)
    data = Data(y, y, y, y)
    assert photographs.psnr(y + 0.1, data)["PSNR"] == pytest.approx(20)


def measured(task: Task) -> dict[str, dict[str, float]]:
    """Runs a task in small, without tfmot."""
    kept: dict[str, dict[str, float]] = {"tfmot QAT": {}}
    run(small(task), 0, kept, lambda: None)
    assert set(kept) == set(count_rows(task))
    return kept


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_every_task_in_small(name):
    kept = measured(TASKS[name])
    assert all(row["same"] == 100 for row in kept.values() if "same" in row)


def test_tables_show_what_there_is(tmp_path):
    for seed, value in enumerate((90.0, 92.0)):
        text = f'{{"float": {{"AUC": {value}}}, "QAT": {{"AUC": {value}, "same": 100.0}}}}'
        (tmp_path / f"anomaly-{seed}.json").write_text(text)
    lines = table("anomaly", TASKS["anomaly"], tmp_path).splitlines()
    assert lines[0] == "| anomalies, autoencoder, 2 seeds | AUC | same codes |"
    assert lines[2:] == ["| float | 91.0 ± 1.0 |  |", "| QAT | 91.0 ± 1.0 | 100.0 ± 0.0 |"]
