"""LayerNormalization in parts of 16 bits: as precise as in float between quantized tensors."""

from __future__ import annotations

import numpy as np
import pytest

import keras_qat
from keras_qat.keras2.backend import keras
from keras_qat.ops.sums import RECENT
from tests.comparison import KERNELS, assert_identical, export
from tests.helpers import images, rng, scramble

layers = keras.layers
pytestmark = pytest.mark.skipif(not RECENT, reason="this TensorFlow lacks a kernel")


@pytest.fixture
def in_16_bits():
    epsilon = lambda layer: {"epsilon": layer.epsilon}  # noqa: E731
    groups = lambda layer: {**epsilon(layer), "groups": layer.groups}  # noqa: E731
    with (
        keras_qat.register_op(layers.LayerNormalization, "layer_norm", attributes=epsilon),
        keras_qat.register_op(layers.GroupNormalization, "group_norm", attributes=groups),
    ):
        yield


def signal_to_noise(found, expected):
    found, expected = np.asarray(found), np.asarray(expected)
    return 10 * np.log10(np.sum(expected**2) / np.sum((found - expected) ** 2))


LONG = [pytest.param(spread, marks=pytest.mark.slow) for spread in (0.25, 1.0)]


@pytest.mark.parametrize("spread", [0.5, *LONG])
def test_loses_next_to_nothing_to_float(spread, in_16_bits):
    """On vectors of many sizes: 8 bits for each part gave 10 dB where float gives 29."""
    numbers = rng(0)
    x = numbers.normal(size=(512, 64)) * np.exp(spread * numbers.normal(size=(512, 1)))
    inputs = keras.Input((64,))
    model = keras.Model(inputs, layers.LayerNormalization()(inputs))
    exported = export(model, x.astype(np.float32), strict=True)
    expected = model(exported.x)
    in_float = signal_to_noise(exported.model(exported.x, training=True), expected)
    assert signal_to_noise(exported.model(exported.x), expected) > in_float - 0.1
    assert exported.report.outputs[0].identical == 1.0


@pytest.mark.slow
def test_a_transformer_block_is_one_chain_of_integers(in_16_bits):
    inputs = keras.Input((6, 8))
    x = layers.LayerNormalization()(inputs)
    x = layers.Add()([inputs, layers.MultiHeadAttention(2, 4)(x, x)])
    y = layers.Dense(16, activation="gelu")(layers.LayerNormalization()(x))
    model = scramble(keras.Model(inputs, layers.Add()([x, layers.Dense(8)(y)])))
    exported = export(model, images(24, (6, 8)), strict=True)
    assert exported.report.outputs[0].identical == 1.0
    for _, reads, writes in exported.file.operations():
        assert not any(dtype.kind == "f" for dtype in (*reads, *writes))
    for kernels in KERNELS:
        simulated = assert_identical(exported.model, exported.x, kernels, exported.contents)
        assert simulated.float_layers == ()


@pytest.mark.slow
def test_groups_in_a_residual_block(in_16_bits):
    inputs = keras.Input((6, 6, 8))
    x = layers.GroupNormalization(4)(layers.Conv2D(8, 3, padding="same")(inputs))
    x = layers.Add()([inputs, layers.ReLU()(x)])
    model = scramble(keras.Model(inputs, layers.Conv2D(3, 1)(layers.GroupNormalization(-1)(x))))
    exported = export(model, images(24, (6, 6, 8)), strict=True)
    assert exported.report.outputs[0].identical == 1.0
    for kernels in KERNELS:
        assert_identical(exported.model, exported.x, kernels, exported.contents)


@pytest.mark.parametrize("axis", [1, (1, 2)])
def test_other_axes_stay_in_float(axis, in_16_bits):
    inputs = keras.Input((6, 8))
    model = keras.Model(inputs, layers.LayerNormalization(axis=axis, name="norm")(inputs))
    assert "not along the last axis alone" in keras_qat.plan(model).float_layers["norm"]
