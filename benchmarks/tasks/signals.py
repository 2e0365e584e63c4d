"""Synthesized signals: sounds to tell apart, machines that sound wrong, movements of a sensor."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.tasks.shapes import IN_16_BITS
from benchmarks.tasks.task import Data, Task
from keras_qat.keras2.backend import keras, layers

RATE, FRAME, FRAMES, BANDS = 4000, 128, 28, 24


def sound(numbers: np.random.Generator, kind: int) -> np.ndarray:
    """Returns a second of a tone, two tones, a rising or falling chirp, a beat, clicks or noise."""
    t = np.arange(RATE) / RATE
    pitch, phase = numbers.uniform(300, 900), numbers.uniform(0, 2 * np.pi)
    slide = pitch * numbers.uniform(0.4, 0.8) * (t**2 / 2)
    waves = [
        np.sin(2 * np.pi * pitch * t + phase),
        np.sin(2 * np.pi * pitch * t) + np.sin(2 * np.pi * pitch * 1.5 * t + phase),
        np.sin(2 * np.pi * (pitch * t + slide) + phase),
        np.sin(2 * np.pi * (1.5 * pitch * t - slide) + phase),
        np.sin(2 * np.pi * pitch * t) * (1 + np.sin(2 * np.pi * numbers.uniform(4, 9) * t + phase)),
        np.sin(2 * np.pi * pitch * t) * ((t * numbers.uniform(5, 9) + phase) % 1 < 0.2),
        numbers.normal(0, 0.7, RATE),
    ]
    return waves[kind] * numbers.uniform(0.3, 1) + numbers.normal(0, 0.8, RATE)


def spectrogram(wave: np.ndarray) -> np.ndarray:
    """Returns the logarithm of the energy in bands, by frames."""
    frames = np.lib.stride_tricks.sliding_window_view(wave, 256)[::FRAME][:FRAMES]
    power = np.abs(np.fft.rfft(frames * np.hanning(256))) ** 2
    bands = power[:, 1:121].reshape(FRAMES, BANDS, -1).mean(-1)
    return np.log(bands + 1e-3).astype(np.float32)


def sound_data(numbers: np.random.Generator, train: int, test: int) -> Data:
    """Makes spectrograms of seven kinds of sounds in noise."""
    kinds = numbers.integers(0, 7, train + test)
    x = np.stack([spectrogram(sound(numbers, kind)) for kind in kinds])[..., None] / 4
    return Data(x[:train], kinds[:train], x[train:], kinds[train:])


def ds_cnn() -> Any:
    """Makes a network of depthwise separable convolutions, as for keywords."""
    x = image = keras.Input((FRAMES, BANDS, 1))
    x = layers.Conv2D(16, 3, 2, padding="same", use_bias=False)(x)
    x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
    for strides in (1, 2):
        x = layers.DepthwiseConv2D(3, strides, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
        x = layers.Conv2D(24, 1, use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
    return keras.Model(image, layers.Dense(7)(layers.GlobalAveragePooling2D()(x)))


def accuracy(outputs: np.ndarray, data: Data) -> dict[str, float]:
    """Share of the right classes, in percent."""
    return {"accuracy": 100 * float(np.mean(outputs.argmax(-1) == data.y_test))}


def machine_data(numbers: np.random.Generator, train: int, test: int) -> Data:
    """Makes spectra of a machine, whose test holds as many with a band too loud or a line moved."""
    bands = np.arange(48)

    def spectra(count: int, is_wrong: bool) -> np.ndarray:
        load = numbers.uniform(0.6, 1.4, (count, 1))
        lines = sum(
            np.exp(-(((bands - base * load) / 1.2) ** 2)) * numbers.uniform(0.8, 1.2, (count, 1))
            for base in (6, 12, 18)
        )
        fault = numbers.uniform(0.25, 0.5, (count, 1)) * is_wrong
        place = numbers.uniform(26, 44, (count, 1))
        lines = lines + fault * np.exp(-(((bands - place) / 1.5) ** 2))
        return (lines + numbers.normal(0, 0.05, lines.shape)).astype(np.float32)

    x = spectra(train, False)
    truth = np.repeat([0, 1], test // 2)
    x_test = np.concatenate([spectra(test // 2, False), spectra(test // 2, True)])
    return Data(x, x, x_test, truth)


def autoencoder() -> Any:
    """Makes an autoencoder of dense layers."""
    x = spectrum = keras.Input((48,))
    for units in (32, 6, 32):
        x = layers.Dense(units, activation="relu")(x)
    return keras.Model(spectrum, layers.Dense(48)(x))


def auc(outputs: np.ndarray, data: Data) -> dict[str, float]:
    """Area under the curve of true over false alarms, in percent: the alarm is a large error."""
    errors = np.mean((outputs - data.x_test) ** 2, -1)
    wrong, right = errors[data.y_test == 1], errors[data.y_test == 0]
    above = wrong[:, None] > right
    return {"AUC": 100 * float(np.mean(above + 0.5 * (wrong[:, None] == right)))}


def movement_data(numbers: np.random.Generator, train: int, test: int) -> Data:
    """Makes accelerations on three axes for 48 steps: rest, walk, run, stairs, turn."""
    kinds, t = numbers.integers(0, 5, train + test), np.arange(48) / 16
    rows = []
    for kind in kinds:
        pace = (0, 1.7, 2.7, 1.6, 0.5)[kind] * numbers.uniform(0.85, 1.15)
        force = (0, 0.8, 1.6, 0.9, 0.6)[kind] * numbers.uniform(0.6, 1.3)
        phase = numbers.uniform(0, 2 * np.pi, 3)
        waves = np.stack([np.sin(2 * np.pi * pace * n * t + phase[n - 1]) for n in (1, 2, 1)], -1)
        tilt = np.array([0, 0, 1]) + (kind == 3) * np.array([0.35, 0, -0.1])
        rows.append(force * waves * [0.5, 0.7, 1] + tilt + numbers.normal(0, 0.35, (48, 3)))
    x = np.stack(rows).astype(np.float32)
    return Data(x[:train], kinds[:train], x[train:], kinds[train:])


def recurrent() -> Any:
    """Makes a convolution in time and an LSTM."""
    x = steps = keras.Input((48, 3))
    x = layers.Conv1D(12, 5, 2, padding="same", activation="relu")(x)
    return keras.Model(steps, layers.Dense(5)(layers.LSTM(16)(x)))


_CLASSES = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

TASKS = {
    "sound": Task(
        "sounds in noise, DS-CNN",
        sound_data,
        ds_cnn,
        _CLASSES,
        accuracy,
        counts=(768, 384),
        epochs=(12, 3),
    ),
    "anomaly": Task(
        "anomalies, autoencoder",
        machine_data,
        autoencoder,
        "mse",
        auc,
        counts=(1024, 512),
        epochs=(24, 6),
        remedies={"int16x8": IN_16_BITS},
    ),
    "sensor": Task(
        "movements, LSTM",
        movement_data,
        recurrent,
        _CLASSES,
        accuracy,
        counts=(768, 384),
        epochs=(12, 3),
        rate=6e-3,
    ),
}
