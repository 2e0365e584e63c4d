"""Train, quantize, fine-tune and export on the workers of a cluster, which have `TF_CONFIG` set.

    python tutorials/cluster.py --folder /shared                   # on each worker of a cluster
    python tutorials/cluster.py --folder /tmp/cluster --workers 2  # two processes on this machine

Started again after a kill, the workers go on from the last epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="a folder that all workers see")
    parser.add_argument("--workers", type=int, help="start so many processes on this machine")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.workers:
        sys.exit(start(arguments.workers, arguments.folder))
    work(arguments.folder)


def start(count: int, folder: Path) -> int:
    """Starts the workers as processes of this machine; returns how many of them failed."""
    sockets = [socket.create_server(("localhost", 0)) for _ in range(count)]
    addresses = [f"localhost:{server.getsockname()[1]}" for server in sockets]
    for server in sockets:
        server.close()
    workers = []
    for index in range(count):
        task = {"type": "worker", "index": index}
        cluster = {"cluster": {"worker": addresses}, "task": task}
        environment = {**os.environ, "TF_CONFIG": json.dumps(cluster)}
        command = [sys.executable, __file__, "--folder", str(folder)]
        workers.append(subprocess.Popen(command, env=environment))
    return sum(worker.wait() != 0 for worker in workers)


def work(folder: Path) -> None:
    """What each worker does."""
    import tensorflow as tf
    from sklearn.datasets import load_digits

    import keras_qat
    from keras_qat.keras2.backend import keras

    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # Before anything else of TensorFlow.
    index = strategy.cluster_resolver.task_id
    count = strategy.cluster_resolver.cluster_spec().num_tasks("worker")

    digits = load_digits()
    x = (digits.images[..., None] / 16).astype(np.float32)
    y = digits.target
    batches = tf.data.Dataset.from_tensor_slices((x[:1536], y[:1536])).batch(64).repeat()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA

    batches = batches.with_options(options)

    def train(model: keras.Model, name: str, epochs: int, learning_rate: float) -> None:
        with strategy.scope():
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(learning_rate), loss, metrics=["accuracy"])
        backup = keras.callbacks.BackupAndRestore(str(folder / name), delete_checkpoint=False)
        verbose = 2 if index == 0 else 0
        model.fit(batches, epochs=epochs, steps_per_epoch=24, verbose=verbose, callbacks=[backup])

    keras.utils.set_random_seed(1)
    with strategy.scope():
        image = keras.Input((8, 8, 1))
        features = keras.layers.Conv2D(16, 3, activation="relu")(image)
        model = keras.Model(image, keras.layers.Dense(10)(keras.layers.Flatten()(features)))
    train(model, "float", epochs=5, learning_rate=3e-3)
    with strategy.scope():
        qat = keras_qat.quantize_model(model)
    keras_qat.calibrate(qat, x[:1536][index::count])  # Each its share; the ranges are those of all.
    train(qat, "quantized", epochs=2, learning_rate=3e-4)
    qat.save(folder / ("qat.keras" if index == 0 else f"worker_{index}.keras"))  # All have to.
    if index == 0:
        keras_qat.export_tflite(qat, folder / "model.tflite")
        print(keras_qat.verify(qat, folder / "model.tflite", x[1536:], y[1536:]), flush=True)


if __name__ == "__main__":
    main()
