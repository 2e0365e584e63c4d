"""Tensors that a normalization brings to one size are scaled alike before they are joined."""

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import assert_all_close, keras, layers, rng

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
    """A model of two inputs of very different scale, which are joined and normalized."""
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
    keras_qat.calibrate(qat, data)  # A warning of lost tensors would be an error.
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
    if concat:  # The order of the channels matters to the statistics of `normalization` alone.
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


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["int16x8", "per tensor"])
def test_other_recipes(recipe):
    chosen = keras_qat.recipes.int8(per_channel=False) if recipe == "per tensor" else recipe
    model = net(batch_norm)
    assert decibels(model, calibrated(model, recipe=chosen)) > 25


@pytest.mark.slow
def test_training_goes_on():
    """BatchNormalization sees, and keeps the statistics of, what it sees in float."""
    model = net(batch_norm)
    qat = calibrated(model)
    y = model.predict(PEOPLE)
    for trained in (model, qat):
        trained.compile(keras.optimizers.SGD(1e-3), "mse")
        trained.fit(PEOPLE, y, epochs=3, shuffle=False, verbose=0)
    before, after = (
        one.get_layer(name).get_weights()
        for one, name in ((model, "norm"), (keras_qat.strip_quantization(qat), "norm"))
    )
    assert_all_close(after, before, rtol=0.02, atol=0.02)
    assert decibels(model, qat) > 20


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
