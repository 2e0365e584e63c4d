"""Programs that run on several devices or workers, each in a separate process."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import keras_qat
from keras_qat.callbacks import FreezeBatchNorm, QuantDelay
from keras_qat.keras2.backend import keras
from tests.helpers import save_and_load

X = np.random.default_rng(0).normal(size=(64, 8, 8, 3)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, 64)
DELAY, FREEZE = 3, 7
STEPS_PER_EPOCH, EPOCHS = 4, 3


def network(synchronized: bool = False) -> Any:
    """Returns a network with a convolution, BatchNormalization and a branch."""
    layers = keras.layers
    keras.utils.set_random_seed(3)
    inputs = keras.Input((8, 8, 3), name="image")
    x = layers.Conv2D(4, 3, padding="same", use_bias=False)(inputs)
    x = layers.BatchNormalization(momentum=0.8, synchronized=synchronized)(x)
    x = layers.ReLU()(x)
    x = layers.ReLU()(layers.add([x, layers.Conv2D(4, 1)(x)]))
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


def train(
    qat: Any, x: Any = X, y: Any = Y, steps_per_execution: int = 1, freeze: int = FREEZE
) -> Any:
    """Compiles and fits. Quantization begins and BatchNormalization freezes during training."""
    with qat.distribute_strategy.scope():
        qat.compile(
            keras.optimizers.SGD(0.05),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=steps_per_execution,
        )
    callbacks = [QuantDelay(DELAY), FreezeBatchNorm(freeze)]
    qat.fit(x, y, batch_size=16, epochs=EPOCHS, verbose=0, shuffle=False, callbacks=callbacks)
    return qat


def two_devices() -> Any:
    """Returns a strategy with two replicas on one processor. Call it before TensorFlow runs."""
    halves = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], halves)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def assert_replicas_agree(qat: Any) -> None:
    for weight in qat.weights:
        one, other = (replica.numpy() for replica in weight.values)
        np.testing.assert_array_equal(one, other, weight.name)


def mirrored(recipe: str) -> None:
    """Replicas are equal, and so are `predict`, a call and the file."""
    strategy = two_devices()
    with strategy.scope():
        qat = keras_qat.quantize_model(network(), recipe)
    train(qat, freeze=DELAY)  # Both begin at once, which saves tracing a phase.
    assert_replicas_agree(qat)
    predicted = qat.predict(X, verbose=0)
    np.testing.assert_allclose(predicted, qat(X), rtol=0, atol=1e-6)
    tflite = keras_qat.export_tflite(qat)
    if recipe == "int8":
        assert keras_qat.verify(qat, tflite, X).identical == 1
        codes = keras_qat.simulate(qat, X).outputs[qat.output_names[0]]
        np.testing.assert_allclose(predicted, codes.values, rtol=0, atol=1e-6)


def saved(recipe: str, folder: Path) -> None:
    """A trained model writes one file: in the scope, without it, and loaded. Losses show NaN."""
    strategy = two_devices()
    with strategy.scope():
        qat = keras_qat.quantize_model(network(), recipe)
    tflite = keras_qat.export_tflite(train(qat))
    with strategy.scope():
        assert keras_qat.export_tflite(qat) == tflite
    qat.save(folder / "qat.keras")
    assert keras_qat.export_tflite(keras.models.load_model(folder / "qat.keras")) == tflite
    (kernel, *_) = (weight for weight in qat.weights if "kernel" in weight.name)
    kernel.assign(np.full(kernel.shape, np.nan))
    assert recipe != "int8" or np.isnan(qat.evaluate(X, Y, verbose=0, return_dict=True)["loss"])


def verbs(folder: Path) -> None:
    """Calls all functions for a model under a strategy, inside and outside of its scope."""
    strategy = two_devices()
    made = network()
    with strategy.scope():
        outside = keras_qat.quantize_model(made)  # The float model is not under the strategy.
        inside = network()
    for qat in (outside, keras_qat.quantize_model(inside)):
        assert qat.distribute_strategy is strategy
        assert all(len(weight.values) == 2 for weight in qat.weights)
        keras_qat.calibrate(qat, X)
        assert_replicas_agree(qat)
    with strategy.scope():
        keras_qat.calibrate(qat, X, batch_size=16)
        tflite = keras_qat.export_tflite(qat)
        assert keras_qat.verify(qat, tflite, X, per_layer=True).identical == 1
    assert keras_qat.export_tflite(keras_qat.quantize_model(qat)) == tflite
    keras_qat.strip_quantization(qat).save(folder / "float.keras")
    keras_qat.export_saved_model(qat, folder / "saved_model")
    with strategy.scope():
        loaded = save_and_load(qat, folder / "qat.h5")
    assert keras_qat.export_tflite(loaded) == tflite
    assert_replicas_agree(train(loaded))


def loops(recipe: str) -> None:
    """Trains in graphs with branches: several steps per execution, and a custom training loop."""
    strategy = two_devices()
    for synchronized in (False, True):
        with strategy.scope():
            qat = keras_qat.quantize_model(network(synchronized), recipe)
            optimizer = keras.optimizers.SGD(0.05)
        train(qat, steps_per_execution=4)
        assert_replicas_agree(qat)
        keras_qat.freeze_batch_norm(qat, False)
        custom_loop(strategy, qat, optimizer)
        assert_replicas_agree(qat)


def custom_loop(strategy: Any, qat: Any, optimizer: Any) -> None:
    @tf.function
    def step(x: Any) -> None:
        def on_replica(x: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(qat(x, training=True)))
            weights = qat.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

        strategy.run(on_replica, (x,))

    batches = tf.data.Dataset.from_tensor_slices(X[:32]).batch(16)
    for batch in strategy.experimental_distribute_dataset(batches):
        step(batch)


def get_kind(weight: Any) -> str:
    if weight.trainable:
        return "weights"
    if "moving" in weight.name:
        return "statistics"
    return "ranges" if weight.dtype == tf.float32 else "counters"


def against_one_device(recipe: str, alike: bool, told: Any) -> None:
    """Sends the largest differences between two replicas and one device, by kind of weight.

    BatchNormalization is synchronized. Differences of weights are absolute, others are relative.
    """
    two, x, y = two_devices(), X, Y
    if alike:  # Both replicas read the same examples.
        x, y = (np.repeat(item[:32].reshape(4, 1, 8, -1), 2, 1) for item in (X, Y))
        x, y = x.reshape(X.shape), y.reshape(Y.shape)
    trained = []
    for strategy in (two, tf.distribute.OneDeviceStrategy("CPU:0")):
        with strategy.scope():
            trained.append(
                train(keras_qat.quantize_model(network(synchronized=True), recipe), x, y)
            )
    differences: dict[str, float] = {}
    for one, other in zip(*(item.weights for item in trained), strict=True):
        difference, kind = np.abs(one.numpy().astype(float) - other.numpy()).max(), get_kind(other)
        if kind != "weights":
            difference /= max(np.abs(other.numpy()).max(), 1e-9)
        differences[kind] = max(differences.get(kind, 0.0), float(difference))
    told.send(differences)


def in_cluster(index: int, ports: list[int], devices: int) -> Any:
    """Returns the strategy of a worker of a cluster, with several replicas on its processor."""
    task = {"type": "worker", "index": index}
    cluster = {"worker": [f"localhost:{port}" for port in ports]}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    if devices > 1:
        parts = [tf.config.LogicalDeviceConfiguration()] * devices
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
    return tf.distribute.MultiWorkerMirroredStrategy()


def shares_the_work(index: int, ports: list[int], folder: Path) -> None:
    """A worker calibrates with its share of the data."""
    strategy = in_cluster(index, ports, devices=2) if len(ports) > 1 else two_devices()
    with strategy.scope():
        model = network()
        qat = keras_qat.quantize_model(model)
    results = []
    for method in ("minmax", "percentile", "mse"):
        keras_qat.calibrate(qat, np.array_split(X, len(ports))[index], method=method)
        results += [weight.numpy() for weight in qat.weights]
    np.savez(folder / f"{len(ports)}_{index}.npz", *results)
    os._exit(0)


def shares_the_rounding(index: int, ports: list[int], folder: Path) -> None:
    """A worker learns the rounding of 4-bit weights, with the same data as the others."""
    alone = len(ports) == 1
    strategy = tf.distribute.get_strategy() if alone else in_cluster(index, ports, devices=2)
    with strategy.scope():
        qat = keras_qat.quantize_model(network(), "int4_weights")
    keras_qat.calibrate(qat, np.array_split(X, len(ports))[index])
    kernels = [weight for weight in qat.weights if "kernel" in weight.name]
    before = [kernel.numpy() for kernel in kernels]
    keras_qat.learn_rounding(qat, X, iterations=200, learning_rate=0.05, weights="minmax")
    codes = []
    for kernel, old in zip(kernels, before, strict=True):
        step = np.abs(old).max(axis=tuple(range(old.ndim - 1))) / 7
        codes += [np.round(kernel.numpy() / step), np.round(old / step)]
    np.savez(folder / f"{len(ports)}_{index}.npz", *codes)
    os._exit(0)


def worker(
    index: int, ports: list[int], recipe: str, folder: Path, dies: bool = False, devices: int = 1
) -> None:
    """Runs one of several workers of a cluster. The second may be killed in the last epoch."""
    strategy = in_cluster(index, ports, devices)
    with strategy.scope():
        qat = keras_qat.quantize_model(network(), recipe)
        qat.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def begin(epoch: int, logs: Any = None) -> None:
        if dies and index == 1 and epoch == EPOCHS - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        qat.fit(
            shared_batches(),
            epochs=EPOCHS,
            steps_per_epoch=STEPS_PER_EPOCH,
            verbose=0,
            callbacks=[
                keras.callbacks.LambdaCallback(on_epoch_begin=begin),
                keras.callbacks.BackupAndRestore(str(folder / "backup"), delete_checkpoint=False),
                QuantDelay(DELAY),
                FreezeBatchNorm(FREEZE),
            ],
        )
    except tf.errors.UnavailableError:
        os._exit(UNAVAILABLE)
    np.savez(folder / f"{index}.npz", *(weight.numpy() for weight in qat.weights))
    if index == 0:
        exports_by_itself(qat, strategy, folder)
    else:  # It exists, but does not take part.
        while not (folder / "qat.tflite").exists():
            time.sleep(0.1)
    qat.save(folder / f"{index}.keras")  # All workers do: Keras adds their metrics.
    os._exit(0)  # TensorFlow would wait for workers that have ended.


UNAVAILABLE = 3
"""Exit code of a worker that has lost another worker."""


def shared_batches() -> tf.data.Dataset:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(16).repeat().with_options(options)


def exports_by_itself(qat: Any, strategy: Any, folder: Path) -> None:
    """Runs functions that one worker may call while the others do something else."""
    tflite = keras_qat.export_tflite(qat)
    with strategy.scope():
        assert keras_qat.export_tflite(qat) == tflite
        identical = keras_qat.verify(qat, tflite, X).identical
    assert keras_qat.verify(qat, tflite, X).identical == identical
    if qat.recipe.name == "int8":
        assert identical == 1
    keras_qat.simulate(qat, X[:4])
    keras_qat.export_saved_model(qat, folder / "saved_model")
    keras_qat.export_tflite(qat, folder / "qat.tflite")


def server(cluster: dict[str, list[str]], kind: str, index: int) -> None:
    """Runs one server of a cluster with parameter servers, until it is killed."""
    tf.distribute.Server(cluster, job_name=kind, task_index=index, protocol="grpc").join()


def coordinator(cluster: dict[str, list[str]], recipe: str) -> None:
    """Trains on workers that do not wait for each other, and exports."""
    spec = tf.train.ClusterSpec(cluster)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    with strategy.scope():
        qat = keras_qat.quantize_model(network(), recipe)
        qat.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    callbacks = [QuantDelay(DELAY), FreezeBatchNorm(FREEZE)]
    qat.fit(shared_batches(), epochs=2, steps_per_epoch=6, verbose=0, callbacks=callbacks)
    assert {int(weight) for weight in qat.weights if weight.name.endswith("/step:0")} == {12}
    identical = keras_qat.verify(qat, keras_qat.export_tflite(qat), X).identical
    assert identical == 1 or recipe == "contrib"
    os._exit(0)
