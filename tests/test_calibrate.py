"""Ranges from data: which ranges, from every kind of data, and that nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from tests.helpers import images, scramble, train
from tests.networks.small import functional, layers, residual_net, tiny_net

pytestmark = pytest.mark.legacy
X = images(40, (8, 8, 1))


def ranges(qat):
    return {each.name: (each.minimum, each.maximum) for each in keras_qat.quantizers(qat)}


@pytest.mark.parametrize("recipe", ["int8", "contrib"])
def test_ranges_are_those_of_the_float_model(recipe):
    model = scramble(residual_net())
    qat = keras_qat.quantize_model(model, recipe)
    keras_qat.calibrate(qat, X, batch_size=8)
    tensors = {each.quantizes[0]: each for each in keras_qat.quantizers(qat)}
    probe = keras.Model(model.input, [model.get_layer(n).output for n in ("stem_relu", "logits")])
    batches = [probe(X[start : start + 8]) for start in range(0, 40, 8)]
    for index, name in enumerate(("stem_relu", "logits")):
        lowest = [min(0.0, float(tf.reduce_min(batch[index]))) for batch in batches]
        highest = [float(tf.reduce_max(batch[index])) for batch in batches]
        decay = 0.999 ** np.arange(4, -1, -1)
        found = tensors[name]
        assert found.minimum == pytest.approx(np.average(lowest, weights=decay), rel=1e-4)
        assert found.maximum == pytest.approx(np.average(highest, weights=decay), rel=1e-4)


@pytest.mark.parametrize("recipe", ["int8", "contrib"])
def test_nothing_but_ranges_changes(recipe):
    qat = train(keras_qat.quantize_model(scramble(residual_net()), recipe), X, steps=3)
    observed = ("_min", "_max", "_batches", "_biased", "_local_step")

    def others():
        return [w.numpy() for w in qat.weights if not w.name.split(":")[0].endswith(observed)]

    before, ranges_before = others(), ranges(qat)
    keras_qat.calibrate(qat, 3 * X)
    for one, other in zip(others(), before, strict=True):
        np.testing.assert_array_equal(one, other)
    assert ranges(qat) != ranges_before


def test_dropout_and_noise_are_off():
    def build(x):
        return layers.Dense(3, name="y")(layers.Dropout(0.9)(layers.GaussianNoise(9.0)(x)))

    model = functional((5,), build=build)
    x = images(32, (5,))
    qat = keras_qat.quantize_model(model)
    keras_qat.calibrate(qat, x)
    (output,) = (each for each in keras_qat.quantizers(qat) if each.quantizes == ("y",))
    assert output.maximum == pytest.approx(float(model.predict(x, verbose=0).max()), rel=1e-4)


def test_every_kind_of_data():
    model = scramble(residual_net())
    labels = np.zeros(40)
    batched = tf.data.Dataset.from_tensor_slices((X, labels)).batch(8)

    class Batches(keras.utils.Sequence):
        def __len__(self):
            return 5

        def __getitem__(self, index):
            return X[8 * index : 8 * index + 8], labels[:8]

    kinds = {
        "array": (X, {"batch_size": 8}),
        "double": (X.astype(np.float64), {"batch_size": 8}),
        "dataset": (batched, {}),
        "endless dataset": (batched.repeat(), {"steps": 5}),
        "generator": ((X[start : start + 8] for start in range(0, 40, 8)), {}),
        "sequence": (Batches(), {}),
    }
    found = {}
    for kind, (data, arguments) in kinds.items():
        qat = keras_qat.quantize_model(model)
        keras_qat.calibrate(qat, data, **arguments)
        found[kind] = np.hstack([np.ravel(each) for each in ranges(qat).values()])
        np.testing.assert_allclose(found[kind], found["array"], rtol=1e-6, err_msg=kind)


def test_dict_inputs_of_other_types():
    inputs = {"b": keras.Input((4,), name="b"), "a": keras.Input((4,), name="a")}
    model = keras.Model(inputs, layers.Dense(3, name="y")(layers.Add()([inputs["a"], inputs["b"]])))
    qat = keras_qat.quantize_model(scramble(model))
    x = {"a": np.full((32, 4), 2, np.uint8), "b": np.full((32, 4), -5, np.int64)}
    keras_qat.calibrate(qat, x)
    found = {each.quantizes: (each.minimum, each.maximum) for each in keras_qat.quantizers(qat)}
    # The debiased average is TensorFlow 1's, in float32.
    assert found[("a",)] == pytest.approx((0, 2), rel=1e-4)
    assert found[("b",)] == pytest.approx((-5, 0), rel=1e-4)


def test_calibrated_model_exports_and_agrees():
    qat = keras_qat.quantize_model(scramble(residual_net()))
    keras_qat.calibrate(qat, X)
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), X)
    assert report.identical >= 0.99
    assert report.max_difference <= 1


def test_failed_calibration_leaves_the_model():
    qat = keras_qat.quantize_model(scramble(tiny_net()))
    before = qat.get_weights()
    x = images(8, (6, 6, 2))
    x[5] = np.nan
    batches = tf.data.Dataset.from_tensor_slices(x).batch(4)
    for data, message in (
        (batches, r"'image' .* holds NaN, first in example 1 in item 1 of the data"),
        (x, r"Input 'image' .* holds NaN"),
        (images(8, (5, 6, 2)), r"Input 'image' .* shape \(None, 6, 6, 2\), not \(8, 5, 6, 2\)"),
        (x[:0], "No examples"),
        (batches.take(0), "empty"),
        (None, "No data is given"),
    ):
        with pytest.raises(ValueError, match=message):
            keras_qat.calibrate(qat, data)
    for one, other in zip(qat.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_weights_that_are_no_numbers():
    qat = keras_qat.quantize_model(scramble(tiny_net()))
    bias = qat.get_layer("quant_logits").layer.bias
    bias.assign(bias + np.inf)
    with pytest.raises(ValueError, match=r"range with NaN or infinity, first .*weights"):
        keras_qat.calibrate(qat, images(8, (6, 6, 2)))
    assert not any(
        each.calibrated for each in keras_qat.quantizers(qat) if each.quantizes[0] == "image"
    )


def test_float_model():
    with pytest.raises(ValueError, match=r"not quantization-aware.*quantize_model"):
        keras_qat.calibrate(tiny_net(), X)
