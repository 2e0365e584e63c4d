"""Tests verification of each layer in files with unusual inputs and outputs.

Examples are outputs inside the model, a first axis that is not the batch, several results, and
layers that are random in training.
"""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.analysis.verify.test_layers import row
from tests.helpers import images, keras, observe, rng, scramble
from tests.networks.small import functional, layers


def test_a_model_whose_layers_are_all_outputs():
    """Outputs have different names in the file than in the model."""
    model = functional(
        (6, 6, 4), build=lambda x: [layers.Conv2D(3, 3, name="a")(x), layers.ReLU(name="b")(x)]
    )
    x = images(32, (6, 6, 4))
    qat = observe(keras_qat.quantize_model(scramble(model)), x)
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), x, per_layer=True)
    assert {tensor.name for tensor in report.tensors[1:]} == {"a", "b"}
    assert report.differing == ()


def each_step(*args, **options):
    return layers.TimeDistributed(layers.Dense(*args, **options))


def attention(x):
    x = layers.Dense(8)(x)
    return layers.MultiHeadAttention(2, 4)(x, x)


def heads_first(x):
    x = layers.Dense(24)(x)
    x = tf.transpose(tf.reshape(x, (-1, 12, 3, 8)), (2, 0, 1, 3))
    return x[0] + x[1]


@pytest.mark.sample(2)
@pytest.mark.parametrize("kernels", ["xnnpack", "reference"])
@pytest.mark.parametrize(
    ("shape", "build"),
    [
        ((12, 8), lambda x: layers.Dense(4)(layers.Dense(8, activation="relu")(x))),
        ((12, 8), lambda x: each_step(4)(each_step(8, activation="relu")(x))),
        ((3, 8, 8, 2), lambda x: layers.TimeDistributed(layers.Conv2D(4, 3))(x)),
        ((12, 8), lambda x: each_step(4)(layers.Conv1D(8, 3)(x))),
        ((12, 8), attention),
        ((12, 8), heads_first),
    ],
    ids=["dense", "dense_in_time", "conv_in_time", "conv1d", "attention", "heads_first"],
)
def test_pieces_whose_first_axis_is_not_the_batch(shape, build, kernels):
    """The last batch has fewer examples."""
    x = images(40, shape)
    qat = observe(keras_qat.quantize_model(functional(shape, build=build)), x)
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), x, per_layer=True, kernels=kernels)
    assert len(report.tensors) >= 3
    assert report.unexplained == ()
    if kernels == "xnnpack":
        assert report.differing == ()


def test_pieces_in_tflite_micro_that_take_steps_of_an_example():
    """The sizes in a file of one example are fixed, but some layers read three steps of it."""
    pytest.importorskip("tflite_micro")
    build, x = layers.TimeDistributed(layers.Conv1D(4, 3)), images(8, (3, 8, 2))
    qat = observe(keras_qat.quantize_model(functional((3, 8, 2), build=build)), x)
    contents = keras_qat.export_tflite(qat, batch_size=1)
    report = keras_qat.verify(qat, contents, x, per_layer=True, kernels="tflm")
    assert report.unexplained == ()


def parts(x):
    first, second = tf.split(x, [5, 3], axis=-1)
    return layers.Concatenate()([layers.Dense(4)(first), second])


def steps(x):
    first, second, third = tf.unstack(x, axis=1)
    return layers.Dense(4)(first * second + third)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("build", "names"),
    [
        (
            lambda x: layers.Dense(4)(tf.multiply(*tf.split(x, 2, axis=-1))),
            ["tf.split:0", "tf.split:1"],
        ),
        (parts, ["tf.split:0", "tf.split:1"]),
        (steps, ["tf.unstack:0", "tf.unstack:1", "tf.unstack:2"]),
    ],
)
def test_results_of_an_operation_that_has_several(build, names):
    keras.backend.clear_session()
    x = images(40, (3, 8))
    qat = observe(keras_qat.quantize_model(functional((3, 8), build=build)), x)
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), x, per_layer=True)
    for name in names:
        assert row(report, name).run.identical == 1
    assert report.differing == ()


def test_layers_that_are_random_in_training_compute_as_at_inference():
    """Keras' augmentation layers assume `training=True` by default."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.RandomFlip("horizontal"),
            layers.Rescaling(1 / 255),
            layers.Conv2D(4, 3, name="conv"),
        ]
    )
    x = rng().uniform(0, 255, (32, 8, 8, 3)).astype(np.float32)
    qat = observe(keras_qat.quantize_model(model), x)
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), x, per_layer=True)
    assert report.differing == ()
    assert row(report, "conv").sqnr > 25
