"""Tests that `diagnose` names the right problems, and that its remedies work as promised."""

import json
import warnings

import numpy as np
import pytest

import keras_qat
from keras_qat.analysis import diagnose
from tests.helpers import keras, quantize_on, rng
from tests.networks.small import layers

X = rng().uniform(-1, 1, (64, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def model():
    """Returns a network that concatenates tensors, with one value far larger than all others."""
    keras.utils.set_random_seed(0)
    x = keras.Input((8,), name="x")
    large = layers.Rescaling(1000.0, name="large")(layers.Dense(1, name="one")(x))
    both = layers.Concatenate(name="both")([layers.Dense(8, "tanh", name="features")(x), large])
    norm = layers.BatchNormalization(momentum=0.0, name="norm")
    both = layers.Dropout(0.0, name="dropped")(both)  # Otherwise it would be scaled first.
    model = keras.Model(x, layers.Dense(5, name="logits")(norm(both)), name="net")
    model(X, training=True)
    return model


def signal_to_noise(model, qat, x):
    exact, result = (variant.predict(x, verbose=0) for variant in (model, qat))
    return 10 * np.log10(np.sum((exact - exact.mean(0)) ** 2) / np.sum((result - exact) ** 2))


def test_layer_that_hurts(model):
    qat = keras_qat.quantize_model(model)
    with pytest.warns(UserWarning, match="'features', .* shares one range, .*, with 'large'"):
        keras_qat.calibrate(qat, X)
    before = qat.get_weights()
    diagnosis = keras_qat.diagnose(qat, X)
    assert all(map(np.array_equal, before, qat.get_weights()))
    assert diagnosis.now.sqnr == pytest.approx(signal_to_noise(model, qat, X[1::2]), abs=0.1)
    (problem,) = diagnosis.problems
    assert "'features'" in problem and not diagnosis.is_good
    assert "both" in diagnosis.layers
    promised = diagnosis.remedies["recipes.int16x8()"]
    assert promised.sqnr > diagnosis.now.sqnr + 20
    island = next(code for code in diagnosis.remedies if code.count("quantize=False") > 1)
    assert "override('both', quantize=False)" in island
    assert diagnosis.remedies[island].sqnr > diagnosis.now.sqnr + 20
    wide = quantize_on(model, X[::2], "int16x8")
    assert promised.sqnr == pytest.approx(signal_to_noise(model, wide, X[1::2]), abs=0.1)
    assert json.loads(json.dumps(diagnosis.to_dict()))["now"]["sqnr"] == diagnosis.now.sqnr
    lines = str(diagnosis).splitlines()
    assert lines[0] == "net: quantized against float, 32 examples"
    assert any(line.endswith("%  recipes.int16x8()") for line in lines)


def test_ranges_of_other_data():
    keras.utils.set_random_seed(0)
    inner = layers.Dense(8, "relu")
    model = keras.Sequential([keras.Input((8,), name="x"), inner, layers.Dense(5)])
    qat = quantize_on(model, 100 * X)
    diagnosis = keras_qat.diagnose(qat, X)
    (problem,) = diagnosis.problems
    assert problem.startswith("Input 'x' uses 1.0% of its range, -100.2 to 99.4, and 0.0%")
    assert next(iter(diagnosis.remedies)) == "calibrate(qat, x)"
    assert diagnosis.remedies["calibrate(qat, x)"].sqnr > diagnosis.now.sqnr + 3


@pytest.mark.slow
def test_ranges_that_include_more_than_the_data_have():
    """16-bit ranges are symmetric, and all ranges include zero."""
    for recipe, x in (("int16x8", np.abs(X)), ("int8", 0.6 + 0.4 * np.abs(X))):
        qat = quantize_on(keras.Sequential([keras.Input((8,)), layers.Dense(3)]), x, recipe)
        diagnosis = keras_qat.diagnose(qat, x)
        assert diagnosis.is_good and "\nThe model is good: " in str(diagnosis)


def test_warnings_of_other_libraries_are_no_problems(monkeypatch):
    def deprecate(*args, **options):
        warnings.warn("an old function", DeprecationWarning, stacklevel=2)
        return keras_qat.calibrate(*args, **options)

    monkeypatch.setattr(diagnose, "calibrate", deprecate)
    model = keras.Sequential([layers.Dense(4, input_shape=(8,))])
    assert not keras_qat.diagnose(quantize_on(model, X), X).problems


def test_a_dead_model_is_told():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(3, kernel_initializer="zeros")])
    qat = quantize_on(model, X)
    (problem,) = keras_qat.diagnose(qat, X[:16]).problems
    assert "output of the float model is the same" in problem


def test_what_cannot_be_diagnosed(model):
    qat = keras_qat.quantize_model(model)
    with pytest.raises(ValueError, match="have seen no data yet"):
        keras_qat.diagnose(qat, X)
    with pytest.raises(ValueError, match="at least 8 examples, but got 4"):
        keras_qat.diagnose(qat, X[:4])
    stateful = layers.GRU(2, stateful=True)
    qat = quantize_on(
        keras.Sequential([keras.Input((4, 8), 2), stateful]), np.reshape(X, (16, 4, 8))
    )
    with pytest.raises(ValueError, match=r"keeps its states .* stateful=False"):
        keras_qat.diagnose(qat, np.reshape(X, (16, 4, 8)))
