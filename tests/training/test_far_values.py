"""Tests outliers that use up a range, such as -1e9 for masked entries."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.training.calibration.lost_values import find_outliers
from tests.helpers import keras, layers, rng

X = {
    "x": rng(0).normal(size=(64, 10, 8)).astype(np.float32),
    "mask": (rng(1).uniform(size=(64, 10, 1)) > 0.3).astype(np.float32),
}


def replaced(h, mask, mark):
    return tf.where(mask > 0.5, h, mark)


def added(h, mask, mark):
    return h + (1 - mask) * mark


def beside(h, mask, mark):
    return layers.Concatenate(name="both")([h, mark * (1 - mask)])


def at_least(h, mask, mark):
    return tf.maximum(h + (1 - mask) * 2 * mark, mark)


def masked(combine, mark):
    x, mask = keras.Input((10, 8), name="x"), keras.Input((10, 1), name="mask")
    h = combine(layers.Dense(8, name="h")(x), mask, mark)
    pooled = layers.Flatten()(layers.MaxPooling1D(10)(h))
    # An output h keeps its marks. Before a maximum alone, they would not determine a range.
    model = keras.Model([x, mask], [layers.Dense(4, name="y")(pooled), h])
    return keras_qat.quantize_model(model)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("combine", "mark"),
    # The sum of `at_least` and -1e9 looks like masked scores, whose lowest value is not reported.
    [*itertools.product([replaced, added, beside], [-1e9, -999.0]), (at_least, -999.0)],
)
def test_a_mark_of_a_model_is_told(combine, mark):
    with pytest.warns(UserWarning, match=r"The output of '.*': its range, -\S+ to .*, is set by -"):
        keras_qat.calibrate(masked(combine, mark), X)


def test_tensors_that_are_joined_are_told_apart():
    """One tensor has the outliers, and another tensor loses its values."""
    x = keras.Input((8,), name="x")
    large = layers.Rescaling(1000.0, name="large")(x)
    small = layers.Dense(4, "tanh", name="small")(x)
    both = layers.Concatenate(name="both")([small, large])
    qat = keras_qat.quantize_model(keras.Model(x, layers.Dense(2, name="y")(both)))
    message = (
        r"The output of 'small', -\S+ to \S+, shares one range, -\S+ to \d+, with 'large'\. It "
        r"spans less than 4 of 256 .* by a Rescaling or a BatchNormalization after 'large'\. "
    )
    with pytest.warns(UserWarning, match=message):
        keras_qat.calibrate(qat, 2 + np.abs(X["x"][:, 0]))


@pytest.mark.sample(1)
@pytest.mark.parametrize("combine", [replaced, added, beside, at_least])
def test_a_mark_of_the_size_of_the_others_is_not(combine):
    keras_qat.calibrate(masked(combine, -8.0), X)  # A warning would fail the test.


def test_masked_scores_of_attention_are_not():
    """The library replaces the mask, and small scores keep their weight."""
    x = keras.Input((10, 8), name="x")
    scores = layers.MultiHeadAttention(1, 2, kernel_initializer=tf.constant_initializer(1e-2))
    model = keras.Model(x, scores(x, x, use_causal_mask=True))
    keras_qat.calibrate(keras_qat.quantize_model(model), X["x"])  # A warning would fail the test.


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.append(np.linspace(-1, 1, 99), 1000.0), 1000.0),
        (np.append(np.linspace(-1, 1, 99), [-1000.0, -1003.0]), -1003.0),
        (np.append(np.linspace(-1, 1, 99), [-1000.0, 1001.0]), 1001.0),
        (np.linspace(-1000, 1, 99), None),
        (np.append(np.linspace(-1, 1, 99), 20.0), None),
        (np.float32([0, 0, 0, 1000, 1000]), None),
        (np.linspace(1000, 1001, 99), None),
        (np.full(9, 7.0), None),
    ],
)
def test_what_lies_far_outside(values, expected):
    ends = min(values.min(), 0.0), max(values.max(), 0.0)
    far = find_outliers(values, (values.min(), values.max()), ends, 8)
    assert (None if far is None else far.value) == expected
    if far is not None:
        assert (far.low, far.high) == (-1, 1)
    wide = find_outliers(values, (values.min(), values.max()), ends, 16)
    assert wide is None  # 65,536 quantized values are enough for both.


def test_a_range_of_other_data_is_not_set_by_far_values():
    assert find_outliers(np.linspace(0, 1, 99), (0.0, 1.0), (0.0, 255.0), 8) is None


def test_a_range_that_no_value_reaches_is_set_by_something_else():
    """For example, the operator fixes the range of probabilities."""
    values = np.linspace(1e-4, 6e-3, 1000)
    assert find_outliers(values, (1e-4, 0.5), (0.0, 0.996), 8) is not None
    assert find_outliers(values, (1e-4, 8.6e-3), (0.0, 0.996), 8) is None


def test_saturated_gates_are_not_far_outside():
    """Many values of 1 - sigmoid(x) are 1, and the others small. A single 1 is an outlier."""
    small = np.linspace(0, 0.02, 999)
    assert find_outliers(np.append(small, np.ones(300)), (0.0, 1.0), (0.0, 1.0), 8) is None
    far = find_outliers(np.append(small, 1.0), (0.0, 1.0), (0.0, 1.0), 8)
    assert far is not None
    assert far.value == 1
