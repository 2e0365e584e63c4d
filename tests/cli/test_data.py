"""Tests files that the command line reads: arrays, tables, functions, images and models."""

import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat.keras2.backend import keras
from keras_qat_cli.data import open_array
from keras_qat_cli.models import takes_pixels
from tests.cli.running import X, run
from tests.networks.small import functional, layers

SOURCES: dict[str, list[str]] = {
    "x.csv": [],
    "one.npz": [],
    "x.npz": [],
    "named.npz": ["--key", "image"],
    "labels.csv": ["--drop", "label"],
    "prepare:x": [],
    "prepare:representative": [],
}


FEW = ("labels.csv", "x.npz", "prepare:representative")
"""The sources that are read by default."""


@pytest.mark.parametrize(
    "source",
    [pytest.param(source, marks=[] if source in FEW else pytest.mark.slow) for source in SOURCES],
)
def test_data(source, sources, monkeypatch):
    monkeypatch.chdir(sources)
    monkeypatch.syspath_prepend(str(sources))
    told = run("simulate", "qat.keras", source, "-o", "codes.npz", "--limit", 9, *SOURCES[source])
    assert "(9, 3)" in told
    codes = keras_qat.simulate(keras.models.load_model("qat.keras"), X[:9]).outputs["logits"].codes
    with np.load("codes.npz") as result:
        assert np.abs(result["logits"].astype(int) - codes).max() <= (1 if "csv" in source else 0)


def test_files_without_numbers(tmp_path):
    np.save(tmp_path / "objects.npy", np.array([{}], object))
    np.save(tmp_path / "cut.npy", X)
    (tmp_path / "cut.npz").write_bytes(b"PK")
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:5])
    for name in ("objects.npy", "cut.npy", "cut.npz"):
        with pytest.raises(ValueError, match=f"{name} contains no readable array of numbers: "):
            open_array(str(tmp_path / name), mmap_mode="r")


def test_columns_for_several_inputs(tmp_path):
    inputs = [keras.Input((1,), name="age"), keras.Input((1,), name="height")]
    model = keras.Model(inputs, layers.Dense(2)(layers.Concatenate()(inputs)))
    model.save(tmp_path / "float.keras")
    (tmp_path / "people.csv").write_text("height,name,age\n1.8,Ada,40\n1.6,Emmy,30\n")
    told = run(
        *("calibrate", tmp_path / "float.keras", tmp_path / "people.csv", "--drop", "name"),
        *("-o", tmp_path / "qat.keras", "--json", "--accept-data"),
    )
    ranges = {load["tensors"][0]: load["maximum"] for load in json.loads(told)["ranges"]}
    assert ranges["age"] >= 40 or ranges["height"] >= 40  # They share one range.


def write_image(path, size=8):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tf.io.encode_png(np.full((size, size, 3), 255, np.uint8)).numpy())


@pytest.mark.slow
def test_images(tmp_path):
    """Images are resized to the model's size, and pixels are scaled as in training."""
    model = functional((8, 8, 3), build=lambda x: layers.ReLU()(layers.Conv2D(2, 1)(x)))
    model.save(tmp_path / "float.keras")
    for size in (8, 20):
        write_image(tmp_path / "photos" / "cats" / f"{size}.PNG", size)
    paths = tmp_path / "float.keras", tmp_path / "photos", "-o", tmp_path / "q.keras"
    arguments = "calibrate", *paths
    assert "add --pixels 0..255, 0..1 or -1..1" in run(*arguments, code=2)
    for pixels, largest in (("0..255", 255), ("0..1", 1), ("-1..1", 1)):
        told = run(*arguments, "--json", "--accept-data", "--pixels", pixels)
        assert json.loads(told)["ranges"][0]["maximum"] == pytest.approx(
            largest * (1 + 1 / 1019), rel=1e-4
        )


def test_images_without_subfolders_have_no_labels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    functional((8, 8, 3), build=lambda x: layers.Dense(4)(layers.Flatten()(x))).save("float.keras")
    for name in ("flat/0", "both/3/a", "both/b", "ids/1/a", "ids/3/b", "ids/4/c", "pets/cat/a"):
        write_image(Path(f"{name}.png"))
    pixels = "--pixels", "0..1"
    told = run("evaluate", "float.keras", "flat", *pixels, code=2)
    assert "Error: flat has no subfolders, so its images have no labels. Move the" in told
    told = run("evaluate", "float.keras", "both", *pixels, code=2)
    assert f"Error: {Path('both', 'b.png')} is in no subfolder, so it has no label. Move" in told
    told = run("evaluate", "float.keras", "ids", *pixels, code=2)
    assert "Error: ids has the class 4, but the output has only the classes 0 to 3." in told
    told = run("tune", "float.keras", "ids", "flat", "t.tflite", *pixels, code=2)
    assert "Error: flat has no subfolders, so its images have no labels. Move the" in told
    told = run("tune", "float.keras", "ids", "pets", "t.tflite", *pixels, code=2)
    assert "ids and pets have different subfolders, so their classes would differ: 1, 3," in told
    told = run("convert", "float.keras", "flat", "m.tflite", *pixels, "--accept-data", "--json")
    assert json.loads(told)["outputs"][0]["accuracy"] is None


@pytest.mark.parametrize("scale", [1 / 255, 1 / 127.5, 0.5])
def test_models_that_scale_pixels_themselves(scale, tmp_path):
    """The model's file states the pixels that it expects, before and after quantization."""
    model = functional((4, 4, 3), build=lambda x: layers.Conv2D(2, 1)(layers.Rescaling(scale)(x)))
    for name, saved in (("float", model), ("qat", keras_qat.quantize_model(model))):
        saved.save(tmp_path / f"{name}.keras")
        assert takes_pixels(tmp_path / f"{name}.keras") == (scale < 0.1)


OLD_KERAS = tuple(map(int, tf.__version__.split(".")[:2])) < (2, 16)

CUSTOM = """
import tensorflow as tf
from keras_qat import keras
@keras.utils.register_keras_serializable("mine")
class Double(keras.layers.Layer):
    def call(self, x):
        return 2.0 * x
"""


@pytest.mark.skipif(OLD_KERAS, reason="Keras 3 comes with newer versions of TensorFlow")
def test_files_of_keras_3(tmp_path):
    import keras as keras_3

    model = keras_3.Sequential([keras_3.Input((4,)), keras_3.layers.Dense(3, name="logits")])
    model.save(tmp_path / "model.keras")
    parsed = json.loads(run("plan", tmp_path / "model.keras", "--json"))
    assert [item["tensor"] for item in parsed["tensors"]][1:] == ["logits/kernel", "logits"]


def test_custom_layers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_layers.py").write_text(CUSTOM)
    import my_layers

    functional((4,), build=lambda x: my_layers.Double(name="double")(x)).save("model.h5")
    known = keras.utils.get_custom_objects()
    before = known.pop("mine>Double")
    try:
        told = run("plan", "model.h5", code=2)
        assert "Keras cannot load model.h5. Import custom layers with --import" in told
    finally:
        known["mine>Double"] = before
    assert "double" in run("--import", "my_layers", "plan", "model.h5")
