"""Regressions, counts, rates, rare events and labels of signals: no images."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.verdicts.cases import (
    Case,
    Split,
    broken,
    calibrated,
    exported,
    healthy,
    split,
    train,
)
from keras_qat import recipes
from keras_qat.keras2.backend import keras

layers = keras.layers


@functools.cache
def machine(noise: float) -> Split:
    """Twelve readings of a machine, and its wear, measured with noise."""
    r = np.random.default_rng(0)
    x = r.normal(size=(2400, 12)).astype(np.float32)
    wear = np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.5 * np.abs(x[:, 3])
    return split(x, (wear + noise * r.normal(size=len(x))).astype(np.float32)[:, None])


@functools.cache
def regressor(noise: float) -> Any:
    """Dense layers, trained with the mean squared error."""
    keras.utils.set_random_seed(0)
    x = keras.Input((12,), name="readings")
    hidden = layers.Dense(48, "relu")(layers.Dense(48, "relu")(x))
    data = machine(noise)
    model = keras.Model(x, layers.Dense(1, name="wear")(hidden))
    return train(model, data.x_train, data.y_train, "mse")


def wear(noise: float, readings: np.ndarray, recipe: Any = "int8") -> Case:
    """Returns the regressor with ranges from readings."""
    data = machine(noise)
    return exported(calibrated(regressor(noise), readings, recipe), data.x_test, data.y_test)


@healthy("wear, regression", "rules")
def _() -> Case:
    return wear(0.1, machine(0.1).x_train[:200])


@healthy("wear, noisy targets", "rules")
def _() -> Case:
    return wear(2.0, machine(2.0).x_train[:200])


@healthy("wear, int16x8", "rules")
def _() -> Case:
    return wear(0.1, machine(0.1).x_train[:200], "int16x8")


@broken("wear, readings in other units", "rules")
def _() -> Case:
    return wear(0.1, 0.2 * machine(0.1).x_train[:200])


@broken("wear, an outlier", "rules")
def _() -> Case:
    x = machine(0.1).x_train[:200].copy()
    x[0, 0] = 300.0
    return wear(0.1, x)


@broken("wear, noisy targets, an outlier", "rules")
def _() -> Case:
    x = machine(2.0).x_train[:200].copy()
    x[0, 0] = 1000.0
    return wear(2.0, x)


@functools.cache
def bumps() -> Split:
    """Signals with 0 to 9 bumps, and how many."""
    r = np.random.default_rng(1)
    counts = r.integers(0, 10, 1600)
    time = np.arange(96)
    x = 0.05 * r.normal(size=(len(counts), 96, 1))
    for signal, count in zip(x, counts, strict=True):
        for place in r.choice(np.arange(3, 93, 6), count, replace=False):
            signal[:, 0] += np.exp(-((time - place) ** 2) / 4)
    return split(x.astype(np.float32), counts)


@functools.cache
def counter() -> Any:
    """Convolutions, whose linear output is near the count."""
    keras.utils.set_random_seed(0)
    x = keras.Input((96, 1), name="readings")
    hidden = layers.Conv1D(16, 5, activation="relu")(x)
    hidden = layers.GlobalAveragePooling1D()(layers.Conv1D(16, 5, activation="relu")(hidden))
    model = keras.Model(x, layers.Dense(1, name="count")(layers.Dense(16, "relu")(hidden)))
    return train(model, bumps().x_train, bumps().y_train, "mse")


def count(signals: np.ndarray, recipe: Any = "int8", loss: Any = "mse", epochs: int = 0) -> Case:
    """Returns the counter with ranges from signals, and perhaps trained on."""
    qat = calibrated(counter(), signals, recipe)
    if epochs:
        train(qat, bumps().x_train, bumps().y_train, loss, epochs, 1e-3)
    elif loss:
        qat.compile("adam", loss)
    return exported(qat, bumps().x_test, bumps().y_test)


@healthy("counts, compiled", "rules")
def _() -> Case:
    return count(bumps().x_train[:200])


@healthy("counts, not compiled", "rules")
def _() -> Case:
    return count(bumps().x_train[:200], loss=None)


@healthy("counts, weights of 4 bits, fine-tuned", "rules")
def _() -> Case:
    return count(bumps().x_train[:200], recipes.int4_weights(), epochs=3)


@broken("counts, 2 bits", "rules")
def _() -> Case:
    return count(bumps().x_train[:200], recipes.low_bits(2, 2))


@broken("counts, ranges of quiet signals", "rules")
def _() -> Case:
    return count(bumps().x_train[bumps().y_train == 0][:100])


@functools.cache
def tones() -> Split:
    """Sums of some of six tones, each in a tenth of the signals, and which they are."""
    r = np.random.default_rng(2)
    present = r.random((2000, 6)) < 0.12
    time = np.arange(64)
    waves = [np.sin(2 * np.pi * f * time / 64 + 0.3) for f in (3, 5, 8, 12, 17, 23)]
    x = (present * r.uniform(0.7, 1.3, present.shape)) @ np.stack(waves)
    x += 0.25 * r.normal(size=x.shape)
    return split(x.astype(np.float32)[..., None], present.astype(int))


@functools.cache
def listener() -> Any:
    """Convolutions with a sigmoid for each tone."""
    keras.utils.set_random_seed(0)
    x = keras.Input((64, 1), name="readings")
    hidden = layers.Conv1D(32, 16, 4, activation="relu")(x)
    hidden = layers.Dense(48, "relu")(layers.Flatten()(hidden))
    model = keras.Model(x, layers.Dense(6, "sigmoid", name="tones")(hidden))
    return train(model, tones().x_train, tones().y_train, "binary_crossentropy")


@healthy("tones, several labels", "rules")
def _() -> Case:
    qat = calibrated(listener(), tones().x_train[:200])
    return exported(qat, tones().x_test, tones().y_test)


@broken("tones, an outlier", "rules")
def _() -> Case:
    x = tones().x_train[:200].copy()
    x[0, 0] = 4000.0
    return exported(calibrated(listener(), x), tones().x_test, tones().y_test)


@functools.cache
def duration(scale: float = 1.0) -> Split:
    """Descriptions of tasks, and how long they take, with a long tail."""
    r = np.random.default_rng(3)
    x = r.uniform(-1, 1, (2400, 8)).astype(np.float32)
    y = np.exp(x[:, 0] + 0.5 * x[:, 1] * x[:, 2]) * r.gamma(4, 0.25, len(x))
    return split(x, (scale * y).astype(np.float32)[:, None])


def pinball(y: Any, predicted: Any) -> Any:
    """The loss of the 80 % quantile."""
    error = tf.cast(y, predicted.dtype) - predicted
    return tf.reduce_mean(tf.maximum(0.8 * error, -0.2 * error), -1)


@functools.cache
def quantile() -> Any:
    """Dense layers, trained with a loss of one's own."""
    keras.utils.set_random_seed(0)
    x = keras.Input((8,), name="readings")
    model = keras.Model(x, layers.Dense(1)(layers.Dense(32, "relu")(layers.Dense(32, "relu")(x))))
    return train(model, duration().x_train, duration().y_train, pinball)


