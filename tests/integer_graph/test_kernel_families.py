"""Tests that a kernel family is one definition: operators only read its fields."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.arithmetic import kernel_families
from keras_qat.arithmetic.fixed_point import multiply, to_fixed_point
from keras_qat.arithmetic.kernel_families import FAMILIES, XNNPACK
from keras_qat.keras2.backend import keras
from keras_qat.training.schedule import list_scheduled_layers

PAIRS = np.stack(np.meshgrid(*[np.arange(-128.0, 128.0, 8)] * 2), -1).reshape(-1, 2)
"""Quantized values of two inputs. Their products in 128ths are often halves."""


def half_up(numbers, factor):
    """Multiplies in fixed point and rounds halves up."""
    whole = tf.cast(numbers, tf.int64)
    return tf.cast(multiply(whole, to_fixed_point(factor), "up"), numbers.dtype)


@pytest.fixture
def fourth(monkeypatch):
    """A family like XNNPACK, except for products."""
    family = dataclasses.replace(XNNPACK, name="fourth", products=half_up)
    monkeypatch.setitem(FAMILIES, family.name, family)
    return family.name


@pytest.fixture
def qat():
    """Returns the product of two inputs. All scales are 1/128, and zero points 0."""
    inputs = [keras.Input((1,)) for _ in range(2)]
    model = keras.Model(inputs, keras.layers.Multiply(name="product")(inputs))
    model = keras_qat.quantize_model(model)
    model([PAIRS[:, :1] / 128, PAIRS[:, 1:] / 128], training=True)
    for layer in list_scheduled_layers(model):
        for observer in (
            observer for quantizer in layer.quantizers for observer in quantizer.observers
        ):
            observer.minimum.assign(-1.0)
            observer.maximum.assign(127 / 128)
    return model


def test_a_fourth_family_is_one_definition(qat, fourth):
    x = [PAIRS[:, :1] / 128, PAIRS[:, 1:] / 128]
    exact = PAIRS[:, :1] * PAIRS[:, 1:] / 128
    expected = {"xnnpack": np.round(exact), fourth: np.floor(exact + 0.5)}
    assert np.any(expected["xnnpack"] != expected[fourth])
    for kernels, values in expected.items():
        codes = np.minimum(values, 127)
        simulated = keras_qat.simulate(qat, x, kernels)
        assert simulated.kernels == kernels
        np.testing.assert_array_equal(simulated.outputs["product"].codes, codes)
        qat.kernels = kernels
        np.testing.assert_array_equal(qat.predict(x, verbose=0), codes.astype(np.float32) / 128)
    assert keras_qat.quantize_model(qat).kernels == fourth


def test_families_have_names_of_their_own():
    assert all(family.name == name for name, family in FAMILIES.items())


def test_a_removed_family_names_its_successor(qat):
    with pytest.raises(ValueError, match="'openvino' was removed: use 'xnnpack'"):
        qat.kernels = "openvino"


@pytest.mark.parametrize(
    ("removed", "ending"), [("openvino", ".keras"), ("onnxruntime", ".h5"), ("esp_dl", ".keras")]
)
def test_a_model_saved_with_a_removed_family_loads(qat, removed, ending, tmp_path, monkeypatch):
    path = tmp_path / f"saved{ending}"
    with monkeypatch.context() as patches:  # As earlier releases saved it.
        patches.setitem(FAMILIES, removed, dataclasses.replace(XNNPACK, name=removed))
        patches.setattr(kernel_families, "REMOVED", {})
        qat.kernels = removed
        qat.save(path)
    with pytest.warns(UserWarning, match="rounds as 'xnnpack' now"):
        assert keras.models.load_model(path).kernels == "xnnpack"
