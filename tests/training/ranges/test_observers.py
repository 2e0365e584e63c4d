"""Tests ranges against a simple computation in NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from keras_qat.arithmetic import fake_quant
from keras_qat.arithmetic.quant_params import QuantParams
from keras_qat.layers import Quantize
from keras_qat.specs import QuantSpec
from tests.helpers import rng

pytestmark = pytest.mark.legacy


def observed(spec: QuantSpec, batches, **options) -> list[tuple[float, float]]:
    """Returns the range of a quantizer after each batch."""
    layer = Quantize(spec, **options)
    ranges = []
    for batch in batches:
        layer(np.asarray(batch, np.float32), training=True)
        ranges.append(layer.quantizer.current_range())
    return ranges


def debiased_average(values, decay: float) -> np.ndarray:
    """Returns the moving average of all values so far, divided by the sum of their weights."""
    results = []
    for count in range(1, len(values) + 1):
        weights = decay ** np.arange(count - 1, -1, -1.0)
        results.append(np.sum(weights * values[:count]) / np.sum(weights))
    return np.array(results)


def recent_average(values, decay):
    """Like `debiased_average`, but a value weighs at least 0.1, and 10 / count after 100 values."""
    average, results = 0.0, []
    for count, value in enumerate(values, 1):
        weight = max((1 - decay) / (1 - decay**count), 10 / max(count, 100))
        average += weight * (value - average)
        results.append(average)
    return np.array(results)


AVERAGES = {"moving_average": recent_average, "shadowed_moving_average": debiased_average}


@pytest.mark.sample(2)
@pytest.mark.parametrize("observer", AVERAGES)
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.999])
def test_moving_average_is_that_of_the_batches_so_far(decay, observer):
    batches = rng().normal(size=(120, 50)) * rng(1).uniform(0.1, 5, (120, 1))
    ranges = np.array(observed(QuantSpec(ema_decay=decay, observer=observer), batches))
    for column, extremes in ((0, batches.min(1)), (1, batches.max(1))):
        expected = AVERAGES[observer](extremes, decay)
        # If decay is close to 1, 1 - decay has few digits in float32, which sets the tolerance.
        np.testing.assert_allclose(ranges[:, column], expected, rtol=2e-4)


def test_shadowed_moving_average_in_single_precision_step_by_step():
    """The same order of float32 operations as in TensorFlow 1 has bit-exact results."""
    batches = rng().normal(size=(30, 10)).astype(np.float32)
    weight = np.float32(1 - 0.9)
    biased, step, expected = np.float32(0), np.float32(0), []
    for value in batches.max(1):
        biased = biased - (biased - value) * weight
        step += np.float32(1)
        expected.append(biased / (np.float32(1) - np.power(np.float32(1) - weight, step)))
    spec = QuantSpec(ema_decay=0.9, observer="shadowed_moving_average")
    result = np.array(observed(spec, batches), np.float32)[:, 1]
    np.testing.assert_array_max_ulp(result, np.array(expected), maxulp=2)


@pytest.mark.parametrize(("batch", "expected"), [([2.0, 3.0], (0, 3)), ([-3.0, -2.0], (-3, 0))])
@pytest.mark.parametrize("observer", ["moving_average", "last_value", "current_value"])
def test_zero_is_in_the_range(observer, batch, expected):
    layer = Quantize(QuantSpec(observer=observer, ema_decay=0.5))
    x = np.array(batch, np.float32)
    y = layer(x, training=True)
    np.testing.assert_array_equal(y, fake_quant.fake_quantize(x, *np.float32(expected)))


def test_known_lower_bound_is_not_observed():
    assert observed(QuantSpec(lower_bound=0.0, ema_decay=0.5), [[-5.0, 5.0]]) == [(0.0, 5.0)]


def test_inference_does_not_observe():
    layer = Quantize(QuantSpec())
    layer(np.array([-1.0, 2.0], np.float32), training=True)
    before = layer.quantizer.current_range()
    layer(np.array([-9.0, 9.0], np.float32), training=False)
    assert layer.quantizer.current_range() == before


def test_passes_values_through_before_any_data():
    x = rng().normal(size=100).astype(np.float32)
    np.testing.assert_array_equal(Quantize(QuantSpec())(x), x)


def test_initial_range_quantizes_before_any_data():
    x = rng().normal(size=100).astype(np.float32)
    layer = Quantize(QuantSpec(initial_range=(-1.0, 1.0)))
    np.testing.assert_array_equal(
        layer(x), fake_quant.fake_quantize(x, np.float32(-1.0), np.float32(1.0))
    )


def test_shared_range_holds_all_tensors():
    layer = Quantize(QuantSpec(ema_decay=0.5), slots=2)
    layer(np.array([-1.0, 1.0], np.float32), training=True, slot=0)
    layer(np.array([0.5, 4.0], np.float32), training=True, slot=1)
    assert layer.quantizer.current_range() == (-1.0, 4.0)


@pytest.mark.sample(6)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("observer", ["moving_average", "shadowed_moving_average", "last_value"])
@pytest.mark.parametrize("initial", [None, (0.0, 6.0)])
def test_models_in_half_precision_pass_over_what_is_not_finite(observer, bad, initial):
    spec = QuantSpec(ema_decay=0.5, observer=observer, initial_range=initial)
    good = rng().normal(size=(3, 50)) * [[1], [2], [3]]
    broken = np.where(np.arange(50) == 7, bad, good[0])
    first, one, _, *rest = observed(spec, [broken, good[0], broken, *good[1:]], mixed=True)
    assert [one, *rest] == observed(spec, good, mixed=True) == observed(spec, good)
    assert first == (initial or (0.0, 0.0))
    start = QuantSpec(observer=observer, lower_bound=0.0)
    assert observed(start, [good[0], broken], mixed=True)[1][0] == 0.0


@pytest.mark.parametrize("bits", [2, 8])
def test_symmetric_ranges_of_zeros_have_the_zero_point_of_others(bits):
    """From -1 to 1, zero was a tie. Kernels require the zero point 0."""
    layer = Quantize(QuantSpec(bits, symmetric=True))
    layer(tf.zeros([4]), training=True)
    params = QuantParams.from_range(*layer.quantizer.current_range(), bits)
    assert params.zero_point == 2 ** (bits - 1) - 128
