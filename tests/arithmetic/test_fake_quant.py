"""Tests fake quantization against TensorFlow's operations and NumPy, and conditions in graphs."""

import math

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.arithmetic import fake_quant, plain_operations
from keras_qat.arithmetic.control_flow import cond
from keras_qat.arithmetic.quant_params import QuantParams
from tests.helpers import rng

pytestmark = pytest.mark.legacy


def scale_of(minimum, maximum, bits=8) -> tuple[float, int]:
    """Returns the scale of a range, and its zero point counted from the lowest level."""
    scale = (maximum - minimum) / (2**bits - 1)
    return scale, math.floor(0.5 - minimum / scale)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize(
    ("shape", "channel_axes"),
    [((3, 3, 5, 7), (-1,)), ((3, 3, 6, 2), (-2, -1)), ((11, 4), (-1,)), ((1, 1, 1, 1), (-1,))],
)
def test_channels_equal_tensorflows_op(shape, channel_axes, bits):
    channels = int(np.prod([shape[axis] for axis in channel_axes]))
    for seed in range(5):
        numbers = rng(seed)
        sizes = 10.0 ** numbers.uniform(-4, 3, channels)
        weights = (numbers.normal(size=shape).reshape(-1, channels) * sizes).astype(np.float32)
        if channels > 1:
            weights[:, 1] = 0.0
        limits = np.abs(weights).max(0)
        limits[limits == 0] = 1.0
        expected = tf.quantization.fake_quant_with_min_max_vars_per_channel(
            weights, -limits, limits, num_bits=bits, narrow_range=True
        )
        weights = weights.reshape(shape)
        result = fake_quant.fake_quantize_channels(
            weights, fake_quant.channel_limits(weights, channel_axes), bits
        )
        np.testing.assert_array_equal(result.numpy().ravel(), expected.numpy().ravel())


def test_channels_pass_the_gradient_everywhere():
    weights = tf.Variable(rng().normal(size=(3, 3, 2, 4)).astype(np.float32))
    upstream = rng(1).normal(size=(3, 3, 2, 4)).astype(np.float32)
    with tf.GradientTape() as tape:
        limits = tf.stop_gradient(fake_quant.channel_limits(weights, (-1,)))
        loss = tf.reduce_sum(upstream * fake_quant.fake_quantize_channels(weights, limits))
    np.testing.assert_array_equal(tape.gradient(loss, weights), upstream)


def test_channel_limits():
    weights = np.array([[1.0, 0.0, -3.0], [-2.0, 0.0, 1.0]], np.float32)
    np.testing.assert_array_equal(fake_quant.channel_limits(weights, (-1,)), [[2.0, 1.0, 3.0]])


@pytest.mark.parametrize("shape", [(3, 3, 128, 256), (1024, 257), (1, 1, 521, 509)])
def test_channel_limits_of_large_kernels(shape):
    weights = rng().normal(size=shape).astype(np.float32)
    weights[..., :2] = [0.0, -9.0]
    expected = np.abs(weights).reshape(-1, shape[-1]).max(0)
    expected[0] = 1.0
    computed = fake_quant.channel_limits(weights, (-1,)).numpy()
    np.testing.assert_array_equal(computed, expected.reshape([1] * (len(shape) - 1) + [-1]))


def test_channel_limits_of_a_large_transposed_kernel():
    weights = rng().normal(size=(2, 2, 256, 257)).astype(np.float32)
    computed = fake_quant.channel_limits(weights, (-2,)).numpy()
    np.testing.assert_array_equal(computed, np.abs(weights).max((0, 1, 3), keepdims=True))


@pytest.mark.parametrize("bits", range(2, 9))
def test_values_lie_on_the_levels_of_the_range(bits):
    x = rng().uniform(-2, 4, 20_000).astype(np.float32)
    minimum, maximum = np.float32(-1.3), np.float32(2.9)
    scale, zero_point = scale_of(minimum, maximum, bits)
    computed = fake_quant.fake_quantize(x, minimum, maximum, bits).numpy()
    codes = np.clip(np.round(x / scale) + zero_point, 0, 2**bits - 1)
    np.testing.assert_allclose(computed, (codes - zero_point) * scale, atol=1e-6)
    assert len(np.unique(computed)) == 2**bits
    assert 0.0 in computed


