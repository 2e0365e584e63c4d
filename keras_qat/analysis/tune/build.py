"""Quantizes a float model with given settings, and trains the result."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_qat.analysis.tune.score import Arrays, Judge, unwrap
from keras_qat.config.recipe import Recipe
from keras_qat.config.targets import Target
from keras_qat.integer_graph.passes import has_int4, pack_int4
from keras_qat.integer_graph.resolve import resolve
from keras_qat.io.data import read_arrays
from keras_qat.keras2.backend import keras
from keras_qat.rewriting.quantize import quantize_model
from keras_qat.rewriting.quantized_model import QuantizedModel
from keras_qat.training.calibration.calibrate import calibrate
from keras_qat.training.calibration.histogram import Method
from keras_qat.training.callbacks import FreezeBatchNorm
from keras_qat.training.post_training import bias_correction, learn_rounding

CALIBRATED, ROUNDED = 512, 256
"""Maximum number of examples for `calibrate`, and for `learn_rounding` and `bias_correction`."""

BATCH = 32
SLOWER = 0.1
"""The learning rate of the float model's optimizer is multiplied by this."""

RATE = 1e-4
"""The learning rate if the float model has no optimizer, or uses a learning rate schedule."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to quantize a float model in one attempt of `tune`.

    Args:
        recipe: the recipe of `quantize_model`.
        method: the method of `calibrate`.
        corrects_bias: whether to call `bias_correction`.
        learns_rounding: whether to call `learn_rounding`, which also corrects biases.
        outputs: the `outputs` of `quantize_model`. () means the outputs of the model.
        packs: whether files store two 4-bit weights in a byte.
        epochs: number of epochs of training after all other steps. 0 means no training.
    """

    recipe: Recipe
    method: Method = "minmax"
    corrects_bias: bool = False
    learns_rounding: bool = False
    outputs: tuple[str, ...] = ()
    packs: bool = False
    epochs: int = 0

    def describe(self) -> str:
        """Format the settings for the table, such as "calibrate, bias_correction"."""
        steps = [] if self.recipe.name == "int8" else [self.recipe.name]
        overrides = self.recipe.overrides
        steps += [f"{one.layers} in float" for one in overrides if one.quantize is False]
        if self.packs:
            ends = ", 8 bits in the first and last layers" if self.recipe.end_bits else ""
            steps.append(f"4-bit weights{ends}")
        steps += [f"outputs={list(self.outputs)}"] if self.outputs else []
        steps.append("calibrate" if self.method == "minmax" else f"calibrate({self.method!r})")
        steps += ["bias_correction"] * self.corrects_bias
        steps += ["learn_rounding"] * self.learns_rounding
        steps += [f"fit, {self.epochs} epochs"] if self.epochs else []
        return ", ".join(steps)


