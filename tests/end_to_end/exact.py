"""That a file, predictions and simulation of a model are the same codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import keras_qat
from keras_qat.targets import TFLM, problems

__all__ = ["assert_exact_everywhere"]


def assert_exact_everywhere(
    qat: Any, x: np.ndarray, kernels: Any, per_layer: bool = False
) -> keras_qat.Report:
    """Asserts it for a family of kernels, and that nothing computes in float; returns the report.

    Args:
        qat: a model with ranges.
        x: its inputs.
        kernels: the family.
        per_layer: whether each tensor is compared by itself, too.
    """
    if kernels == "tflm":
        pytest.importorskip("tflite_micro")
    contents = keras_qat.export_tflite(qat, batch_size=1 if kernels == "tflm" else None)
    assert kernels != "tflm" or not problems(contents, TFLM)
    qat.kernels = kernels
    report = keras_qat.verify(qat, contents, x, kernels=kernels, per_layer=per_layer)
    assert {each.identical for each in report.outputs} == {1.0}
    assert {each.run.identical for each in report.tensors} <= {1.0}
    found = keras_qat.simulate(qat, x, kernels=kernels)
    assert found.float_layers == ()
    predicted = qat.predict(x, verbose=0)
    outputs = predicted if isinstance(predicted, list) else [predicted]
    for simulated, output in zip(found.outputs.values(), outputs, strict=True):
        np.testing.assert_allclose(simulated.values, output, atol=1e-6)
    return report