@pytest.mark.parametrize("narrow_range", [False, True])
@pytest.mark.parametrize("bits", [2, 5, 8, 16])
def test_the_nudged_range_ends_where_tensorflows_op_clips(bits, narrow_range):
    for low, high in [(-1.3, 2.9), (0.0, 6.0), (-3.1, 0.0), (-0.01, 7.7)]:
        ends = plain_operations.nudged_range(
            tf.constant(low), tf.constant(high), bits, narrow_range
        )
        expected = tf.quantization.fake_quant_with_min_max_vars(
            [-1e9, 1e9], low, high, num_bits=bits, narrow_range=narrow_range
        )
        np.testing.assert_allclose(ends, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ceiling", [None, 1.5, 6.0, math.inf])
@pytest.mark.parametrize(("low", "high"), [(0.0, 6.0), (0.0, 1.3), (-1.7, 3.1), (-4.2, 0.0)])
def test_ranges_of_numbers_give_what_tensors_do(low, high, ceiling):
    """Compares values and gradients, except gradients at the ends of the range."""
    if ceiling is not None and low < 0:
        pytest.skip("A range behind a ReLU begins at zero.")
    x = tf.constant(rng().uniform(-5, 7, 50_000).astype(np.float32))
    ends = [np.float32(low), np.float32(high)]
    result = []
    for given in (ends, [*map(float, ends)]):
        for bits in (2, 4, 8):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = fake_quant.fake_quantize_if(True, x, *given, bits, False, ceiling)
                loss = tf.reduce_sum(y * tf.cos(x[::-1]))
            result.append((y.numpy(), tape.gradient(loss, x).numpy()))
    for number, (y, gradient) in enumerate(result):
        np.testing.assert_array_equal(y, result[number % 3][0])
        np.testing.assert_array_equal(gradient, result[number % 3][1])


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(
    ("low", "high", "ceiling", "inside", "outside"),
    [
        (-1.0, 1.55, None, [-1.0, 0.0, 1.55], [-1.001, 1.551, np.inf]),
        (0.0, 2.0, None, [0.0, 2.0], [-1e-4, 2.001]),
        (0.0, 2.0, math.inf, [1e-30, 2.0], [0.0, -1.0, 2.001]),
        (0.0, 2.0, 6.0, [1e-30, 2.0], [0.0, 2.001]),
        (0.0, 6.0, 6.0, [1e-30, 5.99999], [0.0, 6.0, 7.0]),
    ],
)
def test_which_numbers_pass_the_gradient(
    monkeypatch, is_known, on_gpu, low, high, ceiling, inside, outside
):
    """The gradient passes at the ends of a range, but not at zero and the upper end of a ReLU.

    GPUs compare steps of the range. For them, the end of a ReLU6 is an end of the range, and tiny
    values are zero.
    """
    monkeypatch.setattr(plain_operations, "has_gpu", lambda: on_gpu)
    number = float if is_known else np.float32
    if on_gpu:
        inside = [end if end > 1e-30 else high * 2.0**-25 for end in inside]
        outside = [end if end != ceiling else high * (1 + 2.0**-18) for end in outside]
    x = tf.constant([*inside, *outside, np.nan])
    with tf.GradientTape() as tape:
        tape.watch(x)
        ends = number(low), number(high)
        y = fake_quant.fake_quantize_if(True, x, *ends, ceiling=ceiling)
    expected = [3.0] * len(inside) + [0.0] * (len(outside) + 1)
    np.testing.assert_array_equal(tape.gradient(y, x, tf.fill([len(x)], 3.0)), expected)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("ceiling", [6.0, math.inf])
def test_without_quantization_the_gradient_is_that_of_the_relu(monkeypatch, on_gpu, ceiling):
    monkeypatch.setattr(plain_operations, "has_gpu", lambda: on_gpu)
    x = tf.constant([-1.0, 0.0, 0.5, 5.99999, 6.0, 7.0])
    for applies in (False, tf.constant(False)):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = fake_quant.fake_quantize_if(applies, x, 0.0, 2.0, ceiling=ceiling)
        np.testing.assert_array_equal(y, np.clip(x, 0, ceiling))
        expected = (x.numpy() > 0) & (x.numpy() < ceiling)
        np.testing.assert_array_equal(tape.gradient(y, x), expected)


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_how_far_beyond_a_range_the_gradient_passes(monkeypatch, is_known, on_gpu, bits):
    """The gradient passes up to a millionth of the end, on GPUs up to a millionth of the width."""
    monkeypatch.setattr(plain_operations, "has_gpu", lambda: on_gpu)
    levels = 2**bits - 1
    step = 16.0 / levels
    low, high = (end * step for end in (-(levels // 4), levels - levels // 4))
    at_low, at_high = [16.0 * 2.0**-20] * 2 if on_gpu else (-low * 2.0**-20, high * 2.0**-20)
    ends = [end for share in (0.5, 2.0) for end in (low - share * at_low, high + share * at_high)]
    number = float if is_known else np.float32
    x = tf.constant(np.float32(ends))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = fake_quant.fake_quantize_if(True, x, number(low), number(high), bits)
    np.testing.assert_array_equal(tape.gradient(y, x), [1, 1, 0, 0])


@pytest.mark.parametrize(
    ("x", "options", "expected"),
    [
        ([1.0, 3.0], {}, (0.0, 3.0)),
        ([-2.0, -1.0], {}, (-2.0, 0.0)),
        ([-1.0, 3.0], {}, (-1.0, 3.0)),
        ([-1.0, 3.0], {"symmetric": True, "narrow_range": True}, (-3.0, 3.0)),
        ([-4.0, 3.0], {"symmetric": True, "narrow_range": True}, (-4.0, 4.0)),
        ([-1.0, 127.0], {"symmetric": True}, (-128.0, 127.0)),
        ([-256.0, 3.0], {"symmetric": True}, (-256.0, 254.0)),
        ([0.0], {}, (0.0, 0.0)),
    ],
)
def test_range_holds_the_tensor_and_zero(x, options, expected):
    result = fake_quant.find_range(np.array(x, np.float32), **options)
    np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("minimum", "maximum", "scale", "zero_point"),
    [(0.0, 255.0, 1.0, 0), (-128.0, 127.0, 1.0, 128), (-0.4, 254.6, 1.0, 0), (-255.0, 0, 1.0, 255)],
)
def test_scale_and_zero_point(minimum, maximum, scale, zero_point):
    params = QuantParams.from_range(minimum, maximum)
    assert (params.scale, params.zero_point + 128) == (scale, zero_point)


@pytest.mark.parametrize(
    ("minimum", "maximum"), [(0.0, 6.0), (-1.0, 3.0), (-5.0, 0.0), (-2.5, 252.5)]
)
def test_averages_are_rounded_as_integer_kernels_do(minimum, maximum):
    """TFLite adds signed quantized values and divides, with halves rounded away from zero."""
    scale, zero_point = scale_of(minimum, maximum)
    zero_point -= 128
    codes = rng().integers(-128, 128, (500, 4))
    total = codes.sum(1)
    expected = np.sign(total) * ((np.abs(total) + 2) // 4)
    x = ((codes - zero_point) * np.float32(scale)).astype(np.float32).mean(1)
    computed = fake_quant.fake_quantize_average(x, np.float32(minimum), np.float32(maximum)).numpy()
    np.testing.assert_array_equal(np.round(computed / scale) + zero_point, expected)


def test_averages_of_zeros_stay_zeros():
    """Before any other data, the range of zeros has no width."""
    np.testing.assert_array_equal(fake_quant.fake_quantize_average(tf.zeros(2), 0.0, 0.0), [0, 0])


def test_average_passes_the_gradient_everywhere():
    x = tf.Variable([0.1, 1.0, 2.9])
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(fake_quant.fake_quantize_average(x, 0.0, 3.0))
    np.testing.assert_array_equal(tape.gradient(y, x), [1, 1, 1])


def test_functions_round_weights_as_eager_execution_does():
    """Graph optimization replaced the division by a product, which changed weights near halves."""
    weights = tf.Variable(np.random.default_rng(0).normal(size=(3, 3, 128, 512)), dtype=tf.float32)

    def quantize():
        return fake_quant.fake_quantize_channels(
            tf.convert_to_tensor(weights), fake_quant.channel_limits(weights, (-1,))
        )

    np.testing.assert_array_equal(tf.function(quantize)(), quantize())


@pytest.mark.parametrize("taken", [True, False])
def test_a_graph_has_one_branch_if_a_tensor_outside_of_it_decides(taken):
    def other():
        raise AssertionError("is not traced")

    def add_one(x):
        branches = [lambda: x + 1.0, other] if taken else [other, lambda: x + 1.0]
        return cond(outside, *branches)

    outside = tf.constant(taken)
    assert tf.function(add_one)(tf.constant(1.0)) == 2.0
