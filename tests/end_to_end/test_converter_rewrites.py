"""Models that TFLite's converter rewrites, or pads itself: the file has the model's values."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.comparison import KERNELS, assert_identical, export
from tests.helpers import build_model, images, keras, rng, scramble
from tests.networks.small import layers


def assert_exact(model: Any, *inputs: np.ndarray) -> None:
    """The file computes what the model does, without an operation in float."""
    report = export(scramble(model), *inputs, per_layer=True).report
    assert not keras_qat.plan(model).float_layers
    assert not report.float_operations
    assert report.identical == 1
    assert all(tensor.simulated == 1 for tensor in report.tensors)


BETWEEN_CONVOLUTIONS: dict[str, Callable[[Any], Any]] = {
    "clip": lambda x: tf.clip_by_value(x, -1.0, 1.0),
    "clip_by_hand": lambda x: tf.minimum(tf.maximum(x, -1.0), 1.0),
    "clip_at_constants": lambda x: tf.minimum(tf.maximum(x, tf.constant(-1.0)), tf.constant(1.0)),
    "clip_at_zero_by_hand": lambda x: tf.minimum(tf.maximum(x, 0.0), 1.0),
    "relu6_by_hand": lambda x: tf.minimum(tf.maximum(x, 0.0), 6.0),
    "depth_to_space_relu": lambda x: tf.nn.relu(tf.nn.depth_to_space(x, 2)),
    "depth_to_space_clip": lambda x: tf.clip_by_value(tf.nn.depth_to_space(x, 2), 0.0, 1.0),
    "depth_to_space_by_hand": lambda x: tf.minimum(
        tf.maximum(tf.nn.depth_to_space(x, 2), 0.0), 1.0
    ),
    "transpose_relu": lambda x: tf.nn.relu(tf.transpose(x, (0, 2, 1, 3))),
    "permute_relu6": lambda x: layers.ReLU(6.0)(layers.Permute((2, 1, 3))(x)),
    "square": tf.square,
    "transpose_square": lambda x: tf.square(tf.transpose(x, (0, 2, 1, 3))),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", BETWEEN_CONVOLUTIONS)
def test_between_convolutions(name):
    keras.utils.set_random_seed(1)
    x = keras.Input((8, 8, 4))
    y = BETWEEN_CONVOLUTIONS[name](layers.Conv2D(8, 3)(x))
    assert_exact(keras.Model(x, layers.Conv2D(4, 3)(y)), images(32))


RESHAPES: dict[str, Callable[[Any], Any]] = {
    "batch": lambda x: tf.reshape(x, [tf.shape(x)[0], -1, 6]),
    "all": lambda x: tf.reshape(x, [tf.shape(x)[0], tf.shape(x)[1], tf.shape(x)[2] * 6]),
    "unstacked": lambda x: tf.reshape(x, [tf.unstack(tf.shape(x))[0], 16, -1]),
    "at_least": lambda x: tf.reshape(x, [-1, tf.maximum(8 * tf.shape(x)[1], 1), 6]),
    "backend": lambda x: keras.backend.reshape(x, (keras.backend.shape(x)[0], 64, 6)),
}


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", RESHAPES)
def test_reshaped_to_sizes_that_are_asked_for(name):
    keras.utils.set_random_seed(1)
    x = keras.Input((8, 8, 4))
    heads = [RESHAPES[name](layers.Conv2D(6, 3, padding="same")(x)) for _ in range(2)]
    assert_exact(keras.Model(x, tf.concat(heads, 1)), images(32))


def _conv(x: Any, activation: Any = None) -> Any:
    return layers.Conv2D(6, 3, padding="same", activation=activation)(x)


def _turned(x: Any) -> Any:
    return tf.transpose(_conv(x), (0, 2, 1, 3))


BEHIND_MOVES: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: layers.Flatten()(_conv(x)) + layers.Flatten()(_conv(x)),
    "sum_of_fixed": lambda x: (
        tf.reshape(_conv(x, "tanh"), [-1, 64, 6]) + tf.reshape(_conv(x, "tanh"), [-1, 64, 6])
    ),
    "steps": lambda x: layers.Add()(
        [layers.TimeDistributed(layers.Conv1D(3, 3, activation="tanh"))(x) for _ in range(2)]
    ),
    "product": lambda x: _turned(x) * _turned(x),
    "keywords": lambda x: tf.add(x=_turned(x), y=_turned(x)),
    "difference": lambda x: _turned(x) - _conv(x),
    "constant": lambda x: _turned(x) + 1.5,
    "prelu": lambda x: layers.PReLU()(_turned(x)),
    "leaky": lambda x: tf.nn.leaky_relu(_turned(x)),
    "tanh": lambda x: tf.tanh(_turned(x)),
    "maximum": lambda x: tf.maximum(_turned(x), 0.3),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", BEHIND_MOVES)
def test_behind_moves(name):
    keras.utils.set_random_seed(1)
    assert_exact(build_model((8, 8, 4), BEHIND_MOVES[name]), images(32))


BETWEEN_DENSE: dict[str, Callable[[Any], Any]] = {
    "square": tf.square,
    "product": lambda x: x * x,
    "sum": lambda x: x + x,
    "multiply": lambda x: layers.Multiply()([x, x]),
    "relus": lambda x: tf.nn.relu(x) * tf.nn.relu(x),
    "clip": lambda x: tf.clip_by_value(x, -1.0, 1.0),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", BETWEEN_DENSE)
@pytest.mark.parametrize("shape", [(6,), (5, 6)], ids=str)
def test_between_dense_layers(name, shape):
    keras.utils.set_random_seed(1)
    x = keras.Input(shape)
    y = layers.Dense(2)(BETWEEN_DENSE[name](layers.Dense(4)(x)))
    assert_exact(keras.Model(x, y), images(64, shape))


def _embedding(deviation: float) -> Any:
    normal = keras.initializers.RandomNormal(stddev=deviation)
    return layers.Embedding(20, 8, embeddings_initializer=normal)


EMBEDDINGS: dict[str, Callable[[Any, Any], Any]] = {
    "alone": lambda i, x: layers.Flatten()(_embedding(0.5)(i)),
    "joined_with_dense": lambda i, x: layers.Concatenate()(
        [layers.Flatten()(_embedding(0.5)(i)), layers.Dense(4, activation="relu")(x)]
    ),
    "joined_with_input": lambda i, x: tf.concat([layers.Flatten()(_embedding(0.5)(i)), x], -1),
    "joined_with_another": lambda i, x: layers.Concatenate()(
        [_embedding(0.5)(i), _embedding(0.1)(i)]
    ),
    "plus_positions": lambda i, x: _embedding(0.5)(i) + rng(3).normal(size=(2, 8)).astype("f"),
    "plus_another": lambda i, x: _embedding(0.5)(i) + _embedding(0.1)(i[:, ::-1]),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embeddings(name):
    keras.utils.set_random_seed(1)
    indices, x = keras.Input((2,), dtype="int32"), keras.Input((3,))
    y = layers.Dense(3)(EMBEDDINGS[name](indices, x))
    numbers = rng().integers(0, 20, (64, 2)).astype(np.int32)
    assert_exact(keras.Model([indices, x], [y, layers.Dense(2)(x)]), numbers, images(64, (3,)))


OWN = {
    "stride_2": (((0, 1), (0, 1)), layers.Conv2D(4, 3, strides=2)),
    "stride_1": (((1, 1), (0, 0)), layers.Conv2D(4, (3, 1), activation="relu")),
    "larger": (((1, 2), (2, 2)), layers.Conv2D(4, (5, 5), strides=(2, 1))),
    "dilated": (((2, 2), (0, 0)), layers.Conv2D(4, (3, 1), dilation_rate=2)),
    "depthwise": (((0, 1), (0, 0)), layers.DepthwiseConv2D((3, 1), strides=2)),
}
"""What a convolution's own padding is. No two are alike: a file would pad once for both."""
OTHER = {
    "in_front": (((1, 0), (1, 0)), layers.Conv2D(4, 3, strides=2)),
    "both_sides": (1, layers.Conv2D(4, 3, strides=2)),
    "of_same": (((2, 1), (1, 1)), layers.Conv2D(4, 3, padding="same")),
    "beside_same": (((0, 0), (2, 2)), layers.Conv2D(4, (1, 5), padding="same")),
    "transposed": (((1, 2), (1, 1)), layers.Conv2DTranspose(4, 3)),
}
"""What stays as it is."""


