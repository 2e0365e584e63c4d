"""Bad input: each case is refused with a message that says what to do, and leaves nothing."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat import recipes, specs
from keras_qat.frontend.keras2.backend import keras
from keras_qat.tflite.interpreter import FileInterpreter
from tests.helpers import images, observe
from tests.networks.small import functional, layers, residual_net, tiny_net

OLD_KERAS = tuple(map(int, tf.__version__.split(".")[:2])) < (2, 16)


@pytest.mark.legacy
def test_subclassed_model():
    class Custom(keras.Model):
        def __init__(self):
            super().__init__(name="custom")
            self.dense = layers.Dense(2)

        def call(self, inputs):
            return self.dense(inputs)

    with pytest.raises(ValueError, match=r"'custom' is a subclassed model.*inputs=keras.Input"):
        keras_qat.quantize_model(Custom())


@pytest.mark.legacy
def test_unbuilt_sequential():
    model = keras.Sequential([layers.Dense(2)], name="unbuilt")
    with pytest.raises(ValueError, match=r"'unbuilt' has no input shape yet.*keras\.Input"):
        keras_qat.quantize_model(model)
    model.build((None, 3))
    keras_qat.quantize_model(model)


@pytest.mark.legacy
@pytest.mark.skipif(not OLD_KERAS, reason="Keras 3 comes with newer versions of TensorFlow")
@pytest.mark.parametrize("arguments", [1, 2])
def test_keras_3_where_there_is_none(arguments):
    convert = keras_qat.from_keras_3 if arguments == 1 else keras_qat.to_keras_3
    with pytest.raises(ImportError, match=r"Keras 3 beside Keras 2.*TensorFlow 2\.16.*keras3"):
        convert(*[tiny_net()] * arguments)


@pytest.mark.legacy
@pytest.mark.parametrize("name", ["set_quantization", "freeze_batch_norm", "freeze_ranges"])
def test_switch_that_is_no_bool(name):
    qat = keras_qat.quantize_model(tiny_net())
    before = qat.get_weights()
    with pytest.raises(TypeError, match="='off': give True or False"):
        getattr(keras_qat, name)(qat, "off")
    for weight, same in zip(qat.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, same)


@pytest.mark.legacy
@pytest.mark.parametrize("model", [None, "model.h5", layers.Dense(2)])
def test_no_model(model):
    with pytest.raises(ValueError, match=r"Expected a Keras model, got \w+"):
        keras_qat.quantize_model(model)


@pytest.mark.legacy
def test_already_quantized_with_another_recipe():
    qat = keras_qat.quantize_model(tiny_net())
    with pytest.raises(ValueError, match=r"already quantized.*float model"):
        keras_qat.quantize_model(qat, recipe=recipes.int8(weight_bits=4))
    with pytest.raises(ValueError, match="quantized already"):
        keras_qat.plan(qat)


@pytest.mark.legacy
@pytest.mark.parametrize("bits", [-1, 0, 1, 9, 16, 4.0, "8", None, True])
@pytest.mark.parametrize("which", ["weight_bits", "activation_bits"])
def test_bits(which, bits):
    with pytest.raises(ValueError, match="from 2 to 8"):
        recipes.int8(**{which: bits})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"observer": "median"}, "moving_average"),
        ({"ema_decay": 1.0}, "below 1"),
        ({"ema_decay": -0.1}, "at least 0"),
    ],
)
def test_spec(options, message):
    with pytest.raises(ValueError, match=message):
        specs.QuantSpec(**options)


def test_fixed_range_that_is_empty():
    with pytest.raises(ValueError, match="empty"):
        specs.FixedSpec(1.0, 1.0)


def test_unknown_recipe():
    with pytest.raises(ValueError, match=r"no recipe 'int9'.*int8"):
        keras_qat.quantize_model(tiny_net(), recipe="int9")


@pytest.mark.legacy
@pytest.mark.parametrize("scope", ["con", ["con", "logit"], "x*", [], lambda layer: False])
def test_scope_that_matches_nothing(scope):
    with pytest.raises(ValueError, match=r"matches no layer.*conv, bn, relu"):
        keras_qat.quantize_model(tiny_net(), scope=scope)


class Unknown(layers.Layer):
    """A layer that no rule knows."""

    def call(self, inputs):
        return tf.sin(inputs)


def with_unknown_layers():
    def build(x):
        x = layers.Conv2D(4, 3, name="conv")(x)
        x = Unknown(name="wave")(x)
        x = layers.Flatten(name="flatten")(x)
        x = layers.Dense(4, name="dense")(x)
        return Unknown(name="last")(x)

    return functional((6, 6, 2), build=build)


@pytest.mark.legacy
def test_unknown_layer_passes_through_and_is_reported():
    model = with_unknown_layers()
    plan = keras_qat.plan(model)
    assert list(plan.float_layers) == ["wave", "last"]
    assert "tf.math.sin" in plan.float_layers["wave"]
    assert "2 layers stay in float: wave, last" in str(plan)
    qat = keras_qat.quantize_model(model)
    x = images(32, (6, 6, 2))
    keras_qat.set_quantization(qat, False)
    np.testing.assert_allclose(
        qat.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-4, atol=1e-6
    )


def test_model_with_an_unknown_layer_exports():
    qat = keras_qat.quantize_model(with_unknown_layers())
    x = images(32, (6, 6, 2))
    observe(qat, x)
    contents = keras_qat.export_tflite(qat)
    names = [name for name, _, _ in FileInterpreter(contents).operations()]
    assert "SIN" in names
    assert keras_qat.verify(qat, contents, x).max_difference <= 1


@pytest.mark.legacy
def test_strict_lists_every_such_layer():
    with pytest.raises(ValueError, match="stay in float") as raised:
        keras_qat.quantize_model(with_unknown_layers(), strict=True)
    assert "wave" in str(raised.value)
    assert "last" in str(raised.value)
    keras_qat.quantize_model(tiny_net(), strict=True)


EXPORTS = [keras_qat.export_tflite, keras_qat.export_saved_model]


@pytest.mark.parametrize("export", EXPORTS)
def test_export_of_a_model_that_has_seen_no_data(export, tmp_path):
    qat = keras_qat.quantize_model(tiny_net())
    with pytest.raises(
        ValueError,
        match=r"quantizers have seen no data yet.*Train.*keras_qat\.calibrate\(model, data\)",
    ):
        export(qat, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("export", EXPORTS)
def test_export_of_a_float_model(export, tmp_path):
    with pytest.raises(ValueError, match=r"not quantization-aware.*quantize_model"):
        export(tiny_net(), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.legacy
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_export_of_a_model_that_diverged(bad, tmp_path):
    qat = observe(keras_qat.quantize_model(tiny_net()), images(12, (6, 6, 2)))
    observe(qat, np.full((3, 6, 6, 2), bad, np.float32))
    with pytest.raises(ValueError, match=r"NaN or infinity.*checkpoint"):
        keras_qat.export_tflite(qat, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_export_of_weights_that_diverged():
    qat = observe(keras_qat.quantize_model(tiny_net()), images(12, (6, 6, 2)))
    bias = qat.get_layer("quant_logits").layer.bias
    bias.assign(bias + np.nan)
    with pytest.raises(ValueError, match="NaN or infinity"):
        keras_qat.export_tflite(qat)


@pytest.fixture
def no_conversion(monkeypatch):
    """Fails if the work begins: paths have to be checked before."""

    def refuse(*args, **kwargs):
        raise AssertionError("The path was not checked before the work.")

    monkeypatch.setattr("keras_qat.export.tflite.resolve_to_export", refuse)
    monkeypatch.setattr("keras_qat.export.saved_model.resolve_to_export", refuse)


@pytest.mark.usefixtures("no_conversion")
@pytest.mark.parametrize("export", EXPORTS)
def test_missing_directory(exported, export, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"does not exist. Create it first"):
        export(exported.model, tmp_path / "missing" / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_conversion")
@pytest.mark.parametrize("export", EXPORTS)
def test_read_only_directory(exported, export, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    # A superuser may write anywhere: what others are told is tested all the same.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError, match=r"folder is read-only.*chmod u\+w"):
        export(exported.model, folder / "model")
    folder.chmod(stat.S_IRWXU)
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("no_conversion")
def test_read_only_file(exported, tmp_path):
    path = tmp_path / "model.tflite"
    path.write_bytes(b"precious")
    path.chmod(stat.S_IRUSR)
    with pytest.raises(PermissionError, match=r"model\.tflite is read-only"):
        keras_qat.export_tflite(exported.model, path)
    assert path.read_bytes() == b"precious"


@pytest.mark.usefixtures("no_conversion")
def test_directory_in_place_of_a_file(exported, tmp_path):
    with pytest.raises(IsADirectoryError, match="is a directory"):
        keras_qat.export_tflite(exported.model, tmp_path)
    assert tmp_path.is_dir()


@pytest.mark.usefixtures("no_conversion")
def test_directory_with_other_things_in_it(exported, tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="something other than a SavedModel"):
        keras_qat.export_saved_model(exported.model, tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


@pytest.mark.usefixtures("no_conversion")
def test_file_in_place_of_a_directory(exported, tmp_path):
    path = tmp_path / "model"
    path.write_text("precious")
    with pytest.raises(NotADirectoryError, match="it is a file"):
        keras_qat.export_saved_model(exported.model, path)
    assert path.read_text() == "precious"


@pytest.mark.parametrize("export", EXPORTS)
def test_failure_in_the_middle_leaves_what_was_there(exported, export, tmp_path, monkeypatch):
    path = tmp_path / "model"
    if export is keras_qat.export_tflite:
        path.write_text("old")
        monkeypatch.setattr("pathlib.Path.write_bytes", _disk_is_full)
    else:
        path.mkdir()
        monkeypatch.setattr(tf.saved_model, "save", _disk_is_full)
    with pytest.raises(OSError, match="No space left on device"):
        export(exported.model, path)
    assert [each.name for each in tmp_path.iterdir()] == ["model"]
    assert path.is_dir() or path.read_text() == "old"


def _disk_is_full(*args, **kwargs):
    raise OSError("No space left on device")


def test_residual_net_is_quantized_completely():
    keras_qat.quantize_model(residual_net(), strict=True)


@pytest.mark.legacy
def test_layer_that_the_converter_refuses():
    def build(x):
        x = layers.Dense(4, name="fine")(x)
        x = layers.Lambda(lambda x: tf.math.bessel_i0(x), name="waves")(x)
        x = layers.Dense(3)(x)
        return layers.Lambda(lambda x: tf.math.igamma(2.0, tf.abs(x)), name="gamma")(x)

    qat = observe(keras_qat.quantize_model(functional((4,), build=build)), images(8, (4,)))
    message = (
        r"refuses 2 layers: 'waves' \(tf.math.bessel_i0\): .*tf\.BesselI0; "
        r"'gamma' \(tf.math.igamma\): .*tf\.Igamma"
    )
    with pytest.raises(ValueError, match=message) as info:
        keras_qat.export_tflite(qat)
    assert "fine" not in str(info.value)


@pytest.mark.legacy
@pytest.mark.parametrize("kind", ["tflite", "saved_model"])
def test_full_disk_leaves_the_old_file(kind, exported, tmp_path, monkeypatch):
    export = getattr(keras_qat, f"export_{kind}")
    path = tmp_path / "model"
    export(exported.model, path)
    before = {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}

    def write_half(self, contents):
        with open(self, "wb") as file:
            file.write(contents[: len(contents) // 2])
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    def save_half(module, path, **kwargs):
        os.makedirs(path)
        (Path(path) / "saved_model.pb").write_bytes(b"half")
        raise tf.errors.ResourceExhaustedError(None, None, "variables; No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_half)
    monkeypatch.setattr(tf.saved_model, "save", save_half)
    with pytest.raises(OSError, match=r"No space left.*The file there is unchanged") as info:
        export(exported.model, path)
    assert info.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()} == before
