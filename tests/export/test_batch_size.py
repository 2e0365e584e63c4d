"""Tests `export_tflite(batch_size=...)`: all sizes are known, and the values are the same."""

import dataclasses
import functools
import warnings

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.tflite.interpreter import FileInterpreter
from keras_qat.tflite.reader import FileGraph
from tests.comparison import KERNELS
from tests.helpers import build_model, keras, layers, rng


def convolutional():
    inputs = keras.Input((6, 6, 2))
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    x = layers.Conv2DTranspose(3, 3, strides=2)(layers.MaxPooling2D()(x))
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))


def attention():
    inputs = keras.Input((6, 8))
    x = layers.Add()([inputs, layers.MultiHeadAttention(2, 4)(inputs, inputs)])
    return keras.Model(inputs, layers.EinsumDense("abc,cd->abd", (None, 3))(x))


def of_each_step():
    inputs = keras.Input((5, 6, 6, 2))
    x = layers.TimeDistributed(layers.Conv2D(3, 3))(inputs)
    x = layers.TimeDistributed(layers.Flatten())(x)
    return keras.Model(inputs, layers.TimeDistributed(layers.Dense(4))(x))


def nested():
    part_input = keras.Input((6, 6, 4))
    part = keras.Model(part_input, layers.Add()([part_input, layers.Conv2D(4, 1)(part_input)]))
    return build_model((6, 6, 4), lambda inputs: tf.reshape(part(part(inputs)), (-1, 36, 4)))


def recurrent():
    inputs = keras.Input((7, 4))
    return keras.Model(inputs, layers.Dense(3)(layers.LSTM(5)(layers.Dense(4)(inputs))))


NETWORKS = (convolutional, attention, of_each_step, nested, recurrent)


@functools.cache
def trained(network):
    keras.utils.set_random_seed(1)
    qat = keras_qat.quantize_model(network())
    x = rng(2).normal(size=(6, *qat.input_shape[1:])).astype(np.float32)
    keras_qat.calibrate(qat, x)
    return qat, x


@pytest.mark.sample(1)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_all_sizes_are_known_and_the_codes_the_same(network, size):
    qat, x = trained(network)
    contents = keras_qat.export_tflite(qat, batch_size=size)
    assert not [tensor.name for tensor in FileGraph(contents).tensors if -1 in tensor.shape]
    for kernels in KERNELS:
        files = [
            FileInterpreter(item, kernels) for item in (keras_qat.export_tflite(qat), contents)
        ]
        free, fixed = (file.run({qat.input_names[0]: x}, size) for file in files)
        for name, codes in free.items():
            np.testing.assert_array_equal(codes, fixed[name])


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("target", ["stm32_npu", "edgetpu"])
@pytest.mark.parametrize("network", NETWORKS)
def test_models_for_targets_compute_what_their_files_do(network, target):
    """XNNPACK rounds a transposed convolution with a constant output shape differently."""
    keras.utils.set_random_seed(1)
    qat = keras_qat.quantize_model(network(), target=target)
    x = rng(2).normal(size=(6, *qat.input_shape[1:])).astype(np.float32)
    keras_qat.calibrate(qat, x)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", f"target {target}: operators missing")
        contents = keras_qat.export_tflite(qat)
    for kernels in KERNELS:
        qat.kernels = kernels
        assert keras_qat.verify(qat, contents, x, kernels=kernels, per_layer=True).identical == 1


def test_a_target_of_the_users_own_knows_the_size():
    """XNNPACK then computes the transposed convolution, and the model rounds like XNNPACK."""
    place = dataclasses.replace(keras_qat.targets.XNNPACK, name="phone", batch_size=1)
    qat = keras_qat.quantize_model(convolutional(), target=place)
    x = rng(2).normal(size=(6, 6, 6, 2)).astype(np.float32)
    keras_qat.calibrate(qat, x)
    contents = keras_qat.export_tflite(qat)
    assert "SHAPE" not in [operation.kernel for operation in FileGraph(contents).operations]
    assert keras_qat.verify(qat, contents, x).identical == 1
    simulated = keras_qat.simulate(qat, x).outputs[qat.output_names[0]]
    np.testing.assert_allclose(qat.predict(x, verbose=0), simulated.values, rtol=0, atol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("network", NETWORKS)
def test_tflite_micro_computes_what_the_model_does(network):
    pytest.importorskip("tflite_micro")
    qat, x = trained(network)
    qat.kernels = "tflm"
    contents = keras_qat.export_tflite(qat, batch_size=1)
    report = keras_qat.verify(qat, contents, x, kernels="tflm", per_layer=True)
    assert report.identical == 1
    assert not report.differing
    assert 500 < report.arena_size < 40_000
    simulated = keras_qat.simulate(qat, x, "tflm").outputs[qat.output_names[0]]
    np.testing.assert_allclose(qat.predict(x, verbose=0), simulated.values, rtol=0, atol=1e-6)


def test_tflite_micro_says_why_it_refuses_a_file():
    pytest.importorskip("tflite_micro")
    qat = keras_qat.quantize_model(build_model((4,), tf.nn.gelu))
    x = rng(1).normal(size=(8, 4)).astype(np.float32)
    keras_qat.calibrate(qat, x)
    with pytest.raises(ValueError, match=r"needs fixed sizes, but .* Export with batch_size=1"):
        keras_qat.verify(qat, keras_qat.export_tflite(qat), x, kernels="tflm")
    with pytest.raises(ValueError, match="Didn't find op for builtin opcode 'GELU'"):
        keras_qat.verify(qat, keras_qat.export_tflite(qat, batch_size=1), x, kernels="tflm")


@pytest.mark.parametrize(("own", "given", "asks"), [(None, None, 1), (None, 2, 1), (2, None, 0)])
def test_transposed_convolutions_ask_for_a_size_that_the_model_leaves_open(own, given, asks):
    """XNNPACK would compute other convolutions, and round differently from the model."""
    inputs = keras.Input((3, 3, 2), own)
    qat = keras_qat.quantize_model(
        keras.Model(inputs, layers.Conv2DTranspose(3, 3, strides=2)(inputs))
    )
    qat(rng().normal(size=(2, 3, 3, 2)).astype(np.float32), training=True)
    file = FileInterpreter(keras_qat.export_tflite(qat, batch_size=given))
    assert [name for name, *_ in file.operations()].count("SHAPE") == asks


def test_rows_that_layers_mix_stay_together():
    """A file of a single node would gather rows that it does not have."""
    inputs = keras.Input(batch_shape=(4, 3))
    neighbours = tf.gather(layers.Dense(2)(inputs), [1, 2, 3, 0])
    qat = keras_qat.quantize_model(keras.Model(inputs, layers.Dense(2)(neighbours)))
    x = rng().normal(size=(4, 3)).astype(np.float32)
    keras_qat.calibrate(qat, x)
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), x).identical == 1
    (rows,) = FileGraph(keras_qat.export_tflite(qat, target="tflm")).inputs.values()
    assert rows.shape == (4, 3)
    with pytest.raises(ValueError, match=r"batch_size=1: '.*' computes together 4 examples"):
        keras_qat.export_tflite(qat, batch_size=1)
