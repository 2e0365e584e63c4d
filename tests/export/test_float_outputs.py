"""Tests outputs of float layers, which are only rounded if the file should return integers."""

from typing import Any

import numpy as np
import pytest

import keras_qat
from tests.helpers import export_exact, images, keras, quantize_on, save_and_load
from tests.networks.small import layers

X = images(200, (8,))
BY_NAME = keras_qat.recipes.int8().override("value", quantize=False)


def actor_and_critic() -> Any:
    keras.utils.set_random_seed(1)
    state = keras.Input((8,), name="state")
    hidden = layers.Dense(16, "relu", name="hidden")(state)
    policy = layers.Dense(3, "softmax", name="policy")(hidden)
    value = layers.Dense(1, "sigmoid", name="value")(hidden)
    return keras.Model(state, [policy, value])


@pytest.fixture(scope="module")
def qat():
    return quantize_on(actor_and_critic(), X, BY_NAME)


@pytest.mark.parametrize("output_dtype", [None, "float32"])
def test_an_output_left_in_float_is_not_rounded(qat, output_dtype):
    contents = keras_qat.export_tflite(qat, output_dtype=output_dtype)
    policy, value = keras_qat.TFLiteModel(contents).predict(X)
    expected = qat.predict(X, verbose=0)
    assert len(np.unique(value)) > 190
    np.testing.assert_array_equal(policy, expected[0])
    np.testing.assert_allclose(value, expected[1], atol=1e-6)
    assert len(np.unique(policy)) <= 256
    report = keras_qat.verify(qat, contents, X)
    assert report.identical == 1
    assert report.verdict.is_same


@pytest.mark.parametrize("output_dtype", ["int8", "uint8"])
def test_a_file_of_integers_rounds_it(qat, output_dtype):
    contents = keras_qat.export_tflite(qat, output_dtype=output_dtype)
    file = keras_qat.TFLiteModel(contents)
    assert {str(info.dtype) for info in file.outputs.values()} == {output_dtype}
    value, expected = file.predict(X)[1], qat.predict(X, verbose=0)[1]
    step = file.outputs["value"].scale
    assert 1 / 512 < step < 1 / 256 + 1e-6
    assert np.abs(value - expected).max() <= step / 2 + 1e-6
    assert keras_qat.verify(qat, contents, X).verdict.is_same


def test_the_range_is_observed_but_training_does_not_round(qat):
    (quantizer,) = (q for q in keras_qat.quantizers(qat) if q.quantizes == ("value",))
    low, high = qat(X, training=True)[1].numpy().min(), quantizer.maximum
    assert quantizer.calibrated and low < high <= 1.01
    assert len(np.unique(qat(X, training=True)[1])) > 190


@pytest.mark.parametrize(
    "build",
    [
        lambda x: layers.Dense(1, name="value")(layers.Dense(4)(x)),
        lambda x: layers.Reshape((2, 1), name="reshaped")(layers.Dense(2, name="value")(x)),
        lambda x: layers.Softmax(name="value")(layers.Dense(3, name="scores")(x)),
    ],
    ids=["sequence", "reshaped", "without weights"],
)
def test_whatever_the_layer_is(build):
    x = keras.Input((8,))
    qat = quantize_on(keras.Model(x, build(x)), X, BY_NAME)
    values = keras_qat.TFLiteModel(keras_qat.export_tflite(qat)).predict(X)
    assert len(np.unique(values)) > 0.9 * values.size
    np.testing.assert_allclose(values, qat.predict(X, verbose=0), atol=1e-6)
    integers = keras_qat.export_tflite(qat, output_dtype="int8")
    assert keras_qat.verify(
        qat, integers, X
    ).verdict.is_same  # Float layers differ in the last bit.


def test_an_output_that_layers_in_integers_read_is_rounded_with_them():
    x = keras.Input((8,))
    value = layers.Dense(1, name="value")(x)
    model = keras.Model(x, [value, layers.Dense(2, name="more")(value)])
    qat = quantize_on(model, X, BY_NAME)
    export_exact(qat, X, output_dtype="float32")


@pytest.mark.parametrize("format_", [".keras", pytest.param("", marks=pytest.mark.slow)])
def test_it_is_saved(qat, format_, tmp_path):
    loaded = save_and_load(qat, tmp_path / f"qat{format_}")
    for dtype in (None, "int8"):
        contents = keras_qat.export_tflite(loaded, output_dtype=dtype)
        assert contents == keras_qat.export_tflite(qat, output_dtype=dtype)


def test_integers_of_an_output_outside_the_scope_are_refused():
    """No quantizer has observed its range."""
    qat = quantize_on(actor_and_critic(), X, None, scope="hidden")
    with pytest.raises(ValueError, match="'policy' is float, and its range is not known"):
        keras_qat.export_tflite(qat, output_dtype="int8")
