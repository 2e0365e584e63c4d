"""Tests weights, biases and constants of files against training, and limits of scales."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.integer_graph import fold_recurrent
from keras_qat.integer_graph.fold_weights import fold_calls
from keras_qat.integer_graph.resolve_tensors import quantize_constant
from keras_qat.ops.weights import compute_reach
from keras_qat.training.layers import QuantizeWrapper
from tests.helpers import build_model, keras, layers


def wrapped(build, shape, kernel, bias=None, **options):
    """Returns the wrapper of a layer with these weights. Gammas of its BatchNormalization vary."""
    qat = keras_qat.quantize_model(build_model(shape, build), keras_qat.recipes.int8(**options))
    (wrapper,) = (layer for layer in qat.layers if isinstance(layer, QuantizeWrapper))
    own = wrapper.layer
    own.set_weights([kernel] if bias is None else [kernel, bias])
    return wrapper


def dense(kernel, bias=None, **options):
    build = layers.Dense(kernel.shape[1], use_bias=bias is not None)
    return wrapped(build, kernel.shape[:1], kernel, bias, **options)


def ends(before, after, bits=8):
    return tuple(QuantParams(np.float32(scale), 0, bits) for scale in (before, after))


def drawn(*shape):
    """Returns random values of different magnitude in each column."""
    numbers = np.random.default_rng(0)
    return np.float32(numbers.normal(size=shape) * 10.0 ** numbers.uniform(-3, 2, shape[-1]))


@pytest.mark.sample(1)
@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("bits", [8, 5, 4, 2])
def test_each_channel_has_its_own_steps(bits, in_graph):
    """All levels are used. With few bits, values are multiples, to get finer steps for the bias."""
    kernel, bias = drawn(40, 6), drawn(1, 6)[0]
    wrapper = dense(kernel, bias, weight_bits=bits)
    before = 0.03125

    def fold():
        (weights,) = fold_calls(wrapper, [ends(before, 1e3)], in_graph)
        return weights.q, weights.scale, weights.bias

    q, scale, of_bias = map(np.asarray, tf.function(fold)() if in_graph else fold())
    levels = 2 ** (bits - 1) - 1
    times = 127 // levels
    expected = np.abs(kernel).max(0) / (levels * times)
    np.testing.assert_allclose(scale.reshape(-1), expected, rtol=1e-6)
    assert scale.shape == (1, 6)
    assert np.all(np.abs(q).max(0) == levels * times)
    assert not np.any(q % times)
    assert np.all(np.abs(q * scale - kernel) <= 0.501 * times * scale)
    np.testing.assert_array_equal(of_bias, np.rint(bias / (np.float64(before) * scale[0])))


def test_each_call_has_its_own_bias():
    kernel, bias = drawn(5, 3), drawn(1, 3)[0]
    calls = [ends(0.25, 10.0), ends(0.5, 1e4), ends(0.125, 1e4)]
    found = fold_calls(dense(kernel, bias), calls, False)
    for weights, (before, _) in zip(found, calls, strict=True):
        np.testing.assert_array_equal(weights.q, found[0].q)
        step = np.float64(before.scale) * weights.scale[0]
        np.testing.assert_array_equal(weights.bias, np.rint(bias / step))


@pytest.mark.parametrize(("bits", "most"), [(8, 255.5), (16, 16000.0)])
def test_multipliers_end_where_kernels_do(bits, most):
    """Sums of such channels saturate anyway."""
    kernel = np.float32([[127.0, 1.27]])
    before, after = ends(1.0, 1 / 400, bits)
    if bits == 16:
        before, after = ends(1.0, 1 / 20000, bits)
    (weights,) = fold_calls(dense(kernel), [(before, after)], False)
    largest = np.float32(most * np.float64(after.scale) / np.float64(before.scale))
    assert weights.scale[0, 0] == largest
    np.testing.assert_allclose(weights.scale[0, 1], 0.01, rtol=1e-4)
    np.testing.assert_array_equal(weights.q, [[127, 127]])


def test_biases_fit_half_of_32_bits():
    """Scales of a dead channel are increased, and its weights are rounded again."""
    kernel = np.float32([[1e-3, 1e-3], [-5e-4, 2e-4]])
    bias = np.float32([3e6, 0.5])
    (weights,) = fold_calls(dense(kernel, bias), [ends(1.0, 1e4)], False)
    np.testing.assert_allclose(weights.scale[0, 0], 3e6 / 2**30, rtol=1e-6)
    np.testing.assert_allclose(weights.bias[0], 2**30, rtol=1e-6)
    np.testing.assert_array_equal(weights.q[:, 0], [0, 0])
    np.testing.assert_array_equal(weights.q[:, 1], [127, 25])
    (alike,) = fold_calls(dense(kernel, bias * np.float32(1e-7)), [ends(1.0, 1e4)], False)
    np.testing.assert_allclose(alike.scale[0], 1e-3 / 127, rtol=1e-6)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("per_gate", [True, False])
def test_biases_of_an_lstm_fit_32_bits_or_have_64(per_gate, bits):
    """Each gate has its own scale. With 16 bits, no scale is increased for a bias."""
    x = keras.Input((2, 5))
    recipe = keras_qat.recipes.int8(per_channel=per_gate)
    qat = keras_qat.quantize_model(keras.Model(x, layers.LSTM(3)(x)), recipe)
    (wrapper,) = (layer for layer in qat.layers if isinstance(layer, QuantizeWrapper))
    kernels = [np.full(weight.shape, 1e-3, np.float32) for weight in wrapper.layer.weights[:2]]
    bias = np.zeros(12, np.float32)
    bias[4], bias[7] = -3e6, 0.5
    wrapper.layer.set_weights([*kernels, bias])
    (weights,) = fold_recurrent.fold_recurrent_calls(wrapper, [ends(1.0, 1e4, bits)], False, None)
    expected = np.full(12, 1e-3 / 127)
    if bits == 8:
        expected[3:6] = 3e6 / 2**30
    np.testing.assert_allclose(weights.scale[0], expected, rtol=1e-6)
    np.testing.assert_allclose(weights.recurrent.scale, 1e-3 / 127, rtol=1e-6)
    np.testing.assert_allclose(weights.bias, np.rint(bias / weights.scale[0]))


def test_steps_have_a_least_size():
    kernel = np.float32([[1e-12, 4.9e-7, 5.1e-7]])
    (weights,) = fold_calls(dense(kernel), [ends(1.0, 1.0)], False)
    np.testing.assert_allclose(weights.scale[0] * 127, [5e-7, 5e-7, 5.1e-7], rtol=1e-6)
    np.testing.assert_array_equal(weights.q, [[0, 124, 127]])


def test_channels_of_zeros_have_some_scale():
    (weights,) = fold_calls(dense(np.zeros((3, 2), np.float32)), [ends(1.0, 9.0)], False)
    np.testing.assert_allclose(weights.scale, 1 / 127, rtol=1e-6)
    assert not weights.q.any()


def test_multipliers_of_16_bits_are_exact():
    """int16 kernels have 15 bits for them. Scales change a little to fit."""
    kernel = drawn(20, 30)
    (weights,) = fold_calls(dense(kernel), [ends(0.013, 0.7, 16)], False)
    before, after = (np.float64(end.scale) for end in ends(0.013, 0.7, 16))
    fraction, _ = np.frexp(weights.scale[0] * before / after)
    np.testing.assert_allclose(fraction * 2**15, np.rint(fraction * 2**15), atol=0.01)
    np.testing.assert_allclose(weights.scale[0], np.abs(kernel).max(0) / 127, rtol=6.3e-5)


@pytest.mark.parametrize("kind", ["depthwise", "transposed"])
def test_channels_on_other_axes(kind):
    kernel = drawn(2, 2, 4, 3)
    if kind == "depthwise":
        build, axes, sizes = layers.DepthwiseConv2D(2, depth_multiplier=3), (0, 1), (4, 12)
    else:
        build, axes, sizes = layers.Conv2DTranspose(4, 2), (0, 1, 3), (3, 4)
    wrapper = wrapped(build, (5, 5, sizes[0]), kernel, np.zeros(sizes[1], np.float32))
    (weights,) = fold_calls(wrapper, [ends(1.0, 1e4)], False)
    expected = np.abs(kernel).max(axes, keepdims=True) / 127
    np.testing.assert_allclose(weights.scale, expected, rtol=1e-6)
    assert np.all(np.abs(weights.q * weights.scale - kernel) <= 0.501 * weights.scale)


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("kind", [layers.SimpleRNN, layers.GRU])
def test_each_channel_of_a_recurrent_layer_has_its_own_steps(kind, per_channel):
    x = keras.Input((2, 5))
    recipe = keras_qat.recipes.int8(per_channel=per_channel)
    qat = keras_qat.quantize_model(keras.Model(x, kind(3, use_bias=False)(x)), recipe)
    (wrapper,) = (layer for layer in qat.layers if isinstance(layer, QuantizeWrapper))
    kernels = [drawn(*weight.shape) for weight in wrapper.layer.weights]
    wrapper.layer.set_weights(kernels)
    coarse = QuantParams(np.float32(1e4), 0, 8)
    (weights,) = fold_recurrent.fold_recurrent_calls(
        wrapper, [(coarse, coarse)], False, lambda _: coarse
    )
    for part, kernel in zip((weights, weights.recurrent), kernels, strict=True):
        largest = np.abs(kernel).max(0, keepdims=True)
        expected = (largest if per_channel else largest.max(keepdims=True)) / 127
        np.testing.assert_allclose(part.scale, expected, rtol=1e-6)
        assert np.all(np.abs(part.q * part.scale - kernel) <= 0.501 * part.scale)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(
    ("low", "high"), [(-1.0, 3.0), (-3.0, 1.0), (0.5, 2.0), (-2.0, -0.5), (0.0, 0.0)]
)
def test_a_constant_is_kept_to_half_a_step_of_its_own_range(bits, low, high):
    values = np.random.default_rng(0).uniform(low, high, 60).astype(np.float32)
    values[:2] = low, high
    constant = quantize_constant(values, bits)
    low, high = min(low, 0.0), max(high, 0.0)
    step = max(-low, high) / 32767 if bits == 16 else (high - low) / 255
    assert constant.params.scale == np.float32(step or 1 / 32767 if bits == 16 else step or 1.0)
    error = np.abs(constant.params.dequantize(constant.q) - values)
    assert error.max() <= 0.5001 * step


@pytest.mark.parametrize("channels", [(-1,), (-2, -1), (-2,), ()])
@pytest.mark.parametrize("make", [np.asarray, tf.constant])
def test_the_reach_is_the_largest_sum_of_weights_of_one_sign(make, channels):
    for seed in range(3):
        q = np.random.default_rng(seed).integers(-127, 128, (3, 2, 4, 5)).astype(np.float32)
        q *= seed > 0  # For zeros it is 0.
        axes = tuple(axis for axis in range(-4, 0) if axis not in channels)
        above, below = (np.maximum(sign * q, 0).sum(axes) for sign in (1, -1))
        assert float(compute_reach(make(q), channels)) == max(above.max(), below.max())
