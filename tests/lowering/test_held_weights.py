"""Weights of objects that a layer holds and that are no layers: training them."""

import numpy as np

import keras_qat
from tests.helpers import build_model, keras, layers, quantize_on
from tests.networks.forms.weights import ROWS, Held, HoldsNumbers, Module, X


def test_training_objects_in_layers():
    model = build_model((4,), Held(Module, name="held"))
    qat = keras_qat.quantize_model(model)
    qat.compile("sgd", "mse")
    before = model.layers[1].first.kernel.numpy()
    qat.fit(ROWS, np.zeros((16, 3)), verbose=0)
    np.testing.assert_array_equal(model.layers[1].first.kernel, before)
    with keras.utils.custom_object_scope({"Held": Held}):
        stripped = keras_qat.strip_quantization(qat)
    assert not np.allclose(stripped.layers[1].first.kernel, before)
    np.testing.assert_allclose(qat(ROWS), stripped(ROWS), atol=0.3)


def test_real_numbers_that_do_not_train_are_weights():
    inputs = keras.Input((5, 4))
    model = keras.Model(inputs, layers.Dense(3)(HoldsNumbers("real numbers")(inputs)))
    qat = quantize_on(model, X)
    np.testing.assert_allclose(qat(X), model(X), atol=0.1)
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), X).identical == 1
