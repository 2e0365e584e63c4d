"""`input_range=`: the range of inputs that have no quantizer."""

import numpy as np
import pytest

import keras_qat
from tests.helpers import images, observe
from tests.networks.small import functional, layers

NO_RANGES = [(0.0, np.nan), (0.0, np.inf), (1.0, -1.0), (0.0, 0.0), (0.0, 0.5, 1.0), "ab", 3.0]


@pytest.fixture(scope="module")
def without_input_range():
    """A model whose inputs have no quantizer, and what it takes."""
    model = functional((6,), build=layers.Dense(3))
    x = np.abs(images(32, (6,))) + 3
    return observe(keras_qat.quantize_model(model, keras_qat.recipes.contrib(7, 7)), x), x


@pytest.mark.parametrize("given", NO_RANGES, ids=str)
def test_input_ranges_that_are_none(given, without_input_range):
    qat, x = without_input_range
    for verb in (
        keras_qat.export_tflite,
        keras_qat.resolve,
        lambda qat, **options: keras_qat.simulate(qat, x, **options),
    ):
        with pytest.raises(ValueError, match=r"input_range=.*: pass the minimum and the maximum"):
            verb(qat, input_range=given)


def test_input_range_without_zero(without_input_range):
    """Quantized values stood for 0 to 3 instead of 3 to 6."""
    qat, x = without_input_range
    contents = keras_qat.export_tflite(qat, input_range=(3.0, 6.0))
    assert contents == keras_qat.export_tflite(qat, input_range=(0.0, 6.0))
    assert keras_qat.verify(qat, contents, np.minimum(x, 6)).max_difference <= 2