class Data(NamedTuple):
    """All examples of a data set.

    Args:
        x: an array for each input of the model.
        y: an array of labels for each output of the model. None without labels.
    """

    x: Arrays
    y: Arrays | None

    def take(self, count: int) -> Arrays | np.ndarray:
        """Return the inputs of `count` evenly spaced examples, as `model.predict` accepts them."""
        every = max(1, len(self.x[0]) // count)
        return unwrap([x[::every][:count] for x in self.x])


def read_data(model: keras.Model, data: Any) -> Data:
    """Copy the data that a user passed to `tune` into arrays.

    A dataset is read only once, because it may shuffle and augment differently each time.
    """
    is_dataset = isinstance(data, tf.data.Dataset)
    if is_dataset and data.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError("The dataset never ends. Limit it, for example with data.take(100).")
    if is_dataset or isinstance(data, keras.utils.Sequence):
        items = data if is_dataset else (data[i] for i in range(len(data)))
        read = [keras.utils.unpack_x_y_sample_weight(item)[:2] for item in items]
        x = read_arrays(model, [(batch, None) for batch, _ in read])
        labels = [y for _, y in read]
    else:
        inputs, *rest = data if isinstance(data, tuple) else (data,)
        x, labels = read_arrays(model, inputs), rest[:1] or [None]
    if any(part is None for part in labels):
        return Data(x, None)
    columns = zip(*map(tf.nest.flatten, labels), strict=True)
    y = [np.concatenate([np.asarray(part) for part in column]) for column in columns]
    if any(len(column) != len(x[0]) for column in y):
        raise ValueError(f"There are {len(x[0])} examples but {len(y[0])} labels.")
    if len(y) != len(model.outputs):
        raise ValueError(
            f"'{model.name}' has {len(model.outputs)} outputs, but there are labels for {len(y)}. "
            f"Pass labels for all outputs, or none."
        )
    return Data(x, y)


@dataclasses.dataclass
class Builder:
    """Creates quantized models from one float model.

    Args:
        model: the float model.
        target: the device or runtime of the exported file, or None.
        train: the training data.
        judge: scores the model after each epoch of training.
        seed: the seed of training and of `learn_rounding`.
        minutes: training stops this many minutes after the builder was created.
    """

    model: keras.Model
    target: Target | None
    train: Data
    judge: Judge
    seed: int
    minutes: float

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + 60 * self.minutes
        self.is_cut_short = False
        """Whether the time was used up during training in the last call of `build`."""

    def build(self, settings: Settings) -> QuantizedModel:
        self.is_cut_short = False
        outputs = settings.outputs or None
        qat = quantize_model(self.model, settings.recipe, target=self.target, outputs=outputs)
        calibrate(qat, self.train.take(CALIBRATED), method=settings.method)
        if settings.packs:  # Small models may have only first and last layers, with 8 bits.
            qat.pack_int4 = has_int4(pack_int4(resolve(qat)))
        if settings.learns_rounding:
            learn_rounding(qat, self.train.take(ROUNDED), seed=self.seed)
        if settings.corrects_bias:
            bias_correction(qat, self.train.take(ROUNDED))
        if settings.epochs:
            self._fit(qat, settings.epochs)
        return qat

    def _fit(self, qat: QuantizedModel, epochs: int) -> None:
        """Train with the float model's loss. Without labels or loss, use "mse" or "kl_divergence".

        The targets are then the outputs of the float model.
        """
        keras.utils.set_random_seed(self.seed)
        x, y = self.train
        batches = -(-len(x[0]) // BATCH)
        optimizer = self._make_optimizer(epochs * batches)
        best = KeepBest(qat, self.judge, self.deadline)
        callbacks = [FreezeBatchNorm(epochs * batches // 2, model=qat), best]
        if y is not None and getattr(self.model, "_is_compiled", False):
            config = self.model.get_compile_config()
            qat.compile_from_config({**config, "optimizer": keras.optimizers.serialize(optimizer)})
            labels = unwrap(y)
        else:
            qat.compile(optimizer, "kl_divergence" if self.judge.has_probabilities else "mse")
            labels = self.model.predict(unwrap(x), BATCH, verbose=0)
        qat.fit(unwrap(x), labels, BATCH, epochs, verbose=0, callbacks=callbacks)
        qat.set_weights(best.weights)
        self.is_cut_short = best.is_cut_short

    def _make_optimizer(self, steps: int) -> keras.optimizers.Optimizer:
        """Copy the float model's optimizer, with a smaller learning rate that decays to 0."""
        used = getattr(self.model, "optimizer", None)
        kind, config = keras.optimizers.Adam, {}
        if isinstance(used, keras.optimizers.Optimizer):
            kind, config = type(used), used.get_config()
        rate = config.get("learning_rate", {})
        rate = RATE if isinstance(rate, dict) else SLOWER * float(rate)
        schedule = keras.optimizers.schedules.CosineDecay(rate, steps)
        return kind.from_config({**config, "learning_rate": schedule})


class KeepBest(keras.callbacks.Callback):
    """Keeps the weights of the epoch with the best validation score, and stops at a deadline."""

    def __init__(self, qat: QuantizedModel, judge: Judge, deadline: float) -> None:
        super().__init__()
        self.qat, self.judge, self.deadline = qat, judge, deadline
        self.drop, self.weights = judge.score(qat).drop, qat.get_weights()
        self.is_cut_short = False

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        if time.monotonic() > self.deadline:
            self.model.stop_training = self.is_cut_short = True

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        drop = self.judge.score(self.qat).drop
        if drop < self.drop:
            self.drop, self.weights = drop, self.qat.get_weights()
