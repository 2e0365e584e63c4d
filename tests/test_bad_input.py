"""Data and files that are not what they should be: an error names the place, nothing is lost."""

from __future__ import annotations

import os
import stat
import threading

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.config.specs import from_config
from keras_qat.frontend.keras2.backend import keras
from tests.helpers import images, observe
from tests.networks.small import functional, layers, out_of_order


@pytest.fixture(scope="module")
def two_inputs():
    """A model with the inputs `right` (6 numbers) and `left` (4), and what it takes."""
    x = [images(16, (6,)), images(16, (4,))]
    return observe(keras_qat.quantize_model(out_of_order()), *x), x


def _changed(x, place, value):
    return [value if at == place else each for at, each in enumerate(x)]


DATA = {
    "too few": (lambda x: x[:1], "has 2 inputs, but the data has 1"),
    "another name": (lambda x: {"right": x[0], "wrong": x[1]}, "has the inputs 'right', 'left'"),
    "another shape": (
        lambda x: _changed(x, 1, x[0]),
        r"'left' .* shape \(None, 4\), not \(16, 6\)",
    ),
    "another rank": (lambda x: _changed(x, 0, x[0][0]), r"'right' .* not \(6,\)"),
    "NaN": (lambda x: _changed(x, 1, x[1] * np.nan), "'left' .* holds NaN"),
    "words": (lambda x: _changed(x, 0, np.full((16, 6), "a")), "'right' .* not numbers"),
    "nothing": (lambda x: [each[:0] for each in x], "The data for .* is empty"),
    "no data": (lambda x: None, "The data for '.*' is None: pass examples"),
    "other counts": (lambda x: _changed(x, 0, x[0][:3]), "right 3, left 16"),
}


@pytest.mark.parametrize("kind", DATA)
def test_data_that_no_model_takes(kind, two_inputs):
    qat, x = two_inputs
    change, message = DATA[kind]
    contents = keras_qat.export_tflite(qat)
    for verb in (keras_qat.simulate, lambda *given: keras_qat.verify(qat, contents, given[1])):
        with pytest.raises(ValueError, match=message):
            verb(qat, change(x))


def test_sizes_that_are_zero():
    model = functional((None, 2), build=layers.Conv1D(3, 1))
    qat = observe(keras_qat.quantize_model(model), images(8, (5, 2)))
    with pytest.raises(ValueError, match=r"is empty: its shape is \(8, 0, 2\)"):
        keras_qat.simulate(qat, np.zeros((8, 0, 2), np.float32))


def test_a_last_axis_of_size_1_may_be_left_out():
    """Keras adds it."""
    model = functional((1,), build=layers.Dense(3))
    x = images(16, (1,))
    qat = keras_qat.quantize_model(model)
    keras_qat.calibrate(qat, x[:, 0])
    np.testing.assert_array_equal(
        *(next(iter(keras_qat.simulate(qat, each).outputs.values())).codes for each in (x, x[:, 0]))
    )
    assert keras_qat.verify(qat, keras_qat.export_tflite(qat), x[:, 0]).identical == 1


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
        with pytest.raises(ValueError, match=r"input_range=.*: give the minimum and the maximum"):
            verb(qat, input_range=given)


def test_input_range_without_zero(without_input_range):
    """Quantized values stood for 0 to 3 instead of 3 to 6."""
    qat, x = without_input_range
    contents = keras_qat.export_tflite(qat, input_range=(3.0, 6.0))
    assert contents == keras_qat.export_tflite(qat, input_range=(0.0, 6.0))
    assert keras_qat.verify(qat, contents, np.minimum(x, 6)).max_difference <= 2


def test_specifications_that_are_none():
    for ends in ((0.0, np.inf), (np.nan, 1.0), (2.0, 1.0)):
        for make in (
            lambda ends: keras_qat.specs.FixedSpec(*ends),
            lambda ends: keras_qat.specs.QuantSpec(initial_range=ends),
        ):
            with pytest.raises(ValueError, match=r"The range .* (is empty|is not finite)"):
                make(ends)
    for config in ({"kind": "os.system"}, {"kind": "QuantSpec", "command": "ls"}, "QuantSpec", 3):
        with pytest.raises(ValueError, match="is not a specification of quantization"):
            from_config(config)


def test_nan_in_predict(two_inputs):
    """A table was looked up at no place."""
    model = functional((4,), build=lambda x: layers.Activation("sigmoid")(layers.Dense(3)(x)))
    x = images(16, (4,))
    qat = observe(keras_qat.quantize_model(model), x)
    x[3, 1] = np.nan
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"Input input_\d+ of .* holds NaN"):
        qat.predict(x, verbose=0)
    x[3, 1] = np.inf
    assert np.all(np.isfinite(qat.predict(x, verbose=0)))


def test_devices_are_not_replaced(exported, tmp_path):
    os.mkfifo(tmp_path / "model.tflite")
    with pytest.raises(OSError, match=r"model\.tflite: it is a device"):
        keras_qat.export_tflite(exported.model, tmp_path / "model.tflite")
    assert stat.S_ISFIFO((tmp_path / "model.tflite").stat().st_mode)


def test_threads_leave_the_policy_as_it_was():
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        models = [keras.Sequential([keras.Input((4,)), layers.Dense(3)]) for _ in range(4)]
        work = [threading.Thread(target=keras_qat.plan, args=[each]) for each in models]
        for each in work:
            each.start()
        for each in work:
            each.join()
        assert keras.mixed_precision.global_policy().name == "mixed_bfloat16"
    finally:
        keras.mixed_precision.set_global_policy("float32")


def test_threads_that_export_at_once():
    """Layers have other weights in between."""
    x = images(8, (5, 6))
    models = [
        observe(keras_qat.quantize_model(functional((5, 6), build=build)), x)
        for build in (
            lambda x: layers.Dense(4)(layers.LSTM(4)(layers.Masking()(x))),
            lambda x: layers.LayerNormalization()(layers.Dense(3, "relu")(x)),
            lambda x: layers.Bidirectional(layers.GRU(3))(x),
        )
    ]
    alone = [keras_qat.export_tflite(each) for each in models]
    found = {}

    def work(place):
        found[place] = keras_qat.export_tflite(models[place % 3])
        assert keras_qat.verify(models[place % 3], found[place], x).identical == 1

    threads = [threading.Thread(target=work, args=[place]) for place in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == {place: alone[place % 3] for place in range(6)}


@pytest.mark.parametrize("name", ["a name", "früh/ä", "层", "a;b", "-x"])
def test_names_that_are_no_scopes(name, tmp_path):
    """Keras takes them for inputs, though not for layers that compute."""
    x, inner = (keras.Input((4,), name=name) for _ in range(2))
    part = keras.Model(inner, layers.Dense(3)(inner), name="part")
    model = keras.Model(x, part(x))
    data = images(16, (4,))
    qat = observe(keras_qat.quantize_model(model), data)
    qat.save(tmp_path / "qat.keras")
    loaded = keras.models.load_model(tmp_path / "qat.keras")
    contents = keras_qat.export_tflite(loaded)
    assert keras_qat.verify(loaded, contents, data, per_layer=True).identical == 1
