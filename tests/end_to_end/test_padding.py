"""Tests that a convolution includes the padding before it, if it can."""

import functools

import pytest

from tests.comparison import KERNELS, assert_identical, export
from tests.helpers import images, keras, scramble
from tests.networks.small import layers

OWN = {
    "stride_2": (((0, 1), (0, 1)), layers.Conv2D(4, 3, strides=2)),
    "stride_1": (((1, 1), (0, 0)), layers.Conv2D(4, (3, 1), activation="relu")),
    "larger": (((1, 2), (2, 2)), layers.Conv2D(4, (5, 5), strides=(2, 1))),
    "dilated": (((2, 2), (0, 0)), layers.Conv2D(4, (3, 1), dilation_rate=2)),
    "depthwise": (((0, 1), (0, 0)), layers.DepthwiseConv2D((3, 1), strides=2)),
}
"""Padding that equals a convolution's own. All differ, because a file pads equal tensors once."""
OTHER = {
    "in_front": (((1, 0), (1, 0)), layers.Conv2D(4, 3, strides=2)),
    "both_sides": (1, layers.Conv2D(4, 3, strides=2)),
    "of_same": (((2, 1), (1, 1)), layers.Conv2D(4, 3, padding="same")),
    "beside_same": (((0, 0), (2, 2)), layers.Conv2D(4, (1, 5), padding="same")),
    "transposed": (((1, 2), (1, 1)), layers.Conv2DTranspose(4, 3)),
}
"""Padding that stays separate."""


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
