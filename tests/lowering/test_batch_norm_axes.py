"""BatchNormalization along other axes than the last, or several."""

import numpy as np
import pytest

import keras_qat
from tests.comparison import assert_kept
from tests.helpers import images, keras, layers, scramble

AXES = {"several": [-2, -1], "first and last": (1, 3), "second": 2, "all": [1, 2, 3]}


@pytest.mark.sample(1)
@pytest.mark.parametrize("axes", AXES)
def test_axes(axes, tmp_path):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((2, 3, 4))
    norm = layers.BatchNormalization(axis=AXES[axes], momentum=0.5)
    model = scramble(keras.Model(inputs, layers.Dense(3)(norm(inputs))))
    x = images(16, (2, 3, 4)) * 2 + 1
    qat = keras_qat.quantize_model(model, strict=True)
    keras_qat.set_quantization(qat, False)
    for training in (False, True, False):  # The last: statistics have moved.
        np.testing.assert_allclose(
            qat(x, training=training), model(x, training=training), 1e-4, 1e-5
        )
    keras_qat.set_quantization(qat, True)
    keras_qat.calibrate(qat, x)
    assert np.abs(qat(x) - model(x)).mean() < 0.02 * np.abs(model(x)).max()
    assert_kept(qat, x, tmp_path)
    np.testing.assert_allclose(keras_qat.strip_quantization(qat)(x), model(x), 1e-4, 1e-5)
