"""Tests outputs in a dict: their keys are their names in logs, files and signatures."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import images, keras, quantize_on, save_and_load
from tests.networks.small import layers

X = images(64, (6,))
Y = {"boxes": images(64, (4,), 2), "scores": np.arange(64) % 3}
LOSSES = {"scores": "sparse_categorical_crossentropy", "boxes": "mse"}
KEYS = ["boxes", "scores"]


class Detector(keras.Model):
    """Boxes have 4 values and scores 3, so another order would fail."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(8, "relu")
        self.boxes, self.scores = layers.Dense(4), layers.Dense(3, "softmax")

    def call(self, x: Any) -> dict[str, Any]:
        hidden = self.hidden(x)
        return {"scores": self.scores(hidden), "boxes": self.boxes(hidden)}


def subclassed() -> Any:
    detector = Detector()
    detector(X[:2])
    return detector


def functional() -> Any:
    x = keras.Input((6,))
    hidden = layers.Dense(8, "relu")(x)
    scores, boxes = layers.Dense(3, "softmax")(hidden), layers.Dense(4)(hidden)
    return keras.Model(x, {"scores": scores, "boxes": boxes})


@pytest.fixture(scope="module", params=[subclassed, functional])
def qat(request):
    keras.utils.set_random_seed(1)
    qat = keras_qat.quantize_model(request.param())
    qat.compile("adam", LOSSES, metrics={"scores": "accuracy"})
    history = qat.fit(X, Y, epochs=2, verbose=0).history
    assert {"boxes_loss", "scores_loss", "scores_accuracy"} < history.keys()
    return qat


def test_predict_returns_the_dict(qat):
    predicted = qat.predict(X, verbose=0)
    assert {key: values.shape for key, values in predicted.items()} == {
        "scores": (64, 3),
        "boxes": (64, 4),
    }
    assert "scores_accuracy" in qat.evaluate(X, Y, verbose=0, return_dict=True)


def test_keys_are_the_names_in_files(qat, tmp_path):
    contents = keras_qat.export_tflite(qat)
    file, predicted = keras_qat.TFLiteModel(contents), qat.predict(X, verbose=0)
    assert list(file.outputs) == KEYS
    for name, values in zip(file.outputs, file.predict(X), strict=True):
        np.testing.assert_array_equal(values, predicted[name])
    report = keras_qat.verify(qat, contents, X, {"scores": Y["scores"]})
    assert [output.name for output in report.outputs] == KEYS
    assert report.outputs[1].accuracy is not None
    assert sorted(keras_qat.simulate(qat, X).outputs) == KEYS
    keras_qat.export_saved_model(qat, tmp_path / "saved")
    serve = tf.saved_model.load(str(tmp_path / "saved")).signatures["serving_default"]
    assert sorted(serve.structured_outputs) == KEYS


@pytest.mark.parametrize(
    "format_", [".keras", *(pytest.param(end, marks=pytest.mark.slow) for end in (".h5", ""))]
)
def test_keys_are_saved(qat, format_, tmp_path):
    loaded = save_and_load(qat, tmp_path / f"qat{format_}")
    assert loaded.output_names == KEYS
    assert keras_qat.export_tflite(loaded) == keras_qat.export_tflite(qat)
    assert keras_qat.quantize_model(loaded).output_names == KEYS


def test_a_key_may_be_the_name_of_an_input_and_hold_several_tensors():
    x = keras.Input((6,), name="image")
    model = keras.Model(
        x, {"image": layers.Dense(6)(x), "parts": [layers.Dense(2)(x), layers.Dense(3)(x)]}
    )
    qat = quantize_on(model, X)
    contents = keras_qat.export_tflite(qat)
    assert list(keras_qat.TFLiteModel(contents).outputs) == ["image", "parts_0", "parts_1"]
    assert keras_qat.verify(qat, contents, X).identical == 1


def test_a_part_with_a_dict_has_its_keys(qat):
    scores = qat.predict(X, verbose=0)["scores"]
    part = keras.Model(qat.inputs, {"classes": qat.output["scores"], "again": qat.output["boxes"]})
    file = keras_qat.TFLiteModel(keras_qat.export_tflite(part))
    assert list(file.outputs) == ["again", "classes"]
    np.testing.assert_array_equal(file.predict(X)[1], scores)
