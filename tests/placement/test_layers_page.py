"""Tests that docs/layers.md states for every Keras layer how `plan` treats it."""

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from tests.networks.every_layer import example

PAGE = Path(__file__).parents[2] / "docs" / "layers.md"

NO_LAYERS = {
    *("Layer", "InputLayer", "Wrapper", "AbstractRNNCell", "StackedRNNCells", "DenseFeatures"),
    *("LSTMCell", "GRUCell", "SimpleRNNCell", "experimental"),
    # Broken in Keras 2 itself.
    "SpectralNormalization",
}
"""Base classes, components of layers, and classes that are not layers."""

BEFORE_THE_MODEL = {
    *("Hashing", "HashedCrossing", "IntegerLookup", "StringLookup", "TextVectorization")
}
"""Layers without a counterpart in TFLite."""


def read_verdicts(start: str) -> dict[str, str]:
    """Returns the page's verdicts on layers or operations by their names."""
    rows = re.findall(rf"^\| (`{start}.*?) \| (.*?) \|", PAGE.read_text(), flags=re.M)
    return {name: verdict for names, verdict in rows for name in re.findall(r"`(\w[\w.]+)`", names)}


LAYERS, OPERATIONS = read_verdicts("[A-Z]"), read_verdicts(r"tf\.")


def verdict(plan: Any) -> str:
    if plan.weights_only:
        return "weights int8"
    return "float" if plan.float_layers else "int8"


def layer_classes() -> set[str]:
    found = {name: getattr(keras.layers, name) for name in dir(keras.layers)}
    classes = {name: value for name, value in found.items() if isinstance(value, type)}
    return {name for name, value in classes.items() if issubclass(value, keras.layers.Layer)}


def test_every_layer_is_on_the_page():
    aliases = {name for name in layer_classes() if getattr(keras.layers, name).__name__ != name}
    assert layer_classes() - NO_LAYERS - aliases == set(LAYERS)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", sorted(LAYERS))
def test_the_page_says_what_the_plan_does(name):
    if name in BEFORE_THE_MODEL:
        assert LAYERS[name] == "no operation"
        return
    assert verdict(keras_qat.plan(example(name))) == LAYERS[name]


@pytest.mark.filterwarnings("ignore:recipe int8 quantizes nothing")
@pytest.mark.sample(5)
@pytest.mark.parametrize("name", sorted(set(LAYERS) - BEFORE_THE_MODEL))
def test_shapes_stay_known(name):
    model = example(name)
    if not any(size is None for size in model.output_shape[1:]):
        assert keras_qat.quantize_model(model).output_shape == model.output_shape


ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(("tf.add", "tf.subtract", "tf.multiply"), (1.5,)),
    **dict.fromkeys(("tf.maximum", "tf.minimum", "tf.pow"), (0.5,)),
    **dict.fromkeys(("tf.reduce_mean", "tf.reduce_sum", "tf.math.reduce_std"), ([1, 2],)),
    **dict.fromkeys(("tf.reduce_max", "tf.reduce_min", "tf.reduce_prod", "tf.cumsum"), (1,)),
    **dict.fromkeys(("tf.expand_dims", "tf.math.cumprod", "tf.math.cumulative_logsumexp"), (1,)),
    **dict.fromkeys(("tf.argmax", "tf.argmin", "tf.math.l2_normalize"), (-1,)),
    **dict.fromkeys(("tf.math.reduce_variance", "tf.reduce_logsumexp"), (-1,)),
    **dict.fromkeys(("tf.nn.max_pool2d", "tf.nn.avg_pool2d"), (2, 2, "VALID")),
    **dict.fromkeys(("tf.gather", "tf.nn.embedding_lookup"), ([2, 0],)),
    **dict.fromkeys(("tf.repeat", "tf.roll"), (2, 1)),
    **dict.fromkeys(("tf.nn.depth_to_space", "tf.nn.space_to_depth"), (2,)),
    "tf.math.reduce_euclidean_norm": (-1,),
    "tf.clip_by_value": (-1.0, 1.0),
    "tf.reshape": ((-1, 4, 36),),
    "tf.split": (2, -1),
    "tf.unstack": (None, 1),
    "tf.slice": ([0, 1, 1, 0], [-1, 3, 3, 4]),
    "tf.tile": ([1, 2, 1, 1],),
    "tf.broadcast_to": ((8, 6, 6, 4),),
    "tf.pad": ([[0, 0], [1, 1], [1, 1], [0, 0]],),
    "tf.image.resize": ((9, 9),),
    "tf.image.extract_patches": ([1, 2, 2, 1], [1, 2, 2, 1], [1] * 4, "VALID"),
    "tf.cast": ("int32",),
    "tf.reverse": ([1],),
    "tf.norm": (2, -1),
    "tf.linalg.band_part": (-1, 0),
    "tf.tensordot": (np.ones((4, 3), np.float32), 1),
    "tf.signal.frame": (4, 2, False, 0, 1),
    "tf.signal.overlap_and_add": (2,),
}
"""Operation -> its arguments after the tensor, which has the shape [6, 6, 4]."""

