"""Images of drawn shapes, for segmentation and pose; detection draws with the same brush."""

from __future__ import annotations

from typing import Any

import numpy as np

import keras_qat
from benchmarks.tasks.task import Data, Remedy, Task
from keras_qat.keras2.backend import keras, layers

SIDE = 32
COLOURS = np.array([[0.9, 0.3, 0.3], [0.3, 0.8, 0.4], [0.35, 0.4, 0.9]])


def background(numbers: np.random.Generator, side: int) -> np.ndarray:
    """Returns an image of soft noise."""
    coarse = numbers.uniform(0.2, 0.7, (side // 8, side // 8, 3)).repeat(8, 0).repeat(8, 1)
    return coarse + numbers.normal(0, 0.06, (side, side, 3))


def shape_mask(
    kind: int, rows: np.ndarray, columns: np.ndarray, box: tuple[float, float, float, float]
) -> np.ndarray:
    """Returns which pixels a shape covers: 0 a disc, 1 a rectangle, 2 a triangle, in a box."""
    left, top, right, bottom = box
    x = (columns - (left + right) / 2) / ((right - left) / 2)
    y = (rows - (top + bottom) / 2) / ((bottom - top) / 2)
    if kind == 0:
        return x**2 + y**2 <= 1
    inside = (abs(x) <= 1) & (abs(y) <= 1)
    return inside if kind == 1 else inside & (2 * abs(x) <= y + 1)


def draw_shapes(
    numbers: np.random.Generator, side: int, most: int
) -> tuple[np.ndarray, np.ndarray, list[tuple[int, tuple[float, float, float, float]]]]:
    """Returns an image, the class of each pixel (0: background), and (class, box) of each shape."""
    image, classes = background(numbers, side), np.zeros((side, side), np.int64)
    rows, columns = np.mgrid[:side, :side] + 0.5
    shapes: list[tuple[int, tuple[float, float, float, float]]] = []
    for _ in range(numbers.integers(1, most + 1)):
        kind, size = int(numbers.integers(3)), numbers.uniform(side * 0.2, side * 0.5, 2)
        left, top = numbers.uniform(0, side - size)
        box = (left, top, left + size[0], top + size[1])
        mask = shape_mask(kind, rows, columns, box)
        if any(np.any(mask & shape_mask(other, rows, columns, at)) for other, at in shapes):
            continue
        image[mask] = COLOURS[numbers.integers(3)] + numbers.normal(0, 0.05, 3)
        classes[mask] = kind + 1
        shapes.append((kind, box))
    return image.clip(0, 1).astype(np.float32), classes, shapes


def segmentation_data(numbers: np.random.Generator, train: int, test: int) -> Data:
    """Makes images with the class of each pixel."""
    drawn = [draw_shapes(numbers, SIDE, 3)[:2] for _ in range(train + test)]
    x, y = (np.stack(parts) for parts in zip(*drawn, strict=True))
    return Data(x[:train], y[:train], x[train:], y[train:])


def u_net() -> Any:
    """Makes a U-Net of two levels."""

    def conv(filters: int, x: Any, strides: int = 1) -> Any:
        x = layers.Conv2D(filters, 3, strides, padding="same", use_bias=False)(x)
        return layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))

    image = keras.Input((SIDE, SIDE, 3))
    full = conv(8, image)
    half = conv(16, conv(16, full, 2))
    quarter = conv(32, conv(32, half, 2))
    x = layers.Concatenate()([layers.UpSampling2D()(quarter), half])
    x = layers.Concatenate()([layers.UpSampling2D()(conv(16, x)), full])
    return keras.Model(image, layers.Conv2D(4, 1)(conv(8, x)))


def mean_iou(outputs: np.ndarray, data: Data) -> dict[str, float]:
    """Intersection over union, averaged over the classes, in percent."""
    classes, truth = outputs.argmax(-1), np.asarray(data.y_test)
    pairs = [(classes == kind, truth == kind) for kind in range(4)]
    return {"mIoU": 100 * float(np.mean([(a & b).sum() / (a | b).sum() for a, b in pairs]))}


def pose_data(numbers: np.random.Generator, train: int, test: int) -> Data:
    """Makes images of an arm of two segments, with the places of its three joints, in 0 to 1."""
    rows, columns = np.mgrid[:SIDE, :SIDE] + 0.5
    images, joints = [], []
    for _ in range(train + test):
        angles = numbers.uniform(0, 2 * np.pi) + np.array([0, numbers.uniform(0.6, 2.5)])
        steps = SIDE * 0.22 * np.stack([np.cos(angles), np.sin(angles)], 1)
        points = SIDE / 2 + numbers.uniform(-2, 2, 2) + np.stack([steps[0], 0 * steps[0], steps[1]])
        image = background(numbers, SIDE)
        for start, end, colour in ((points[1], points[0], 0), (points[1], points[2], 1)):
            along = end - start
            x, y = columns - start[0], rows - start[1]
            share = ((x * along[0] + y * along[1]) / (along @ along)).clip(0, 1)
            distance = np.hypot(x - share * along[0], y - share * along[1])
            image[distance < 1.5] = COLOURS[colour]
        images.append(image.clip(0, 1))
        joints.append(points.ravel() / SIDE)
    x, y = np.stack(images).astype(np.float32), np.stack(joints).astype(np.float32)
    return Data(x[:train], y[:train], x[train:], y[train:])


def pose_network() -> Any:
    """Makes convolutions and a dense layer that gives coordinates."""
    x = image = keras.Input((SIDE, SIDE, 3))
    for filters in (12, 24, 32):
        x = layers.Conv2D(filters, 3, 2, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
    return keras.Model(image, layers.Dense(6)(layers.Flatten()(x)))


def pixels_off(outputs: np.ndarray, data: Data) -> dict[str, float]:
    """Mean distance of joints in pixels, as a negative number, since higher is better."""
    apart = SIDE * (outputs - data.y_test).reshape(-1, 3, 2)
    return {"- pixels": -float(np.mean(np.linalg.norm(apart, axis=-1)))}


IN_16_BITS = Remedy(lambda model: keras_qat.quantize_model(model, "int16x8"))

TASKS = {
    "segmentation": Task(
        "segmentation, U-Net",
        segmentation_data,
        u_net,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        mean_iou,
        counts=(512, 128),
        epochs=(24, 6),
    ),
    "pose": Task(
        "pose, coordinates",
        pose_data,
        pose_network,
        "mse",
        pixels_off,
        counts=(768, 128),
        epochs=(16, 4),
        remedies={"int16x8": IN_16_BITS},
    ),
}
