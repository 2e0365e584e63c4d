"""A short training run that continues from the state of an earlier, killed run."""

import dataclasses
import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import keras_qat
from keras_qat.callbacks import FreezeBatchNorm, QuantDelay
from tests.helpers import keras, values

STEPS_PER_EPOCH, EPOCHS = 3, 10
TOTAL = STEPS_PER_EPOCH * EPOCHS
DELAY, FREEZE = 9, 18
EVERY = 2
"""Steps between saves, unless models are saved after epochs."""
END = "end.npz"
"""The file of a completed run: all weights, including the optimizer's."""


def network() -> Any:
    """Returns convolution, BatchNormalization and a branch. Weights differ in a new process."""
    layers = keras.layers
    inputs = keras.Input((6, 6, 2), name="image")
    x = layers.Conv2D(4, 3, padding="same", use_bias=False, name="conv")(inputs)
    x = layers.ReLU(name="relu")(layers.BatchNormalization(name="norm")(x))
    x = layers.Add(name="add")([x, layers.Conv2D(4, 1, name="branch")(x)])
    return keras.Model(inputs, layers.Dense(3, name="logits")(layers.Flatten(name="flat")(x)))


def batches(first_step: int) -> tf.data.Dataset:
    """Returns batches from a training step on. Each only depends on the number of its step."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(48, 6, 6, 2)).astype(np.float32)
    y = rng.integers(0, 3, 48)

    def batch(step: Any) -> Any:
        chosen = tf.random.stateless_uniform([8], [7, step], 0, 48, tf.int32)
        return tf.gather(x, chosen), tf.gather(y, chosen)

    return tf.data.Dataset.range(first_step, TOTAL).map(batch)


def compiled(qat: Any) -> Any:
    qat.compile(
        keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return qat


@dataclasses.dataclass
class Start:
    """The state in which a run begins."""

    model: Any
    done: int
    callback: Any


def from_backup(folder: Path, make: Callable[[], Any], save_freq: Any = "epoch") -> Start:
    """Continues with `BackupAndRestore`, which restores the model in `fit`, but not the data."""
    done, newest = 0, tf.train.latest_checkpoint(folder / "backup" / "chief")
    if newest is not None:
        epoch, batch = (
            int(tf.train.load_variable(newest, f"ckpt_saved_{name}/.ATTRIBUTES/VARIABLE_VALUE"))
            for name in ("epoch", "batch")
        )
        done = epoch * STEPS_PER_EPOCH + batch + 1
        if save_freq == "epoch":
            done = (epoch + 1) * STEPS_PER_EPOCH
    keep = keras.callbacks.BackupAndRestore(
        str(folder / "backup"), save_freq=save_freq, delete_checkpoint=False
    )
    return Start(compiled(make()), done, keep)


def from_model(folder: Path, make: Callable[[], Any]) -> Start:
    path = folder / "model.keras"
    keep = keras.callbacks.ModelCheckpoint(str(path))
    if not path.exists():
        return Start(compiled(make()), 0, keep)
    qat = keras.models.load_model(path)
    return Start(qat, int(qat.optimizer.iterations), keep)


def from_weights(folder: Path, make: Callable[[], Any]) -> Start:
    """Continues with `ModelCheckpoint` of weights and optimizer in one file."""
    path = folder / "qat.weights.h5"
    return _from_weights(path, path if path.exists() else None, make)


def from_checkpoint(folder: Path, make: Callable[[], Any]) -> Start:
    """Continues from TensorFlow's format: several files, so each save needs a new name."""
    name = "{epoch:02d}"
    return _from_weights(folder / name, tf.train.latest_checkpoint(folder), make)


def _from_weights(path: Path, newest: Any, make: Callable[[], Any]) -> Start:
    keep = keras.callbacks.ModelCheckpoint(str(path), save_weights_only=True)
    qat = compiled(make())
    qat.optimizer.build(qat.trainable_variables)
    if newest is not None:
        qat.load_weights(str(newest))
    return Start(qat, int(qat.optimizer.iterations), keep)


WAYS: dict[str, Callable[..., Start]] = {
    "none": lambda folder, make: Start(compiled(make()), 0, keras.callbacks.Callback()),
    "backup": lambda folder, make: from_backup(folder, make, EVERY),
    "backup-epochs": from_backup,
    "model": from_model,
    "weights": from_weights,
    "checkpoint": from_checkpoint,
}
"""How to continue. "none" does not continue."""


def run(folder: Path, way: str, recipe: str, doomed: bool, told: Any) -> None:
    """Trains from the state in `folder` to the end, and writes all results to `END`.

    Args:
        folder: the folder that runs share.
        way: one of `WAYS`.
        recipe: the recipe's name.
        doomed: whether it waits to be killed before the last step.
        told: a connection that receives the number of every step before it begins, from 0.
    """
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.utils.set_random_seed(5)
    start = WAYS[way](folder, lambda: keras_qat.quantize_model(network(), recipe))
    steps = itertools.count(start.done)

    def tell(*_: Any, **__: Any) -> None:
        step = next(steps)
        told.send(step)
        if doomed and step == TOTAL - 1:
            signal.pause()

    telling = keras.callbacks.LambdaCallback(on_batch_begin=tell)
    if start.done < TOTAL:
        start.model.fit(
            batches(start.done),
            initial_epoch=start.done // STEPS_PER_EPOCH,
            epochs=EPOCHS,
            steps_per_epoch=STEPS_PER_EPOCH,
            verbose=0,
            callbacks=[telling, start.callback, QuantDelay(DELAY), FreezeBatchNorm(FREEZE)],
        )
    state = [*start.model.weights, *start.model.optimizer.variables]
    np.savez(folder / END, *values(state))