OF_TWO = {
    *("tf.atan2", "tf.math.squared_difference", "tf.math.divide_no_nan", "tf.math.floormod"),
    *("tf.math.multiply_no_nan", "tf.math.floordiv", "tf.math.xdivy"),
}

KERNEL = np.ones((3, 3, 4, 2), np.float32)
CALLS: dict[str, Any] = {
    "tf.nn.conv1d": lambda x: tf.nn.conv1d(x[:, 0], KERNEL[0], 1, "SAME"),
    "tf.nn.conv2d": lambda x: tf.nn.conv2d(x, KERNEL, 1, "SAME"),
    "tf.nn.convolution": lambda x: tf.nn.convolution(x, KERNEL),
    "tf.nn.depthwise_conv2d": lambda x: tf.nn.depthwise_conv2d(x, KERNEL, [1] * 4, "SAME"),
    "tf.einsum": lambda x: tf.einsum("bhwc,bhwd->bcd", x, 2.0 * x),
    "tf.matmul": lambda x: tf.matmul(x, 2.0 * x, transpose_b=True),
    "tf.add_n": lambda x: tf.add_n([x, 2.0 * x, tf.nn.relu(x)]),
    "tf.concat": lambda x: tf.concat([x, x], -1),
    "tf.stack": lambda x: tf.stack([x, x], 1),
    "tf.squeeze": lambda x: tf.squeeze(x[:, :1], 1),
    "tf.signal.fft": lambda x: tf.abs(tf.signal.fft(tf.cast(x, tf.complex64))),
    "tf.signal.stft": lambda x: tf.abs(tf.signal.stft(tf.reshape(x, [-1, 144]), 16, 8)),
    "tf.math.scalar_mul": lambda x: tf.math.scalar_mul(0.3, x),
    "tf.sequence_mask": lambda x: x * tf.sequence_mask(tf.argmax(x, -1), 4, tf.float32),
    "tf.where": lambda x: tf.where(x > 0.0, x, 0.1),
}
"""Operations with other calls."""


def operation_model(name: str) -> Any:
    """Returns a convolution, the operation, and its replacement in a model."""
    x = keras.Input((6, 6, 4))
    y = keras.layers.Conv2D(4, 1)(x)
    function = functools.reduce(getattr, name.split(".")[1:], tf)
    if name in CALLS:
        y = CALLS[name](y)
    elif name in OF_TWO:
        y = function(y, 2.0 * y)
    else:
        y = function(y, *ARGUMENTS.get(name, ()))
    return keras.Model(x, y)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_the_page_says_what_becomes_of_operations(name):
    model = operation_model(name)
    assert verdict(keras_qat.plan(model)) == OPERATIONS[name]
    # With all shapes and types that the float model has.
    quantized = keras_qat.quantize_model(model)
    assert quantized.output_shape == model.output_shape
    assert [tensor.dtype for tensor in quantized.outputs] == [
        tensor.dtype for tensor in model.outputs
    ]
