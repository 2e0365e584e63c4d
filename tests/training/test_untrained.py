"""Tests warnings about files of models that never quantized, and files of other models."""

import dataclasses
import warnings

import numpy as np
import pytest

import keras_qat
from keras_qat import recipes
from keras_qat.callbacks import QuantDelay
from keras_qat.tflite.metadata import compress
from tests.helpers import images, keras, moved, observe, save_and_load, scramble, train
from tests.networks.small import tiny_net

X = images(64, (6, 6, 2))


def quantized(recipe="int8"):
    return keras_qat.quantize_model(scramble(tiny_net()), recipe)


def with_ranges():
    return observe(quantized(), X)


def test_delay_that_training_did_not_reach(tmp_path):
    qat = train(quantized(), X, steps=4, callbacks=[QuantDelay(6)])
    message = r"'tiny' .* begins at training step 6, and only 4 steps are done.*set_quantization"
    for export in (keras_qat.export_tflite, keras_qat.export_saved_model):
        with pytest.warns(UserWarning, match=message):
            export(qat, tmp_path / export.__name__)
    with pytest.warns(UserWarning, match=message):
        report = keras_qat.verify(qat, tmp_path / "export_tflite", X)
    assert report.identical < 0.6
    (note,) = report.notes
    assert note in report.findings()
    assert "only 4 steps are done" in str(report)
    assert report.to_dict()["notes"] == (note,)
    train(qat, X, steps=2, callbacks=[QuantDelay(6)])
    report = keras_qat.verify(qat, keras_qat.export_tflite(qat), X)  # Warnings fail.
    assert report.identical == 1
    assert not report.notes


def test_delay_of_a_layer_that_is_called_twice_is_told_in_training_steps():
    shared = keras.layers.Dense(4, name="shared")
    x = keras.Input((4,))
    model = keras.Model(x, keras.layers.Dense(3)(shared(keras.layers.ReLU()(shared(x)))))
    qat = keras_qat.quantize_model(model)
    train(qat, images(16, (4,)), steps=3, callbacks=[QuantDelay(7)])
    with pytest.warns(UserWarning, match="step 7, and only 3 steps are done"):
        keras_qat.export_tflite(qat)


def test_quantization_that_was_switched_off():
    qat = with_ranges()
    keras_qat.set_quantization(qat, False)
    with pytest.warns(UserWarning, match=r"switched off.*set_quantization"):
        contents = keras_qat.export_tflite(qat)
    with pytest.warns(UserWarning, match="switched off"):
        verdict = keras_qat.verify(qat, contents, X).verdict
    assert not verdict.is_same and "'tiny' is not quantized yet" in verdict.likely_cause
    keras_qat.set_quantization(qat)
    assert keras_qat.export_tflite(qat) == contents


def test_ranges_that_a_recipe_begins_with():
    qat = quantized("contrib")
    with pytest.warns(UserWarning, match=r"2 quantizers .* no data .*0 to 6.*calibrate"):
        keras_qat.export_tflite(qat, input_range=(-3, 3))
    keras_qat.calibrate(qat, X)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The weights of")
        keras_qat.export_tflite(qat, input_range=(-3, 3))


@pytest.mark.parametrize("per_layer", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_file_is_older_than_the_model(per_layer):
    qat = with_ranges()
    contents = keras_qat.export_tflite(qat)
    before = qat.get_weights()
    moved(qat)
    message = r"other weights or ranges.*Export it again"
    with pytest.warns(UserWarning, match=message):
        report = keras_qat.verify(qat, contents, X, per_layer=per_layer)
    assert message.split(".")[0] in report.findings()[0]
    qat.set_weights(before)
    assert not keras_qat.verify(qat, contents, X, per_layer=per_layer).notes


def test_file_of_another_model():
    qat, other = with_ranges(), keras_qat.quantize_model(_wider())
    contents = keras_qat.export_tflite(observe(other, X))
    with pytest.warns(UserWarning, match="another model"):
        report = keras_qat.verify(qat, contents, X)
    assert "another model" in report.notes[0]


def _wider():
    model = keras.Sequential(
        [
            keras.Input((6, 6, 2), name="image"),
            keras.layers.Conv2D(5, 3, name="conv"),
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(3, name="logits"),
        ]
    )
    return scramble(model)


@pytest.mark.parametrize(
    "ending",
    [".keras", *(pytest.param(item, marks=pytest.mark.slow) for item in (".h5", ".weights.h5"))],
)
def test_file_belongs_to_a_model_that_was_saved(tmp_path, ending):
    qat = with_ranges()
    contents = keras_qat.export_tflite(qat)
    path = tmp_path / f"model{ending}"
    if ending == ".weights.h5":
        qat.save_weights(path)
        again = keras_qat.quantize_model(tiny_net())
        again.load_weights(path)
    else:
        again = save_and_load(qat, path)
    again.trainable = False
    assert not keras_qat.verify(again, contents, X).notes
    assert keras_qat.export_tflite(again) == contents


@pytest.mark.slow
def test_file_without_a_fingerprint():
    """Files of earlier versions, and of other programs."""
    qat = with_ranges()
    contents = keras_qat.export_tflite(qat)
    entry = compress(keras_qat.read_metadata(contents))
    earlier = b'{"version":"0.1.0"}'
    contents = contents.replace(entry, earlier.ljust(len(entry)))
    assert keras_qat.read_metadata(contents) == {"version": "0.1.0"}
    moved(qat)
    assert not keras_qat.verify(qat, contents, X).notes


def of_a_series(shuffle):
    """Trains on a series in order of time, or shuffled. Returns the warnings of `fit`."""
    keras.utils.set_random_seed(0)
    x = np.linspace(-2, 2, 640, dtype=np.float32)[:, None]
    layers = keras.layers
    model = keras.Sequential([keras.Input((1,)), layers.Dense(8, "relu"), layers.Dense(1)])
    qat = keras_qat.quantize_model(model)
    qat.compile("sgd", "mae")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        qat.fit(x, x**2, epochs=2, shuffle=shuffle, verbose=0)
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


def test_fit_says_if_its_ranges_do_not_hold_its_data():
    (told,) = of_a_series(shuffle=False)
    assert "of the values of input 'input_" in told
    assert "shuffle" in told


def test_values_slightly_beyond_a_range_are_no_reason_to_warn():
    assert of_a_series(shuffle=True) == []


LOW = recipes.int8(5, 5)
SYMMETRIC_5 = dataclasses.replace(
    LOW, activations=dataclasses.replace(LOW.activations, symmetric=True)
)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("saved", "loaded", "is_told"),
    [
        ("int8", "int16x8", True),
        ("int8", recipes.symmetric(), True),
        ("int16x8", "int16x8", False),
        (recipes.symmetric(), recipes.symmetric(), False),
        (LOW, SYMMETRIC_5, True),
        (SYMMETRIC_5, SYMMETRIC_5, False),
    ],
    ids=["int16x8", "symmetric", "same int16x8", "same symmetric", "5 bits", "same 5 bits"],
)
def test_weights_of_another_recipe(saved, loaded, is_told):
    qat = quantized(saved)
    keras_qat.calibrate(qat, X)
    other = quantized(loaded)
    other.set_weights(qat.get_weights())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        keras_qat.export_tflite(other)
    told = any("recipe has symmetric ranges" in str(warning.message) for warning in caught)
    assert told is is_told