@functools.cache
def exported():
    inputs = keras.Input((8, 8, 4), name="image")
    x = layers.Conv2D(4, 1, activation="relu")(inputs)
    outputs = [layer(layers.ZeroPadding2D(pads)(x)) for pads, layer in (OWN | OTHER).values()]
    read_twice = layers.ZeroPadding2D(2)(x)
    outputs += [layers.Conv2D(4, 3)(read_twice), layers.MaxPooling2D(2)(read_twice)]
    return export(scramble(keras.Model(inputs, outputs)), images())


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("kernels", KERNELS)
def test_codes_are_the_models(kernels):
    result = exported()
    assert {tensor.identical for tensor in result.report.outputs} == {1.0}
    assert_identical(result.model, result.x, kernels, result.contents)


def test_pads_are_left_that_no_convolution_does():
    kernels = [name for name, *_ in exported().file.operations()]
    assert kernels.count("PAD") == len(OTHER) + 1


def test_pads_around_images_of_any_size_are_left():
    image = keras.Input((None, 8, 3))
    outputs = layers.Conv2D(4, 3, strides=2)(layers.ZeroPadding2D(((0, 1), (0, 1)))(image))
    result = export(scramble(keras.Model(image, outputs)), images(16, (8, 8, 3)))
    assert [name for name, *_ in result.file.operations()] == ["PAD", "CONV_2D"]
    assert_identical(result.model, result.x, KERNELS[0], result.contents)
