"""Tests concatenated tensors: scaled to similar ranges before concatenation, or read directly."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.graph.read_model import read_model
from keras_qat.lowering import lower
from keras_qat.ops.registry import find_op
from tests.helpers import keras, layers, rng
from tests.networks.forms.tensors import PARTS, concatenated, stacked

PEOPLE = {
    "image": rng(1).normal(size=(128, 6)).astype(np.float32),
    "income": rng(2).uniform(0, 1e5, (128, 2)).astype(np.float32),
}
MAPS = {name: np.tile(x[:, None, None], (1, 3, 4, 1)) for name, x in PEOPLE.items()}


def batch_norm(both, data):
    norm = layers.BatchNormalization(momentum=0.0, name="norm")
    return norm, norm(both)


def normalization(both, data):
    norm = layers.Normalization(name="norm")
    norm.adapt(data)
    return norm, norm(both)


def net(normalize, data=PEOPLE, concat=None, large=1.0, seen=True):
    """Returns a model that concatenates and normalizes two inputs of very different scale."""
    keras.utils.set_random_seed(0)
    image, income = (keras.Input(x.shape[1:], name=name) for name, x in data.items())
    concat = concat or layers.Concatenate(name="both")
    part = layers.Dense(5, "relu", name="part")
    joined = part(image), layers.Rescaling(large, name="large")(income)
    values = part(data["image"]), large * data["income"]
    norm, x = normalize(concat(joined), np.concatenate(values, -1))
    model = keras.Model([image, income], layers.Dense(3, name="answer")(x), name="net")
    if seen and normalize is batch_norm:
        model(data, training=True)
        norm.momentum = 0.99
    return model


def calibrated(model, data=PEOPLE, recipe="int8"):
    qat = keras_qat.quantize_model(model, recipe, strict=True)
    keras_qat.calibrate(qat, data)  # A warning of lost tensors would fail the test.
    return qat


def decibels(model, qat, data=PEOPLE):
    exact, values = (one.predict(data, verbose=0) for one in (model, qat))
    return 10 * np.log10(np.var(exact, 0).sum() / np.mean((values - exact) ** 2, 0).sum())


CASES = {
    "BatchNormalization": (batch_norm, PEOPLE, None),
    "Normalization": (normalization, PEOPLE, None),
    "tf.concat of images": (batch_norm, MAPS, lambda pair: tf.concat([*pair][::-1], -1)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES)
def test_small_parts_are_kept(case, tmp_path):
    normalize, data, concat = CASES[case]
    if concat:  # Only `normalization` has statistics that depend on the order of the channels.
        assert normalize is batch_norm
    model = net(normalize, data, concat)
    qat = calibrated(model, data)
    keras_qat.set_quantization(qat, False)
    np.testing.assert_allclose(qat.predict(data), model.predict(data), rtol=0, atol=1e-4)
    keras_qat.set_quantization(qat, True)
    assert decibels(model, qat, data) > 25  # -1 to 1 dB with one range for both.
    file = keras_qat.export_tflite(qat)
    report = keras_qat.verify(qat, file, data)
    assert report.identical == 1 and report.is_good and not report.float_operations
    qat.save(tmp_path / "qat.keras")
    assert keras_qat.export_tflite(keras.models.load_model(tmp_path / "qat.keras")) == file
    plain = keras_qat.strip_quantization(qat)
    assert type(plain.get_layer("norm")) is type(model.get_layer("norm"))
    np.testing.assert_allclose(plain.predict(data), model.predict(data), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "model",
    [
        lambda: net(batch_norm, large=1e-4),
        lambda: net(batch_norm, large=1e-4, seen=False),
        lambda: net(batch_norm, large=3e-4),
    ],
    ids=["one size", "new statistics", "ten times as large"],
)
def test_others_stay_as_they_are(model):
    assert "both_scaled1" not in str(keras_qat.plan(model()))
    assert "both_scaled1" in str(keras_qat.plan(net(batch_norm)))


JOINS = {"concatenate", "stack"}


OTHERS = {
    "across": (concatenated, lambda both: both[..., 2:6]),
    "with_steps": (concatenated, lambda both: both[..., ::2]),
    "of_examples": (lambda small, large: tf.concat([small, small], 0), lambda both: both[2:]),
    "one_of_a_stack": (stacked(1), lambda pairs: pairs[:, :1]),
    "whole_and_part": (concatenated, lambda both: (both[..., :4], both)),
}
"""Parts that read several of the joined tensors."""


def kinds_in_lowered(join, read):
    inputs = [keras.Input((5, 4)), keras.Input((5, 6))]
    small, large = (layers.Dense(x.shape[-1])(x) for x in inputs)
    model = keras.Model(inputs, read(join(small, large * 1000.0)))
    calls = lower(read_model(model)).calls
    return {op.name for op in map(find_op, calls) if op is not None}


@pytest.mark.parametrize("name", [name for name in PARTS if name != "several"])
def test_what_is_read_in_parts_alone_is_not_joined(name):
    assert not JOINS & kinds_in_lowered(*PARTS[name])


@pytest.mark.parametrize("name", OTHERS)
def test_other_parts_are_of_the_joined_tensor(name):
    assert JOINS & kinds_in_lowered(*OTHERS[name])


def test_each_tensor_that_is_unstacked_has_a_layer_of_its_own():
    x = keras.Input((4,))
    stacked = tf.stack([layers.Dense(3)(x), layers.Dense(3)(x)], axis=1)
    plan = keras_qat.plan(keras.Model(x, tf.unstack(stacked, axis=1)))
    identities = [call for call in plan.graph.calls if type(call.layer) is layers.Activation]
    assert len({call.layer for call in identities}) == len(identities) == 2
    assert len({call.name for call in identities}) == 2
