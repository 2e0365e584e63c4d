"""Tests every family of layers in int8: values of model, simulation and file, and operators."""

import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.comparison import export
from tests.helpers import build_model, keras
from tests.networks.small import functional, layers

pytestmark = pytest.mark.filterwarnings("error:The weights of .* rounded again")


def test_something_like_hard_swish_is_not_taken_for_it():
    def build(x):
        gate = tf.nn.relu6(x + 3.0)
        return [x * (tf.nn.relu6(x + 2.0) / 6.0), x * (gate / 6.0), gate]

    plan = keras_qat.plan(functional((6,), build=build))
    # If the gate has another consumer, it must be computed.
    assert not any(row.layer == "HardSwish" for row in plan.rows)


def test_embedding_reads_integers():
    model = keras.Sequential(
        [
            keras.Input((6,), dtype="int32", name="tokens"),
            layers.Embedding(20, 4),
            layers.Conv1D(3, 3, activation="relu"),
            layers.GlobalAveragePooling1D(),
            layers.Dense(2),
        ]
    )
    tokens = np.random.default_rng(0).integers(0, 20, (64, 6)).astype(np.int32)
    plan = keras_qat.plan(model)
    assert plan.rows[0].spec is None and "int32" in plan.rows[0].reason
    result = export(model, tokens, strict=True)
    assert result.file.inputs["tokens"].dtype == np.int32
    assert "GATHER" in result.operations
    assert all(np.float32 not in reads + writes for _, reads, writes in result.file.operations())
    assert (result.report.identical, result.report.max_difference) == (1, 0)


def test_embedding_of_float_indices_quantizes_no_indices():
    qat = keras_qat.quantize_model(build_model((5,), layers.Embedding(300, 4)))
    names = [quantizer.name for quantizer in keras_qat.quantizers(qat)]
    assert not any("input" in name for name in names)
    x = np.arange(5, dtype=np.float32)[None] + 256
    assert np.isfinite(qat(x, training=True)).all()


@pytest.mark.slow
def test_grouped_convolutions_where_tensorflow_does_without_onednn():
    """TensorFlow fuses a bias with a grouped convolution, but cannot compute the result."""
    program = """
import numpy as np
import keras_qat
from keras_qat import keras

inputs = keras.Input((8, 8, 8))
outputs = keras.layers.Conv2D(8, 3, groups=4, activation="relu", bias_initializer="ones")(inputs)
x = np.random.default_rng(1).normal(size=(16, 8, 8, 8)).astype(np.float32)
qat = keras_qat.quantize_model(keras.Model(inputs, outputs))
keras_qat.calibrate(qat, x)
file = keras_qat.TFLiteModel(keras_qat.export_tflite(qat))
assert np.array_equal(file.predict(x), qat.predict(x, verbose=0))
"""
    env = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"}  # TensorFlow reads it when it is imported.
    subprocess.run([sys.executable, "-c", program], env=env, check=True)
