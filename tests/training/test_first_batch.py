"""`TFLiteModel` and `verify` say once that data lie far outside of the range."""

import warnings

import numpy as np
import pytest

import keras_qat
from keras_qat.io.inputs import describe_excess
from tests.helpers import keras, layers, quantize_on, rng

X = rng().uniform(0, 1, (64, 6, 6, 1)).astype(np.float32)
SAID = r"100% of the values of input 'image' .* range of 0 to 1 .* data is 0.* to 25\d.*calibrate"


def calibrated():
    keras.utils.set_random_seed(0)
    image = keras.Input((6, 6, 1), name="image")
    body = keras.Model(image, layers.Dense(3)(layers.Flatten()(layers.Conv2D(4, 3)(image))))
    return quantize_on(body, X)


def told(function):
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        result = function()
    return result, [warning for warning in shown if "outside its range" in str(warning.message)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"input_dtype": "float32"},
        {"input_dtype": "uint8"},
        {"input_dtype": "uint8", "rescaling": (1 / 255, 0)},
    ],
)
def test_a_file_says_once_that_its_inputs_are_clipped(options):
    contents = keras_qat.export_tflite(calibrated(), **options)
    file = keras_qat.TFLiteModel(contents)
    _, nothing = told(lambda: file.predict(np.float32(1.1) * X))
    assert not nothing
    with pytest.warns(UserWarning, match=SAID) as shown:
        file.predict(255 * X)
    assert shown[0].filename == __file__
    _, nothing = told(lambda: file.predict(255 * X))
    assert not nothing
    _, nothing = told(
        lambda: keras_qat.TFLiteModel(contents).predict(file.inputs["image"].quantize(X))
    )
    assert not nothing


def test_verify_says_it_once():
    qat = calibrated()
    contents = keras_qat.export_tflite(qat)
    _, shown = told(lambda: keras_qat.verify(qat, contents, 255 * X))
    assert len(shown) == 1


def with_(x, where, value):
    x = x.copy()
    x[where] = value
    return x


SHOWN = {
    "pixels, mostly black": with_(0 * X, np.s_[:, :1], 200.0),
    "standardized": 4 * X - 2,
    "another scale in a few features": with_(X, np.s_[:, 0, 0], 50.0),
}
SILENT = {
    "the range": X,
    "a little larger": 1.3 * X,
    "one outlier of many values": with_(X, np.s_[3, 2, 2], 1000.0),
    "one example of many": with_(X, np.s_[5], 1000.0),
    "smaller": X / 100,
    "few values below": with_(X, np.s_[:, 0, 0], -0.5),
}


@pytest.mark.parametrize("name", [*SHOWN, *SILENT])
def test_outliers_and_slight_excess_are_not_warned_of(name):
    x = np.float32((SHOWN | SILENT)[name])
    assert bool(describe_excess("image", x, 0.0, 1.0)) is (name in SHOWN)