def late(recipe: Any = "int8", factor: float = 1.0) -> Case:
    """Returns the quantile's network, compiled with its loss."""
    qat = calibrated(quantile(), factor * duration().x_train[:200], recipe)
    qat.compile("adam", pinball)
    return exported(qat, duration().x_test, duration().y_test)


healthy("quantile, own loss", "test")(late)
broken("quantile, own loss, 2 bits", "test")(lambda: late(recipes.low_bits(2, 2)))
broken("quantile, own loss, data of a twentieth", "test")(lambda: late(factor=0.05))


@functools.cache
def alarms() -> Split:
    """Signals of vibration, of which 3 % hold a burst."""
    r = np.random.default_rng(4)
    x = r.normal(size=(4000, 64)) * r.uniform(0.5, 1.0, (4000, 1))
    event = r.random(len(x)) < 0.03
    start = r.integers(0, 48, len(x))
    for index in np.flatnonzero(event):
        x[index, start[index] : start[index] + 16] += 2.5 * np.sin(np.arange(16))
    return split(x.astype(np.float32)[..., None], event.astype(int), 1500)


@functools.cache
def watchman() -> Any:
    """Convolutions and a sigmoid."""
    keras.utils.set_random_seed(0)
    x = keras.Input((64, 1), name="readings")
    hidden = layers.Conv1D(16, 13, activation="relu", padding="same")(x)
    hidden = layers.GlobalMaxPooling1D()(layers.Conv1D(16, 5, activation="relu")(hidden))
    model = keras.Model(x, layers.Dense(1, "sigmoid", name="alarm")(hidden))
    return train(model, alarms().x_train, alarms().y_train, "binary_crossentropy", 10)


