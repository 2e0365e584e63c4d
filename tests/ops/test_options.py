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


OPTIONS = {
    "softmax": [
        (layers.Softmax(), [STEPS], {"axis": -1}),
        (layers.Softmax(1), [STEPS], {"axis": -2}),
        (layers.Softmax([-2]), [STEPS], {"axis": -2}),
        (layers.Activation("softmax"), [STEPS], {"axis": -1}),
        (tf.nn.softmax, [STEPS], {"axis": -1}),
        (lambda x: tf.nn.softmax(x, 1), [IMAGE], {"axis": -3}),
        (lambda x: tf.nn.softmax(x, axis=-2), [IMAGE], {"axis": -2}),
        (lambda x: tf.nn.softmax(masked(x)), [STEPS], {"axis": -1}),
    ],
    "unit_norm": [
        (layers.UnitNormalization(), [STEPS], {"axes": (-1,), "epsilon": 0.0}),
        (lambda x: tf.math.l2_normalize(x, 1), [ROW], {"axes": (-1,)}),
        (lambda x: tf.math.l2_normalize(x, [-1], 1e-5), [STEPS], {"epsilon": 1e-5}),
    ],
    "power": [
        (lambda x: x**3, [ROW], {"exponent": 3.0}),
        (lambda x: tf.pow(x, y=0.5), [ROW], {"exponent": 0.5}),
    ],
    "reciprocal": [
        (tf.math.reciprocal, [ROW], {"numerator": 1.0}),
        (lambda x: -2 / x, [ROW], {"numerator": -2.0}),
        (lambda x: tf.divide(0.5, x), [ROW], {"numerator": 0.5}),
    ],
    "thresholded_relu": [
        (layers.ThresholdedReLU(0.5), [ROW], {"slope": 0.0, "maximum": INF, "threshold": 0.5}),
        (
            layers.ReLU(4.0, negative_slope=0.25, threshold=0.5),
            [ROW],
            {"slope": 0.25, "maximum": 4.0, "threshold": 0.5},
        ),
    ],
    "elu": [
        (layers.ELU(0.5), [ROW], {"alpha": 0.5}),
        (tf.nn.elu, [ROW], {"alpha": 1.0}),
        (layers.Activation("elu"), [ROW], {"alpha": 1.0}),
    ],
    "gelu": [
        (layers.Activation("gelu"), [ROW], {"approximate": False}),
        (tf.nn.gelu, [ROW], {"approximate": False}),
        (lambda x: tf.nn.gelu(x, True), [ROW], {"approximate": True}),
    ],
    "relu": [
        (layers.ReLU(), [ROW], {"maximum": INF}),
        (layers.ReLU(2), [ROW], {"maximum": 2.0}),
        (tf.nn.relu, [ROW], {"maximum": INF}),
        (tf.nn.relu6, [ROW], {"maximum": 6.0}),
        (layers.Activation(tf.nn.relu6), [ROW], {"maximum": 6.0}),
        (layers.Activation("relu"), [ROW], {"maximum": INF}),
    ],
    "leaky_relu": [
        (layers.LeakyReLU(0.25), [ROW], {"slope": 0.25}),
        (layers.LeakyReLU(0.0), [ROW], {"slope": 0.0}),
        (layers.ReLU(negative_slope=0.5), [ROW], {"slope": 0.5}),
        (tf.nn.leaky_relu, [ROW], {"slope": float(np.float32(0.2))}),
        (layers.Activation(tf.nn.leaky_relu), [ROW], {"slope": float(np.float32(0.2))}),
        (lambda x: tf.nn.leaky_relu(x, -0.5), [ROW], {"slope": -0.5}),
        (lambda x: tf.nn.leaky_relu(x, 0), [ROW], {"slope": 0.0}),
    ],
    "add": [(lambda x, y: tf.add(x, y), [(1,) * 5, (2,) * 5], {"sign": 1})],
    "subtract": [
        (lambda x, y: x - y, [(1,) * 5, (2,) * 5], {"sign": -1}),
        (lambda x: 2.0 - x, [ROW], {"sign": -1}),
    ],
    "multiply": [(lambda x, y: x * y, [(1,) * 5, (2,) * 5], {}), (lambda x: x * x, [(1,) * 7], {})],
    "maximum": [(tf.maximum, [(1,) * 4, (2,) * 4], {}), (tf.maximum, [(1,) * 5, (1,) * 5], {})],
    "minimum": [(tf.minimum, [(1,) * 4, (2,) * 4], {})],
    "divide": [(tf.divide, [(1,) * 4, (2,) * 4], {}), (lambda x, y: x / y, [ROW, ROW], {})],
    "greater": [(tf.greater, [(1,) * 3, (2,) * 3], {}), (lambda x, y: x > y, [(1,) * 5] * 2, {})],
    "equal": [(tf.equal, [ROW, ROW], {}), (lambda x: x == 1.0, [ROW], {})],
    "not_equal": [(lambda x: x != 1.0, [ROW], {})],
    "select": [
        (tf.where, [TRUTH, ROW, ROW], {}),
        (lambda c, x: tf.where(c, x, 0.0), [((1,) * 3, "bool"), (2,) * 3], {}),
    ],
    "from_integers": [
        (lambda x: tf.cast(x, tf.float32), [INDICES], {}),
        (lambda x: tf.cast(x, tf.float32), [TRUTH], {}),
    ],
    "one_hot": [
        (lambda x: tf.one_hot(x, 4), [INDICES], {"depth": 4, "on": 1.0, "off": 0.0, "axis": 2}),
        (lambda x: tf.one_hot(x, 4, 2.0, 3.5, 1), [INDICES], {"on": 2.0, "off": 3.5, "axis": 1}),
        (lambda x: tf.one_hot(x, 4, off_value=-1.0, axis=-1), [INDICES], {"off": -1.0, "axis": 2}),
        (lambda x: tf.one_hot(x, 4, on_value=0.5, axis=0), [INDICES], {"on": 0.5, "axis": 0}),
    ],
    "reshape": [
        (layers.Flatten(), [IMAGE], {}),
        (layers.Flatten("channels_first"), [ROW], {}),
        (lambda x: tf.expand_dims(x, -1), [ROW], {}),
        (lambda x: tf.squeeze(x, 1), [(1, 6)], {}),
    ],
    "mean_of_one": [
        (lambda x: tf.reduce_mean(x, 1), [(1, 6)], {}),
        (layers.GlobalAveragePooling2D(), [(1, 1, 6)], {}),
        (lambda x: tf.reduce_mean(x, [1, 2], True), [(1, 1, 6)], {}),
    ],
    "mean": [
        (lambda x: tf.reduce_mean(x, 1), [(2, 6)], {"axes": (1,), "keepdims": False}),
        (lambda x: tf.reduce_mean(x, [-1, -2], True), [IMAGE], {"axes": (2, 3), "keepdims": True}),
        (lambda x: tf.reduce_mean(x, 0), [ROW], {"axes": (0,)}),
        (lambda x: tf.reduce_mean(x, 1), [(None, 6)], {"axes": (1,)}),
        (layers.GlobalAveragePooling1D("channels_first"), [STEPS], {"axes": (2,)}),
        (layers.GlobalAveragePooling2D(keepdims=True), [IMAGE], {"axes": (1, 2), "keepdims": True}),
        (layers.GlobalAveragePooling3D(), [(2, 2, 2, 3)], {"axes": (1, 2, 3), "keepdims": False}),
    ],
    "reduce_max": [
        (layers.GlobalMaxPooling1D(), [STEPS], {"axes": (1,), "keepdims": False}),
        (layers.GlobalMaxPooling2D("channels_first"), [IMAGE], {"axes": (2, 3)}),
        (lambda x: tf.reduce_max(x, [-1, 1]), [IMAGE], {"axes": (1, 3), "keepdims": False}),
        (tf.reduce_max, [STEPS], {"axes": (0, 1, 2)}),
    ],
    "reduce_min": [
        (lambda x: tf.reduce_min(x, -1, keepdims=True), [STEPS], {"axes": (2,), "keepdims": True})
    ],
    "reduce_any": [(lambda x: tf.reduce_any(x, 1), [TRUTH], {"axes": (1,), "keepdims": False})],
    "argmax": [
        (tf.argmax, [STEPS], {"axis": 0}),
        (lambda x: tf.argmax(x, -1), [STEPS], {"axis": 2}),
        (lambda x: tf.argmax(x, axis=1), [STEPS], {"axis": 1}),
    ],
    "max_pooling": [
        (
            layers.MaxPooling1D(2, 3, "same"),
            [STEPS],
            {"pool": (2,), "strides": (3,), "padding": "SAME", "channels_last": True},
        ),
        (
            lambda x: tf.nn.max_pool2d(x, 2, [1, 2, 1, 1], "SAME"),
            [IMAGE],
            {"pool": (2, 2), "strides": (2, 1), "padding": "SAME"},
        ),
        (
            lambda x: tf.nn.max_pool2d(x, [2, 1], 1, "VALID", "NHWC"),
            [IMAGE],
            {"pool": (2, 1), "strides": (1, 1), "padding": "VALID", "channels_last": True},
        ),
        (lambda x: tf.nn.max_pool1d(x, [2], 2, "VALID"), [STEPS], {"pool": (2,), "strides": (2,)}),
    ],
    "average_pooling": [
        (layers.AveragePooling2D((1, 2)), [IMAGE], {"pool": (1, 2), "strides": (1, 2)})
    ],
    "conv": [
        (
            layers.Conv2D(2, 3, (1, 2), "same"),
            [IMAGE],
            {"strides": (1, 2), "padding": "same", "dilation": (1, 1)},
        ),
        (layers.Conv1D(2, 3, dilation_rate=2), [STEPS], {"strides": (1,), "dilation": (2,)}),
    ],
    "depthwise_conv": [(layers.DepthwiseConv2D(3, 2), [IMAGE], {"strides": (2, 2)})],
    "transpose_conv": [
        (layers.Conv2DTranspose(2, 3, 2), [IMAGE], {"strides": (2, 2), "output_padding": None}),
        (
            layers.Conv1DTranspose(2, 3, 2, output_padding=1),
            [STEPS],
            {"strides": (2,), "output_padding": (1,)},
        ),
    ],
    "affine": [
        (layers.BatchNormalization(), [IMAGE], {"axes": (3,)}),
        (layers.BatchNormalization(axis=1), [ROW], {"axes": (1,)}),
        (layers.Rescaling(0.5), [IMAGE], {"axes": (3,)}),
        (layers.Normalization(None, mean=1.0, variance=4.0), [STEPS], {"axes": ()}),
    ],
    "matmul": [
        (tf.matmul, [(2, 3), (3, 4)], {"transposed": (False, False), "depth": 3}),
        (
            lambda x, y: tf.matmul(x, y, True, False),
            [(3, 2), (3, 4)],
            {"transposed": (True, False), "depth": 3},
        ),
        (
            lambda x, y: tf.matmul(x, y, adjoint_b=True),
            [(2, 3), (4, 3)],
            {"transposed": (False, True), "depth": 3},
        ),
        (
            lambda x, y: tf.matmul(x, y, transpose_b=True, adjoint_a=True),
            [(None, 2), (4, None)],
            {"transposed": (True, True), "depth": None},
        ),
        (tf.matmul, [(1, 1, 2, 3), (1, 1, 3, 4)], {"depth": 3}),
    ],
    "contract": [
        (on_list(layers.Dot(1)), [STEPS, (5, 3)], {"depth": 5}),
        (on_list(layers.Dot((2, -1))), [STEPS, (3, 6)], {"depth": 6}),
        (on_list(Contract("ab, cb")), [ROW, ROW], {"equation": "ab,cb->ac", "depth": 6}),
        (on_list(Contract("b...c,bdc...->b...d")), [(2, 3), (4, 3, 2)], {"depth": 3}),
        (on_list(Contract("abc,abd->acd")), [(None, 3), (None, 2)], {"depth": None}),
        (on_list(Contract("abc,abc->a")), [STEPS, STEPS], {}),
    ],
    "resize_nearest": [
        (
            layers.Resizing(3, 5, "nearest"),
            [IMAGE],
            {"height": 3, "width": 5, "interpolation": "nearest", "crop": ()},
        ),
        (layers.UpSampling2D((2, 3)), [(None, 4, 6)], {"height": 0, "width": 0}),
        (layers.UpSampling2D((2, 3)), [(4, None, 6)], {"height": 0, "width": 0}),
        (
            layers.Resizing(2, 4, "nearest", crop_to_aspect_ratio=True),
            [(6, 4, 3)],
            {"crop": ((2, 4, 1), (0, 4, 1))},
        ),
    ],
    "resize_bilinear": [
        (layers.Resizing(1, 1), [IMAGE], {"height": 1, "width": 1}),
        (
            layers.Resizing(4, 2, crop_to_aspect_ratio=True),
            [(4, 7, 3)],
            {"crop": ((0, 4, 1), (2, 4, 1))},
        ),
    ],
    "slice": [
        (lambda x: x[:, 1:-1, ::-2], [STEPS], {"parts": (ALL, (1, -1, 1), (None, None, -2))}),
        (
            lambda x: x[:, 0, None, ..., -1],
            [IMAGE],
            {"parts": (ALL, (0, None, 1), ALL, (-1, None, 1)), "dropped": (1, 3), "added": (1,)},
        ),
        (lambda x: x[..., None], [ROW], {"parts": (ALL, ALL), "dropped": (), "added": (2,)}),
        (layers.Cropping1D((0, 2)), [STEPS], {"parts": (ALL, (None, -2, 1), ALL)}),
        (
            layers.Cropping2D(((1, 0), (0, 1))),
            [IMAGE],
            {"parts": (ALL, (1, None, 1), (None, -1, 1), ALL)},
        ),
        (
            lambda x: tf.slice(x, [0, 1, 0], [-1, 2, -1]),
            [STEPS],
            {"parts": (ALL, (1, 3, 1), ALL), "dropped": (), "added": ()},
        ),
        (LastStep(), [STEPS], {"parts": (ALL, (-1, None, 1), ALL), "dropped": (1,), "added": ()}),
    ],
    "split": [
        (lambda x: tf.split(x, 3, -1), [STEPS], {"axis": 2, "sizes": (), "count": 3}),
        (lambda x: tf.split(x, [1, -1], 1), [STEPS], {"axis": 1, "sizes": (1, -1), "count": 2}),
        (lambda x: tf.split(x, [6], axis=1), [ROW], {"axis": 1, "sizes": (6,), "count": 1}),
    ],
    "unstack": [
        (lambda x: tf.unstack(x, axis=1), [STEPS], {"axis": 1, "count": 5}),
        (lambda x: tf.unstack(x, 6, -1), [STEPS], {"axis": -1, "count": 6}),
    ],
    "gather": [
        (
            lambda x: tf.gather(x, [[2, 0]], axis=-1),
            [STEPS],
            {"axis": 2, "batch": 0, "indices": (2, 0), "shape": (1, 2), "constant": True},
        ),
        (lambda x: tf.gather(x, 1), [ROW], {"axis": 0, "batch": 0, "indices": (1,), "shape": ()}),
        (
            lambda x, i: tf.gather(x, i, batch_dims=1),
            [STEPS, INDICES],
            {"axis": 1, "batch": 1, "indices": (), "constant": False},
        ),
        (
            lambda x, i: tf.gather(x, i, axis=2, batch_dims=-1),  # Among the axes of the indices.
            [STEPS, INDICES],
            {"axis": 2, "batch": 1},
        ),
        (lambda x: tf.nn.embedding_lookup(x, [1]), [ROW], {"axis": 0, "batch": 0}),
    ],
    "concatenate": [
        (on_list(layers.Concatenate()), [STEPS, STEPS], {"axis": 2, "numbers": ()}),
        (on_list(layers.Concatenate(1)), [STEPS, STEPS], {"axis": 1}),
        (lambda x, y: tf.concat([x, y], -2), [STEPS, STEPS], {"axis": 1}),
        (lambda x, y: tf.concat([x, y], 0), [STEPS, STEPS], {"axis": 0}),
        (
            lambda x: tf.concat([[[1, 2]], x], 0),
            [((2,), "int32")],
            {"axis": 0, "numbers": ((0, (1, 2), (1, 2)),)},
        ),
    ],
    "stack": [
        (lambda x, y: tf.stack([x, y]), [ROW, ROW], {"axis": 0, "numbers": ()}),
        (lambda x, y: tf.stack([x, y], -1), [ROW, ROW], {"axis": 2}),
        (lambda x, y: tf.stack([x, y], axis=1), [ROW, ROW], {"axis": 1}),
    ],
    "tile": [(lambda x: tf.tile(x, [1, 2, 3]), [STEPS], {"multiples": (1, 2, 3)})],
    "broadcast": [
        (layers.RepeatVector(3), [ROW], {"added": (1,)}),
        (lambda x: tf.broadcast_to(x, [2, 3, 3, 6]), [(1, 6)], {"added": (0,)}),
        (lambda x: tf.broadcast_to(x, [3, 6]), [(1,)], {"added": ()}),
    ],
    "repeat": [
        (layers.UpSampling1D(3), [STEPS], {"times": ((1, 3),)}),
        (layers.UpSampling3D((1, 2, 3)), [(2, 2, 2, 3)], {"times": ((1, 1), (2, 2), (3, 3))}),
        (
            layers.UpSampling3D((1, 2, 3), "channels_first"),
            [(2, 2, 2, 3)],
            {"times": ((2, 1), (3, 2), (4, 3))},
        ),
        (lambda x: tf.repeat(x, 2, -1), [STEPS], {"times": ((2, 2),)}),
        (lambda x: tf.repeat(x, [2, 0, 1], axis=1), [(3,)], {"times": ((1, (2, 0, 1)),)}),
    ],
    "reverse": [
        (ReverseSteps(), [STEPS], {"axes": (1,)}),
        (lambda x: tf.reverse(x, [-1, 1]), [STEPS], {"axes": (1, 2)}),
    ],
    "roll": [(Roll([2, -1], [1, -1]), [STEPS], {"shifts": ((1, 2), (2, -1))})],
    "pad": [
        (layers.ZeroPadding1D((1, 2)), [STEPS], {"paddings": ((0, 0), (1, 2), (0, 0))}),
        (
            layers.ZeroPadding2D(((1, 0), (2, 3)), "channels_first"),
            [IMAGE],
            {"paddings": ((0, 0), (0, 0), (1, 0), (2, 3))},
        ),
        (
            lambda x: tf.pad(x, [[0, 0], [2, 1]], "constant", 0),
            [ROW],
            {"paddings": ((0, 0), (2, 1)), "mode": "CONSTANT", "value": 0.0},
        ),
    ],
    "mirror_pad": [
        (lambda x: tf.pad(x, [[0, 0], [2, 1]], "reflect"), [ROW], {"mode": "REFLECT"}),
        (
            lambda x: tf.pad(x, [[0, 0], [2, 1]], mode="SYMMETRIC"),
            [ROW],
            {"mode": "SYMMETRIC", "paddings": ((0, 0), (2, 1))},
        ),
    ],
    "transpose": [
        (tf.transpose, [STEPS], {"permutation": (2, 1, 0)}),
        (lambda x: tf.transpose(x, [0, -1, 1]), [STEPS], {"permutation": (0, 2, 1)}),
        (layers.Permute((2, 1)), [STEPS], {"permutation": (0, 2, 1)}),
        (tf.linalg.matrix_transpose, [IMAGE], {"permutation": (0, 1, 3, 2)}),
        (lambda x: tf.transpose(x, [0, 5, 4, 3, 2, 1]), [(1,) * 5], {}),
    ],
    "depth_to_space": [
        (lambda x: tf.nn.depth_to_space(x, 2), [(2, 2, 8)], {"size": 2, "data_format": "NHWC"})
    ],
    "space_to_depth": [(lambda x: tf.nn.space_to_depth(x, 2, "NHWC"), [IMAGE], {"size": 2})],
    "top_k": [
        (lambda x: tf.math.top_k(x)[0], [ROW], {"count": 1}),
        (lambda x: tf.math.top_k(x, 3)[0], [ROW], {"count": 3}),
    ],
}
"""Operator -> calls of it: function, shapes (and types) of inputs, and attributes."""


def last_call(build, shapes):
    """Returns the last call of a function of inputs with these shapes, or shapes and types."""
    has_type = [isinstance(shape[-1], str) for shape in (one or (0,) for one in shapes)]
    inputs = [
        keras.Input(shape[0], dtype=shape[1]) if typed else keras.Input(shape)
        for shape, typed in zip(shapes, has_type, strict=True)
    ]
    return read_model(keras.Model(inputs, build(*inputs))).calls[-1]


@pytest.mark.sample(15)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    """Operators read the options correctly, and files compute with them."""
    for place, (build, shapes, attributes) in enumerate(OPTIONS[name]):
        call, numbers = last_call(build, shapes), np.random.default_rng(place)
        op, known, reason = match(call)
        assert op is not None, reason
        assert op.name == name
        assert {option: known[option] for option in attributes} == attributes
        node = make_node(call, 8, numbers)
        assert_same(node, random_inputs(node, numbers), KERNELS[place % 2], str(place))
