"""Tests structures in TFLite Micro: its operators compute the same as the model."""

import numpy as np
import pytest

import keras_qat
from keras_qat.targets import TFLM, problems
from tests.helpers import observe
from tests.networks import composite, convolutional, single_layers

FAMILIES = {**convolutional.FAMILIES, **single_layers.FAMILIES, **composite.FAMILIES}

ALWAYS = ("add", "affine")
"""Families that run by default. The others are slow."""

COUNT = 12
"""Number of examples, which run one by one."""


def known(family):
    """Returns a family's structures as one model, except those with missing operators."""
    names = list(family.structures)
    if any(None in shape for shape in family.shapes):
        pytest.skip("open sizes")
    alone = [
        keras_qat.quantize_model(family.model([n for n in names if n != name])) for name in names
    ]
    without = [name for name, qat in zip(names, alone, strict=True) if problems(qat, TFLM)]
    if without == names:
        pytest.skip("TFLite Micro lacks an operator of each")
    return family.model(without)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.slow) for name in FAMILIES],
)
def test_structures_compute_in_tflite_micro_what_the_model_does(name):
    pytest.importorskip("tflite_micro")
    family = FAMILIES[name]
    model, x = known(family), family.inputs(COUNT)
    qat = observe(keras_qat.quantize_model(model, kernels="tflm"), *x)
    contents = keras_qat.export_tflite(qat, batch_size=1)
    report = keras_qat.verify(qat, contents, x if len(x) > 1 else x[0], kernels="tflm")
    assert {tensor.name: tensor.identical for tensor in report.outputs} == dict.fromkeys(
        qat.output_names, 1.0
    )
    assert np.isfinite(report.arena_size)