@healthy("alarm, a rare event", "test")
def _() -> Case:
    qat = calibrated(watchman(), alarms().x_train[:200])
    return exported(qat, alarms().x_test, alarms().y_test)


@broken("alarm, data of a tenth", "test")
def _() -> Case:
    qat = calibrated(watchman(), 0.1 * alarms().x_train[:200])
    return exported(qat, alarms().x_test, alarms().y_test)


@broken("alarm, marks for missing values", "test")
def _() -> Case:
    x = alarms().x_train[:200].copy()
    x[3, 10:20] = -999.0
    return exported(calibrated(watchman(), x), alarms().x_test, alarms().y_test)


@functools.cache
def rates() -> Any:
    """Dense layers with the exponential function, trained with the loss of Poisson."""
    keras.utils.set_random_seed(0)
    x = keras.Input((8,), name="readings")
    hidden = layers.Dense(32, "relu")(layers.Dense(32, "relu")(x))
    model = keras.Model(x, layers.Dense(1, "exponential", name="rate")(hidden))
    visits = np.random.default_rng(5).poisson(duration(3.0).y_train)
    return train(model, duration().x_train, visits, "poisson")


def visits(data: np.ndarray) -> Case:
    """Returns the network of rates with ranges from data."""
    y = np.random.default_rng(6).poisson(duration(3.0).y_test)
    return exported(calibrated(rates(), data), duration().x_test, y)


healthy("visits, rates of Poisson", "test")(lambda: visits(duration().x_train[:200]))


@broken("visits, ranges of low rates", "test")
def _() -> Case:
    x, y = duration().x_train, duration().y_train[:, 0]
    return visits(x[np.argsort(y)[:100]])


@functools.cache
def weather(scales: tuple[float, ...]) -> Split:
    """Readings, and four targets of these scales."""
    r = np.random.default_rng(7)
    x = r.normal(size=(2400, 10)).astype(np.float32)
    y = np.stack([x[:, 0] + x[:, 1], x[:, 2] * x[:, 3], np.tanh(x[:, 4]), np.abs(x[:, 5])], 1)
    return split(x, (y * scales).astype(np.float32))


@functools.cache
def forecaster(scales: tuple[float, ...]) -> Any:
    """Dense layers with four outputs, scaled at the end."""
    keras.utils.set_random_seed(0)
    x = keras.Input((10,), name="readings")
    y = layers.Dense(4, name="y")(layers.Dense(48, "relu")(layers.Dense(48, "relu")(x)))
    plain = keras.Model(x, y)
    data = weather((1.0,) * 4)
    train(plain, data.x_train, data.y_train, "mse")
    factors = np.array(scales, np.float32)
    kernel, bias = plain.layers[-1].get_weights()
    plain.layers[-1].set_weights([kernel * factors, bias * factors])
    return plain


def four(scales: tuple[float, ...]) -> Case:
    """Returns the network of four outputs."""
    data = weather(scales)
    qat = calibrated(forecaster(scales), data.x_train[:200])
    qat.compile("adam", "mse")
    return exported(qat, data.x_test, data.y_test)


healthy("four targets of one scale", "test")(lambda: four((1.0,) * 4))
broken("four targets, one is small", "test")(lambda: four((100.0, 100.0, 0.1, 50.0)))
