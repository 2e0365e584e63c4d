"""Tests options of calls, in each form and at both ends: as operators read them, and in files."""

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.graph.read_model import read_model
from keras_qat.helper_layers.operations import Contract, LastStep, ReverseSteps, Roll
from keras_qat.ops.registry import match
from tests.comparison import KERNELS
from tests.helpers import keras, layers
from tests.ops.harness import assert_same, make_node, random_inputs

INF = float("inf")
ROW, STEPS, IMAGE = (6,), (5, 6), (4, 4, 6)
ALL = (None, None, 1)
INDICES = ((6,), "int32")
TRUTH = ((6,), "bool")


def masked(x):
    return layers.Masking()(x)


def on_list(layer):
    return lambda *inputs: layer(list(inputs))


def of(build, *shapes):
    return lambda **attributes: (build, shapes, attributes)


OPTIONS = {
    "softmax": [
        of(layers.Softmax(), STEPS)(axis=-1),
        of(layers.Softmax(1), STEPS)(axis=-2),
        of(layers.Softmax([-2]), STEPS)(axis=-2),
        of(layers.Activation("softmax"), STEPS)(axis=-1),
        of(tf.nn.softmax, STEPS)(axis=-1),
        of(lambda x: tf.nn.softmax(x, 1), IMAGE)(axis=-3),
        of(lambda x: tf.nn.softmax(x, axis=-2), IMAGE)(axis=-2),
        of(lambda x: tf.nn.softmax(masked(x)), STEPS)(axis=-1),
    ],
    "unit_norm": [
        of(layers.UnitNormalization(), STEPS)(axes=(-1,), epsilon=0.0),
        of(lambda x: tf.math.l2_normalize(x, 1), ROW)(axes=(-1,)),
        of(lambda x: tf.math.l2_normalize(x, [-1], 1e-5), STEPS)(epsilon=1e-5),
    ],
    "power": [
        of(lambda x: x**3, ROW)(exponent=3.0),
        of(lambda x: tf.pow(x, y=0.5), ROW)(exponent=0.5),
    ],
    "reciprocal": [
        of(tf.math.reciprocal, ROW)(numerator=1.0),
        of(lambda x: -2 / x, ROW)(numerator=-2.0),
        of(lambda x: tf.divide(0.5, x), ROW)(numerator=0.5),
    ],
    "thresholded_relu": [
        of(layers.ThresholdedReLU(0.5), ROW)(slope=0.0, maximum=INF, threshold=0.5),
        of(layers.ReLU(4.0, negative_slope=0.25, threshold=0.5), ROW)(
            slope=0.25, maximum=4.0, threshold=0.5
        ),
    ],
    "elu": [
        of(layers.ELU(0.5), ROW)(alpha=0.5),
        of(tf.nn.elu, ROW)(alpha=1.0),
        of(layers.Activation("elu"), ROW)(alpha=1.0),
    ],
    "gelu": [
        of(layers.Activation("gelu"), ROW)(approximate=False),
        of(tf.nn.gelu, ROW)(approximate=False),
        of(lambda x: tf.nn.gelu(x, True), ROW)(approximate=True),
    ],
    "relu": [
        of(layers.ReLU(), ROW)(maximum=INF),
        of(layers.ReLU(2), ROW)(maximum=2.0),
        of(tf.nn.relu, ROW)(maximum=INF),
        of(tf.nn.relu6, ROW)(maximum=6.0),
        of(layers.Activation(tf.nn.relu6), ROW)(maximum=6.0),
        of(layers.Activation("relu"), ROW)(maximum=INF),
    ],
    "leaky_relu": [
        of(layers.LeakyReLU(0.25), ROW)(slope=0.25),
        of(layers.LeakyReLU(0.0), ROW)(slope=0.0),
        of(layers.ReLU(negative_slope=0.5), ROW)(slope=0.5),
        of(tf.nn.leaky_relu, ROW)(slope=float(np.float32(0.2))),
        of(layers.Activation(tf.nn.leaky_relu), ROW)(slope=float(np.float32(0.2))),
        of(lambda x: tf.nn.leaky_relu(x, -0.5), ROW)(slope=-0.5),
        of(lambda x: tf.nn.leaky_relu(x, 0), ROW)(slope=0.0),
    ],
    "add": [of(lambda x, y: tf.add(x, y), (1,) * 5, (2,) * 5)(sign=1)],
    "subtract": [
        of(lambda x, y: x - y, (1,) * 5, (2,) * 5)(sign=-1),
        of(lambda x: 2.0 - x, ROW)(sign=-1),
    ],
    "multiply": [of(lambda x, y: x * y, (1,) * 5, (2,) * 5)(), of(lambda x: x * x, (1,) * 7)()],
    "maximum": [of(tf.maximum, (1,) * 4, (2,) * 4)(), of(tf.maximum, (1,) * 5, (1,) * 5)()],
    "minimum": [of(tf.minimum, (1,) * 4, (2,) * 4)()],
    "divide": [of(tf.divide, (1,) * 4, (2,) * 4)(), of(lambda x, y: x / y, ROW, ROW)()],
    "greater": [of(tf.greater, (1,) * 3, (2,) * 3)(), of(lambda x, y: x > y, (1,) * 5, (1,) * 5)()],
    "equal": [of(tf.equal, ROW, ROW)(), of(lambda x: x == 1.0, ROW)()],
    "not_equal": [of(lambda x: x != 1.0, ROW)()],
    "select": [
        of(tf.where, TRUTH, ROW, ROW)(),
        of(lambda c, x: tf.where(c, x, 0.0), ((1,) * 3, "bool"), (2,) * 3)(),
    ],
    "from_integers": [
        of(lambda x: tf.cast(x, tf.float32), INDICES)(),
        of(lambda x: tf.cast(x, tf.float32), TRUTH)(),
    ],
    "one_hot": [
        of(lambda x: tf.one_hot(x, 4), INDICES)(depth=4, on=1.0, off=0.0, axis=2),
        of(lambda x: tf.one_hot(x, 4, 2.0, 3.5, 1), INDICES)(on=2.0, off=3.5, axis=1),
        of(lambda x: tf.one_hot(x, 4, off_value=-1.0, axis=-1), INDICES)(off=-1.0, axis=2),
        of(lambda x: tf.one_hot(x, 4, on_value=0.5, axis=0), INDICES)(on=0.5, axis=0),
    ],
    "reshape": [
        of(layers.Flatten(), IMAGE)(),
        of(layers.Flatten("channels_first"), ROW)(),
        of(lambda x: tf.expand_dims(x, -1), ROW)(),
        of(lambda x: tf.squeeze(x, 1), (1, 6))(),
    ],
    "mean_of_one": [
        of(lambda x: tf.reduce_mean(x, 1), (1, 6))(),
        of(layers.GlobalAveragePooling2D(), (1, 1, 6))(),
        of(lambda x: tf.reduce_mean(x, [1, 2], True), (1, 1, 6))(),
    ],
    "mean": [
        of(lambda x: tf.reduce_mean(x, 1), (2, 6))(axes=(1,), keepdims=False),
        of(lambda x: tf.reduce_mean(x, [-1, -2], True), IMAGE)(axes=(2, 3), keepdims=True),
        of(lambda x: tf.reduce_mean(x, 0), ROW)(axes=(0,)),
        of(lambda x: tf.reduce_mean(x, 1), (None, 6))(axes=(1,)),
        of(layers.GlobalAveragePooling1D("channels_first"), STEPS)(axes=(2,)),
        of(layers.GlobalAveragePooling2D(keepdims=True), IMAGE)(axes=(1, 2), keepdims=True),
        of(layers.GlobalAveragePooling3D(), (2, 2, 2, 3))(axes=(1, 2, 3), keepdims=False),
    ],
    "reduce_max": [
        of(layers.GlobalMaxPooling1D(), STEPS)(axes=(1,), keepdims=False),
        of(layers.GlobalMaxPooling2D("channels_first"), IMAGE)(axes=(2, 3)),
        of(lambda x: tf.reduce_max(x, [-1, 1]), IMAGE)(axes=(1, 3), keepdims=False),
        of(tf.reduce_max, STEPS)(axes=(0, 1, 2)),
    ],
    "reduce_min": [
        of(lambda x: tf.reduce_min(x, -1, keepdims=True), STEPS)(axes=(2,), keepdims=True)
    ],
    "reduce_any": [of(lambda x: tf.reduce_any(x, 1), TRUTH)(axes=(1,), keepdims=False)],
    "argmax": [
        of(tf.argmax, STEPS)(axis=0),
        of(lambda x: tf.argmax(x, -1), STEPS)(axis=2),
        of(lambda x: tf.argmax(x, axis=1), STEPS)(axis=1),
    ],
    "max_pooling": [
        of(layers.MaxPooling1D(2, 3, "same"), STEPS)(
            pool=(2,), strides=(3,), padding="SAME", channels_last=True
        ),
        of(lambda x: tf.nn.max_pool2d(x, 2, [1, 2, 1, 1], "SAME"), IMAGE)(
            pool=(2, 2), strides=(2, 1), padding="SAME"
        ),
        of(lambda x: tf.nn.max_pool2d(x, [2, 1], 1, "VALID", "NHWC"), IMAGE)(
            pool=(2, 1), strides=(1, 1), padding="VALID", channels_last=True
        ),
        of(lambda x: tf.nn.max_pool1d(x, [2], 2, "VALID"), STEPS)(pool=(2,), strides=(2,)),
    ],
    "average_pooling": [of(layers.AveragePooling2D((1, 2)), IMAGE)(pool=(1, 2), strides=(1, 2))],
    "conv": [
        of(layers.Conv2D(2, 3, (1, 2), "same"), IMAGE)(
            strides=(1, 2), padding="same", dilation=(1, 1)
        ),
        of(layers.Conv1D(2, 3, dilation_rate=2), STEPS)(strides=(1,), dilation=(2,)),
    ],
    "depthwise_conv": [of(layers.DepthwiseConv2D(3, 2), IMAGE)(strides=(2, 2))],
    "transpose_conv": [
        of(layers.Conv2DTranspose(2, 3, 2), IMAGE)(strides=(2, 2), output_padding=None),
        of(layers.Conv1DTranspose(2, 3, 2, output_padding=1), STEPS)(
            strides=(2,), output_padding=(1,)
        ),
    ],
    "affine": [
        of(layers.BatchNormalization(), IMAGE)(axes=(3,)),
        of(layers.BatchNormalization(axis=1), ROW)(axes=(1,)),
        of(layers.Rescaling(0.5), IMAGE)(axes=(3,)),
        of(layers.Normalization(None, mean=1.0, variance=4.0), STEPS)(axes=()),
    ],
    "matmul": [
        of(tf.matmul, (2, 3), (3, 4))(transposed=(False, False), depth=3),
        of(lambda x, y: tf.matmul(x, y, True, False), (3, 2), (3, 4))(
            transposed=(True, False), depth=3
        ),
        of(lambda x, y: tf.matmul(x, y, adjoint_b=True), (2, 3), (4, 3))(
            transposed=(False, True), depth=3
        ),
        of(lambda x, y: tf.matmul(x, y, transpose_b=True, adjoint_a=True), (None, 2), (4, None))(
            transposed=(True, True), depth=None
        ),
        of(tf.matmul, (1, 1, 2, 3), (1, 1, 3, 4))(depth=3),
    ],
    "contract": [
        of(on_list(layers.Dot(1)), STEPS, (5, 3))(depth=5),
        of(on_list(layers.Dot((2, -1))), STEPS, (3, 6))(depth=6),
        of(on_list(Contract("ab, cb")), ROW, ROW)(equation="ab,cb->ac", depth=6),
        of(on_list(Contract("b...c,bdc...->b...d")), (2, 3), (4, 3, 2))(depth=3),
        of(on_list(Contract("abc,abd->acd")), (None, 3), (None, 2))(depth=None),
        of(on_list(Contract("abc,abc->a")), STEPS, STEPS)(),
    ],
    "resize_nearest": [
        of(layers.Resizing(3, 5, "nearest"), IMAGE)(
            height=3, width=5, interpolation="nearest", crop=()
        ),
        of(layers.UpSampling2D((2, 3)), (None, 4, 6))(height=0, width=0),
        of(layers.UpSampling2D((2, 3)), (4, None, 6))(height=0, width=0),
        of(layers.Resizing(2, 4, "nearest", crop_to_aspect_ratio=True), (6, 4, 3))(
            crop=((2, 4, 1), (0, 4, 1))
        ),
    ],
    "resize_bilinear": [
        of(layers.Resizing(1, 1), IMAGE)(height=1, width=1),
        of(layers.Resizing(4, 2, crop_to_aspect_ratio=True), (4, 7, 3))(
            crop=((0, 4, 1), (2, 4, 1))
        ),
    ],
    "slice": [
        of(lambda x: x[:, 1:-1, ::-2], STEPS)(parts=(ALL, (1, -1, 1), (None, None, -2))),
        of(lambda x: x[:, 0, None, ..., -1], IMAGE)(
            parts=(ALL, (0, None, 1), ALL, (-1, None, 1)), dropped=(1, 3), added=(1,)
        ),
        of(lambda x: x[..., None], ROW)(parts=(ALL, ALL), dropped=(), added=(2,)),
        of(layers.Cropping1D((0, 2)), STEPS)(parts=(ALL, (None, -2, 1), ALL)),
        of(layers.Cropping2D(((1, 0), (0, 1))), IMAGE)(
            parts=(ALL, (1, None, 1), (None, -1, 1), ALL)
        ),
        of(lambda x: tf.slice(x, [0, 1, 0], [-1, 2, -1]), STEPS)(
            parts=(ALL, (1, 3, 1), ALL), dropped=(), added=()
        ),
        of(LastStep(), STEPS)(parts=(ALL, (-1, None, 1), ALL), dropped=(1,), added=()),
    ],
    "split": [
        of(lambda x: tf.split(x, 3, -1), STEPS)(axis=2, sizes=(), count=3),
        of(lambda x: tf.split(x, [1, -1], 1), STEPS)(axis=1, sizes=(1, -1), count=2),
        of(lambda x: tf.split(x, [6], axis=1), ROW)(axis=1, sizes=(6,), count=1),
    ],
    "unstack": [
        of(lambda x: tf.unstack(x, axis=1), STEPS)(axis=1, count=5),
        of(lambda x: tf.unstack(x, 6, -1), STEPS)(axis=-1, count=6),
    ],
    "gather": [
        of(lambda x: tf.gather(x, [[2, 0]], axis=-1), STEPS)(
            axis=2, batch=0, indices=(2, 0), shape=(1, 2), constant=True
        ),
        of(lambda x: tf.gather(x, 1), ROW)(axis=0, batch=0, indices=(1,), shape=()),
        of(lambda x, i: tf.gather(x, i, batch_dims=1), STEPS, INDICES)(
            axis=1, batch=1, indices=(), constant=False
        ),
        # The axis of the batch is counted among the axes of the indices.
        of(lambda x, i: tf.gather(x, i, axis=2, batch_dims=-1), STEPS, INDICES)(axis=2, batch=1),
        of(lambda x: tf.nn.embedding_lookup(x, [1]), ROW)(axis=0, batch=0),
    ],
    "concatenate": [
        of(on_list(layers.Concatenate()), STEPS, STEPS)(axis=2, numbers=()),
        of(on_list(layers.Concatenate(1)), STEPS, STEPS)(axis=1),
        of(lambda x, y: tf.concat([x, y], -2), STEPS, STEPS)(axis=1),
        of(lambda x, y: tf.concat([x, y], 0), STEPS, STEPS)(axis=0),
        of(lambda x: tf.concat([[[1, 2]], x], 0), ((2,), "int32"))(
            axis=0, numbers=((0, (1, 2), (1, 2)),)
        ),
    ],
    "stack": [
        of(lambda x, y: tf.stack([x, y]), ROW, ROW)(axis=0, numbers=()),
        of(lambda x, y: tf.stack([x, y], -1), ROW, ROW)(axis=2),
        of(lambda x, y: tf.stack([x, y], axis=1), ROW, ROW)(axis=1),
    ],
    "tile": [of(lambda x: tf.tile(x, [1, 2, 3]), STEPS)(multiples=(1, 2, 3))],
    "broadcast": [
        of(layers.RepeatVector(3), ROW)(added=(1,)),
        of(lambda x: tf.broadcast_to(x, [2, 3, 3, 6]), (1, 6))(added=(0,)),
        of(lambda x: tf.broadcast_to(x, [3, 6]), (1,))(added=()),
    ],
    "repeat": [
        of(layers.UpSampling1D(3), STEPS)(times=((1, 3),)),
        of(layers.UpSampling3D((1, 2, 3)), (2, 2, 2, 3))(times=((1, 1), (2, 2), (3, 3))),
        of(layers.UpSampling3D((1, 2, 3), "channels_first"), (2, 2, 2, 3))(
            times=((2, 1), (3, 2), (4, 3))
        ),
        of(lambda x: tf.repeat(x, 2, -1), STEPS)(times=((2, 2),)),
        of(lambda x: tf.repeat(x, [2, 0, 1], axis=1), (3,))(times=((1, (2, 0, 1)),)),
    ],
    "reverse": [
        of(ReverseSteps(), STEPS)(axes=(1,)),
        of(lambda x: tf.reverse(x, [-1, 1]), STEPS)(axes=(1, 2)),
    ],
    "roll": [of(Roll([2, -1], [1, -1]), STEPS)(shifts=((1, 2), (2, -1)))],
    "pad": [
        of(layers.ZeroPadding1D((1, 2)), STEPS)(paddings=((0, 0), (1, 2), (0, 0))),
        of(layers.ZeroPadding2D(((1, 0), (2, 3)), "channels_first"), IMAGE)(
            paddings=((0, 0), (0, 0), (1, 0), (2, 3))
        ),
        of(lambda x: tf.pad(x, [[0, 0], [2, 1]], "constant", 0), ROW)(
            paddings=((0, 0), (2, 1)), mode="CONSTANT", value=0.0
        ),
    ],
    "mirror_pad": [
        of(lambda x: tf.pad(x, [[0, 0], [2, 1]], "reflect"), ROW)(mode="REFLECT"),
        of(lambda x: tf.pad(x, [[0, 0], [2, 1]], mode="SYMMETRIC"), ROW)(
            mode="SYMMETRIC", paddings=((0, 0), (2, 1))
        ),
    ],
    "transpose": [
        of(tf.transpose, STEPS)(permutation=(2, 1, 0)),
        of(lambda x: tf.transpose(x, [0, -1, 1]), STEPS)(permutation=(0, 2, 1)),
        of(layers.Permute((2, 1)), STEPS)(permutation=(0, 2, 1)),
        of(tf.linalg.matrix_transpose, IMAGE)(permutation=(0, 1, 3, 2)),
        of(lambda x: tf.transpose(x, [0, 5, 4, 3, 2, 1]), (1,) * 5)(),
    ],
    "depth_to_space": [
        of(lambda x: tf.nn.depth_to_space(x, 2), (2, 2, 8))(size=2, data_format="NHWC")
    ],
    "space_to_depth": [of(lambda x: tf.nn.space_to_depth(x, 2, "NHWC"), IMAGE)(size=2)],
    "top_k": [
        of(lambda x: tf.math.top_k(x)[0], ROW)(count=1),
        of(lambda x: tf.math.top_k(x, 3)[0], ROW)(count=3),
    ],
}
"""Operator -> calls of it: function and shapes (and types) of inputs, then attributes."""


def last_call(build, shapes):
    """Returns the last call of a function of inputs with these shapes, or shapes and types."""
    has_type = [isinstance(shape[-1], str) for shape in (one or (0,) for one in shapes)]
    inputs = [
        keras.Input(shape[0], dtype=shape[1]) if typed else keras.Input(shape)
        for shape, typed in zip(shapes, has_type, strict=True)
    ]
    return read_model(keras.Model(inputs, build(*inputs))).calls[-1]


def assert_options(name, call, attributes):
    """Asserts that an operator of that name computes the call, with these attributes at least."""
    op, known, reason = match(call)
    assert op is not None, reason
    assert op.name == name
    assert {option: known[option] for option in attributes} == attributes


@pytest.mark.sample(15)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    """Operators read the options correctly, and files compute with them."""
    for place, (build, shapes, attributes) in enumerate(OPTIONS[name]):
        call, numbers = last_call(build, shapes), np.random.default_rng(place)
        assert_options(name, call, attributes)
        node = make_node(call, 8, numbers)
        assert_same(node, random_inputs(node, numbers), KERNELS[place % 2], str(place))
