"""A single-shot detector: shapes in images, boxes and scores joined in one output."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import keras_qat
from benchmarks.tasks.shapes import draw_shapes
from benchmarks.tasks.task import Data, Remedy, Task
from keras_qat.keras2.backend import keras, layers

SIDE, STRIDE, CLASSES = 48, 8, 3
CELLS = SIDE // STRIDE
CENTERS = np.stack(np.meshgrid(*[(np.arange(CELLS) + 0.5) * STRIDE] * 2), -1).reshape(-1, 2)
CENTERS = CENTERS.astype(np.float32)
SIGNS = np.array([-1, -1, 1, 1], np.float32)
Box = tuple[float, float, float, float]


def detection_data(numbers: np.random.Generator, train: int, test: int) -> Data:
    """Makes images; targets hold box, one-hot class and a mark for the cell of each shape."""
    drawn = [draw_shapes(numbers, SIDE, 3) for _ in range(train + test)]
    images = np.stack([image for image, _, _ in drawn])
    targets = np.zeros((train, CELLS**2, 4 + CLASSES + 1), np.float32)
    for target, (_, _, shapes) in zip(targets, drawn, strict=False):
        for kind, box in shapes:
            middle = np.add(box[:2], box[2:]) / 2
            cell = np.abs(CENTERS - middle).sum(-1).argmin()
            target[cell] = [*box, *np.eye(CLASSES)[kind], 1]
    return Data(images[:train], targets, images[train:], [shapes for *_, shapes in drawn[train:]])


def detector() -> Any:
    """Makes the network; its output has corners in pixels and scores in 0 to 1 for each cell."""
    x = image = keras.Input((SIDE, SIDE, 3))
    for filters, strides in ((8, 2), (16, 2), (32, 2), (32, 1)):
        x = layers.Conv2D(filters, 3, strides, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    offsets = layers.Reshape((-1, 4), name="offsets")(layers.Conv2D(4, 1)(x))
    scores = layers.Conv2D(CLASSES, 1, activation="sigmoid")(x)
    scores = layers.Reshape((-1, CLASSES), name="scores")(scores)
    boxes = offsets * (STRIDE * SIGNS) + np.tile(CENTERS, 2)
    return keras.Model(image, layers.Concatenate(name="detections")([boxes, scores]))


def decode(offsets: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Returns what the network gives, of the outputs of a file that ends before the join."""
    return np.concatenate([offsets * STRIDE * SIGNS + np.tile(CENTERS, 2), scores], -1)


def loss(target: Any, output: Any) -> Any:
    """Focal loss of the scores, and the distance of corners where a shape is."""
    boxes, truth, is_there = target[..., :4], target[..., 4:-1], target[..., -1]
    scores = tf.clip_by_value(output[..., 4:], 1e-4, 1 - 1e-4)
    hit = tf.where(truth > 0, scores, 1 - scores)
    focal = tf.reduce_sum(-((1 - hit) ** 2) * tf.math.log(hit), (1, 2))
    apart = tf.reduce_mean(abs(output[..., :4] - boxes), -1) / STRIDE
    return focal + 4 * tf.reduce_sum(apart * is_there, 1)


def iou(box: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Intersection over union of a box with others."""
    size = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    common = size.clip(0).prod(-1)
    areas = [(item[..., 2:] - item[..., :2]).clip(0).prod(-1) for item in (box, others)]
    return common / (areas[0] + areas[1] - common + 1e-9)


def kept_boxes(boxes: np.ndarray, scores: np.ndarray) -> list[int]:
    """Returns the indices of boxes that non-maximum suppression keeps, best first."""
    kept: list[int] = []
    for index in np.argsort(-scores, kind="stable"):
        if scores[index] > 0.05 and (not kept or iou(boxes[index], boxes[kept]).max() < 0.5):
            kept.append(int(index))
    return kept


def average_precision(outputs: np.ndarray, truth: list[Any], kind: int, least: float) -> float:
    """Area under the curve of precision over recall of a class, as COCO computes it."""
    hits, count = [], 0
    for output, shapes in zip(outputs, truth, strict=True):
        wanted = np.array([box for other, box in shapes if other == kind]).reshape(-1, 4)
        count, taken = count + len(wanted), np.zeros(len(wanted), bool)
        boxes, scores = output[:, :4], output[:, 4 + kind]
        for index in kept_boxes(boxes, scores):
            overlap = np.where(taken, 0, iou(boxes[index], wanted)) if len(wanted) else [0.0]
            best = int(np.argmax(overlap))
            is_hit = overlap[best] >= least
            if is_hit:
                taken[best] = True
            hits.append((-scores[index], is_hit))
    right = np.cumsum([is_hit for _, is_hit in sorted(hits, key=lambda hit: hit[0])])
    precision = right / np.arange(1, len(right) + 1)
    precision = np.maximum.accumulate(precision[::-1])[::-1]
    recall = np.concatenate([[0], right / max(count, 1)])
    return float(np.sum(np.diff(recall) * precision))


def mean_average_precision(outputs: np.ndarray, data: Data) -> dict[str, float]:
    """Mean average precision for boxes that overlap by half, three quarters and nine tenths."""
    return {
        f"mAP{least}": 100
        * float(
            np.mean(
                [
                    average_precision(outputs, data.y_test, kind, least / 100)
                    for kind in range(CLASSES)
                ]
            )
        )
        for least in (50, 75, 90)
    }


PARTS = ["offsets", "scores"]

TASKS = {
    "detection": Task(
        "detection, boxes and scores joined",
        detection_data,
        detector,
        loss,
        mean_average_precision,
        counts=(4096, 192),
        epochs=(80, 10),
        remedies={
            "outputs=": Remedy(
                lambda model: keras_qat.quantize_model(model, outputs=PARTS), decode
            ),
            "outputs=, int16x8": Remedy(
                lambda model: keras_qat.quantize_model(model, "int16x8", outputs=PARTS), decode
            ),
        },
    )
}
