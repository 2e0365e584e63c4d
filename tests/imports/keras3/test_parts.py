"""Tests objects of Keras 3 for training a model of Keras 2."""

import numpy as np
import pytest

import keras_qat
from tests.networks.small import functional, layers

keras = pytest.importorskip("keras", minversion="3.0")
X, Y = np.ones((8, 4), np.float32), np.ones((8, 2), np.float32)


class Stop(keras.callbacks.EarlyStopping):
    """A user's class."""


@pytest.fixture(scope="module")
def qat():
    model = keras_qat.quantize_model(functional((4,), build=layers.Dense(2)))
    model.compile("adam", keras.losses.MeanSquaredError())
    return model


def test_what_is_of_keras_3_is_answered(qat):
    def answer(function, *args, **kwargs):
        with pytest.raises(
            TypeError, match=r" is from Keras 3, but the model is a Keras 2 model\. "
        ) as error:
            function(*args, **kwargs)
        return str(error.value).split(". ")[1]

    optimizer, metric = keras.optimizers.Adam(), keras.metrics.MeanAbsoluteError()
    assert answer(qat.compile, optimizer) == "Use keras_qat.keras.optimizers.Adam."
    use_metric = "Use keras_qat.keras.metrics.MeanAbsoluteError."
    assert answer(qat.compile, "adam", "mse", {"y": [metric]}) == use_metric
    callback = keras.callbacks.LambdaCallback()
    use_callback = "Use keras_qat.keras.callbacks.LambdaCallback."
    assert answer(qat.fit, X, Y, callbacks=[callback]) == use_callback
    assert answer(qat.predict, X, callbacks=callback) == use_callback
    assert answer(qat.evaluate, keras.utils.PyDataset()) == "Use keras_qat.keras.utils.Sequence."
    derived = answer(qat.fit, X, Y, callbacks=[Stop("loss")])
    assert derived == "Derive it from keras_qat.keras.callbacks.EarlyStopping."


def test_a_loaded_model_is_compiled(qat, tmp_path):
    """A class that defines `compile` would not be compiled."""
    qat.compile("adam", "mse")
    qat.save(tmp_path / "qat.keras")
    loaded = keras_qat.keras.models.load_model(tmp_path / "qat.keras")
    assert np.isfinite(loaded.fit(X, Y, verbose=0).history["loss"][0])


def test_losses_of_keras_3_work(qat):
    assert np.isfinite(qat.fit(X, Y, verbose=0).history["loss"][0])
