"""Numbers that are not finite: weights give NaN, as in a float model, and inputs are refused."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import images, keras, layers, observe, quantize_on
from tests.networks.small import functional

X = images(8, (6, 6, 2))
Y = np.arange(8) % 3


def calibrated_model() -> keras_qat.QuantizedModel:
    """A model with tables: swish and softmax."""
    model = keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(4, 3, activation="swish", name="conv"),
            layers.Flatten(),
            layers.Dense(3, activation="softmax"),
        ]
    )
    qat = quantize_on(model, X)
    qat.compile("sgd", "sparse_categorical_crossentropy")
    return qat


@pytest.mark.sample(1)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite(value):
    qat = calibrated_model()
    (kernel,) = (w for w in qat.weights if "conv/kernel" in w.name)
    healthy, loss = kernel.numpy(), qat.evaluate(X, Y, verbose=0)
    kernel.assign(np.full(kernel.shape, value))
    assert np.isnan(qat.evaluate(X, Y, verbose=0))
    assert np.isnan(qat.predict(X, verbose=0)).all()
    kernel.assign(healthy)
    assert qat.evaluate(X, Y, verbose=0) == loss


@pytest.mark.slow
def test_validation_goes_on_where_training_diverges():
    qat = calibrated_model()
    qat.optimizer.learning_rate.assign(1e38)
    history = qat.fit(X, Y, epochs=3, validation_data=(X, Y), verbose=0).history
    assert np.isnan(history["val_loss"][-1])


def test_nan_in_predict():
    model = functional((4,), build=lambda x: layers.Activation("sigmoid")(layers.Dense(3)(x)))
    x = images(16, (4,))
    qat = observe(keras_qat.quantize_model(model), x)
    x[3, 1] = np.nan
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"Input input_\d+ of .* holds NaN"):
        qat.predict(x, verbose=0)
    x[3, 1] = np.inf
    assert np.all(np.isfinite(qat.predict(x, verbose=0)))
