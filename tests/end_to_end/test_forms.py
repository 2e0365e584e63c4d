"""Tests every form: float model, quantized, trained, calibrated, exported, and loaded again."""

import re

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.tflite.interpreter import FileInterpreter
from tests.comparison import RUNNABLE
from tests.end_to_end.exact import assert_exact_everywhere
from tests.helpers import keras, quantize_on, values
from tests.networks import forms
from tests.networks.forms.form import Form, decibels
from tests.networks.forms.in_float import IN_FLOAT
from tests.networks.tables import TABLES

KINDS = ("GRU", "LSTM", "SimpleRNN")
OPTIONS = {
    "masked steps": {},
    "masks": {"kernels": RUNNABLE},
    "masking": {"sqnr": 22},
    "lent weights": {"kernels": RUNNABLE, "trains": True},
    "states": {"kernels": RUNNABLE, "trains": True, "strips": True, "sqnr": 17},
    "compared": {"sqnr": 10},
    "opened": {"trains": True, "strips": True, "sqnr": 20},
}
"""Options for networks of other tables."""

OF_PHASES = (
    *("a dropout", "a block", "a layer made in call", "an own layer made in call"),
    *("a block of blocks", "paths that are dropped"),
    *("training by position", "a layer in training alone", "constants alone"),
)
"""Networks that use dropout in training, or normalize by batches."""

OF_SINGLE_NETWORKS = {
    **{f"behind_float {kind}": {"in_float": True, "is_random": True} for kind in KINDS},
    **{key: {"in_float": True} for key in ("alone", "scaled")},
    **{f"stacked {kind}": {"is_random": True} for kind in KINDS},
    **{key: {"is_random": True} for key in ("two_levels", "nested_output", *OF_PHASES)},
    # Their results are far larger than the targets, or a bias precedes a normalization.
    **{key: {"trains": False} for key in ("a factor of no layer", "Keras' backend")},
    "a standardized kernel": {"trains": False, "is_random": True},
    "a masked kernel": {"strips": False},  # Its mask counts as a constant with other values.
    "translation": {
        "recipe": keras_qat.recipes.int8().override("LayerNormalization", quantize=True),
        "kernels": ("xnnpack", "reference"),  # TFLite Micro has no CAST of bools.
    },
}
FORMS = {
    **forms.FORMS,
    **{
        f"{table}, again" if table in forms.FORMS else table: {
            name: Form(network.build, network.inputs, **options | OF_SINGLE_NETWORKS.get(name, {}))
            for name, network in TABLES[table].items()
        }
        for table, options in OPTIONS.items()
    },
}


def make_case(subject, name):
    marks = [pytest.mark.legacy] * (subject in forms.LEGACY)
    marks += [pytest.mark.slow] * (name in forms.SLOW.get(subject, ()))
    return pytest.param(subject, name, marks=marks)


CASES = [make_case(subject, name) for subject, rows in FORMS.items() for name in rows]


def kernels_of(case):
    subject, name = case.values
    return FORMS[subject][name].kernels


@pytest.mark.filterwarnings("ignore:target .*operators:UserWarning")  # They run on a host.
@pytest.mark.sample(len(FORMS) // 6)
@pytest.mark.parametrize(("subject", "name"), CASES)
def test_from_the_float_model_to_the_file(subject, name, tmp_path):
    form = FORMS[subject][name]
    model = form.model()
    x = form.inputs(model)
    expected, before = model(x), values(model.weights)  # Some change a kernel in their first call.
    strict = not form.in_float
    qat = keras_qat.quantize_model(model, form.recipe, target=form.target, strict=strict)
    assert len(qat.trainable_weights) == len(model.trainable_weights)
    assert_equal_without_quantization(qat, x, expected, form.is_random)
    if form.trains:
        train(qat, x)
        expected = keras_qat.strip_quantization(qat)(x) if form.strips else in_float(qat, x)

    keras_qat.calibrate(qat, x)
    # In one batch, because some forms read its first example.
    predicted = qat.predict(x, batch_size=len(tf.nest.flatten(x)[0]), verbose=0)
    assert decibels(expected, predicted) > form.sqnr
    contents = keras_qat.export_tflite(qat)
    report = keras_qat.verify(qat, contents, x)
    assert report.identical == 1
    assert bool(report.float_operations) == form.in_float
    operations = list(FileInterpreter(contents).operations())
    assert not {operation for operation, _, _ in operations}.intersection(form.lacks)
    types = {dtype.kind for _, reads, writes in operations for dtype in reads + writes}
    assert form.target is None or form.in_float or "f" not in types

    qat.save(tmp_path / "qat.keras")
    assert keras_qat.export_tflite(keras.models.load_model(tmp_path / "qat.keras")) == contents
    assert all(map(np.array_equal, before, values(model.weights))), "the float model has changed"
    if form.strips:
        plain = keras_qat.strip_quantization(qat)
        tf.nest.map_structure(np.testing.assert_array_equal, plain(x), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("subject", "name"), [case for case in CASES if kernels_of(case)])
def test_other_kernels_compute_the_same(subject, name):
    form = FORMS[subject][name]
    model = form.model()
    x = form.inputs(model)
    qat = quantize_on(model, x, form.recipe, target=form.target)
    for kernels in form.kernels:
        assert_exact_everywhere(qat, x, kernels, per_layer=True)


def assert_equal_without_quantization(qat, x, expected, is_random):
    """Asserts it in both phases. `is_random` is whether the model is random in training."""
    keras_qat.set_quantization(qat, False)
    assert decibels(expected, qat(x)) > 60
    weights = qat.get_weights()
    in_training = decibels(expected, qat(x, training=True))
    largest = 80 if any("lstm" in weight.name for weight in qat.weights) else 60
    # An LSTM attenuates dropout.
    assert in_training < largest if is_random else in_training > 60
    qat.set_weights(weights)  # Statistics have changed.
    keras_qat.set_quantization(qat, True)


def in_float(qat, x):
    keras_qat.set_quantization(qat, False)
    outputs = qat(x)
    keras_qat.set_quantization(qat, True)
    return outputs


def train(qat, x):
    """Runs a training step, and asserts that it changes every weight."""
    before = [weight.numpy() for weight in qat.trainable_weights]
    qat.compile(keras.optimizers.SGD(0.1), "mse")
    targets = tf.nest.map_structure(np.ones_like, qat.predict(x, verbose=0))
    qat.fit(x, targets, batch_size=8, verbose=0)
    assert all(np.any(old != new) for old, new in zip(before, qat.trainable_weights, strict=True))


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", IN_FLOAT)
def test_what_stays_in_float_and_why(name):
    form = IN_FLOAT[name]
    reasons = keras_qat.plan(form.model()).float_layers.values()
    assert any(re.search(form.reason, reason) for reason in reasons), reasons
