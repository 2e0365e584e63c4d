"""Tests sums of up to a million values and thousands of channels, in every kernel family.

`make test-x86` and `make test-arm64` run the same files on other processors.
"""

import numpy as np
import pytest

import keras_qat
from benchmarks.structures import WIDTHS
from keras_qat.integer_graph.resolve import resolve
from keras_qat.targets import TFLM, problems
from tests.comparison import RUNNABLE
from tests.emulation import LARGE_WIDTHS
from tests.helpers import observe
from tests.networks.large import LARGE

SMALL = ("index", "largest", "smallest", "normalized", "softmax", "1000 classes")
"""Networks with results that are mostly equal, or too small for a comparison."""
ERRORS = {"int8": 0.03, "int16x8": 0.01}
"""Maximum difference from float, as a share of the range. All weights have 8 bits."""

CASES = [(name, width) for name in LARGE for width in LARGE_WIDTHS]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:target tflm. operators missing")
@pytest.mark.parametrize(("name", "width"), CASES)
def test_large_sizes(name, width):
    """Files equal the model, and are close to float."""
    network = LARGE[name]
    model = network.build()
    x = network.inputs(model)
    expected = np.asarray(model(x), np.float64)
    qat = observe(keras_qat.quantize_model(model, WIDTHS[width]()), x, batches=1)
    if any(node.op is None for node in resolve(qat).nodes):
        pytest.skip("plan leaves a part in float")
    # Portable 8-bit kernels crash on so many nearly equal scores.
    ends_process = name.startswith("softmax") and width == "int8"
    for kernels in ("xnnpack",) if ends_process else RUNNABLE:
        qat.kernels = kernels
        contents = keras_qat.export_tflite(qat, target="tflm" if kernels == "tflm" else None)
        if kernels == "tflm" and problems(contents, TFLM):
            continue
        predicted = qat.predict(x, verbose=0)
        file = keras_qat.TFLiteModel(contents, kernels=kernels)
        np.testing.assert_array_equal(file.predict(x), predicted)
        if not name.startswith(SMALL):
            error = np.abs(predicted - expected).max() / np.ptp([*expected.ravel(), 0.0])
            assert error < ERRORS[width], kernels
