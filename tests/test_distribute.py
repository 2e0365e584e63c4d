"""Training on several replicas, `tf.distribute.MirroredStrategy`."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

PROGRAM = textwrap.dedent(
    """
    import sys

    import numpy as np
    import tensorflow as tf

    # Two replicas on one processor. This has to come before anything else runs.
    halves = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], halves)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    import keras_qat
    from keras_qat.keras2.backend import keras

    recipe = keras_qat.recipes.get(sys.argv[1])
    with strategy.scope():
        inputs = keras.Input((8, 8, 3))
        x = keras.layers.Conv2D(4, 3, padding="same", use_bias=False)(inputs)
        x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
        x = keras.layers.ReLU()(keras.layers.add([x, keras.layers.Conv2D(4, 1)(x)]))
        x = keras.layers.GlobalAveragePooling2D()(x)
        model = keras.Model(inputs, keras.layers.Dense(3)(x))
        qat = keras_qat.quantize_model(model, recipe)
        qat.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(64, 8, 8, 3)).astype("float32")
    callbacks = [keras_qat.callbacks.QuantDelay(3), keras_qat.callbacks.FreezeBatchNorm(6)]
    qat.fit(x, np.ones((64, 3)), batch_size=16, epochs=2, verbose=0, callbacks=callbacks)

    ranges = [each for each in qat.weights if "_min" in each.name or "_max" in each.name]
    assert len(ranges) > 6
    for each in ranges:
        one, other = (replica.numpy() for replica in each.values)
        assert np.array_equal(one, other), (each.name, one, other)
    qat.save(sys.argv[2])
    """
)


@pytest.mark.parametrize("recipe", ["int8", "contrib"])
def test_replicas_share_their_ranges(recipe, tmp_path):
    """Each sees another part of the batch; the file can hold but one range for a tensor."""
    import keras_qat
    from keras_qat.keras2.backend import keras
    from tests.helpers import rng

    path = tmp_path / "qat.keras"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, recipe, str(path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    if recipe == "int8":
        qat = keras.models.load_model(path)
        x = rng().normal(size=(64, 8, 8, 3)).astype("float32")
        assert keras_qat.verify(qat, keras_qat.export_tflite(qat), x).identical >= 0.98
