"""Layers that no row knows compute in float; `plan` reports them, and `strict` refuses them."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.tflite.interpreter import FileInterpreter
from tests.helpers import images, observe
from tests.networks.small import functional, layers, tiny_net


class Unknown(layers.Layer):
    """A layer that no rule knows."""

    def call(self, inputs):
        return tf.math.xlogy(inputs, 3.0)


def with_unknown_layers():
    def build(x):
        x = layers.Conv2D(4, 3, name="conv")(x)
        x = Unknown(name="wave")(x)
        x = layers.Flatten(name="flatten")(x)
        x = layers.Dense(4, name="dense")(x)
        return Unknown(name="last")(x)

    return functional((6, 6, 2), build=build)


@pytest.mark.legacy
def test_unknown_layer_passes_through_and_is_reported():
    model = with_unknown_layers()
    plan = keras_qat.plan(model)
    assert list(plan.float_layers) == ["wave", "last"]
    assert "tf.math.xlogy" in plan.float_layers["wave"]
    assert "2 layers stay in float: wave, last" in str(plan)
    qat = keras_qat.quantize_model(model)
    x = images(32, (6, 6, 2))
    keras_qat.set_quantization(qat, False)
    np.testing.assert_allclose(
        qat.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-4, atol=1e-6
    )


def test_model_with_an_unknown_layer_exports():
    qat = keras_qat.quantize_model(with_unknown_layers())
    x = images(32, (6, 6, 2))
    observe(qat, x)
    contents = keras_qat.export_tflite(qat)
    names = [name for name, _, _ in FileInterpreter(contents).operations()]
    assert "SELECT_V2" in names
    assert keras_qat.verify(qat, contents, x).max_difference <= 1


@pytest.mark.legacy
def test_strict_lists_every_such_layer():
    with pytest.raises(ValueError, match="stay in float") as raised:
        keras_qat.quantize_model(with_unknown_layers(), strict=True)
    assert "wave" in str(raised.value)
    assert "last" in str(raised.value)
    keras_qat.quantize_model(tiny_net(), strict=True)
