"""Tests mistakes that once had no error: a program for each, and its entry on a page.

docs/accuracy-drops.md has a table of them, with words of the messages.
"""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from keras_qat import messages, recipes
from keras_qat_cli.data import Source
from tests.helpers import keras, layers, quantize_on, rng

PAGE = (Path(__file__).parents[2] / "docs" / "accuracy-drops.md").read_text()
X = rng().uniform(0, 1, (64, 6, 6, 1)).astype(np.float32)


def network(dead: bool = False, fresh: bool = False, *last: Any) -> Any:
    """Returns a model whose BatchNormalization has the statistics of `X`."""
    keras.utils.set_random_seed(3)
    bias = keras.initializers.Constant(-99.0 * dead)
    model = keras.Sequential(
        [
            keras.Input((6, 6, 1), name="image"),
            layers.BatchNormalization(momentum=0.0, name="norm"),
            layers.Flatten(),
            layers.Dense(16, "relu", bias_initializer=bias, name="hidden"),
            *last,
            layers.Dense(5, name="logits"),
        ]
    )
    if not fresh:
        model(X, training=True)
    return model


def calibrated(x: Any, model: Any = None) -> Any:
    return quantize_on(model or network(), x)


def verified(model: Any, file: bytes | None = None) -> str:
    qat = calibrated(X, model)
    return str(keras_qat.verify(qat, file or keras_qat.export_tflite(qat), X).verdict)


def with_outlier() -> Any:
    x = X.copy()
    x[0, 0, 0] = 1000.0
    return x


def marked() -> Any:
    image = keras.Input((6, 6, 1), name="image")
    x = tf.where(image > 0.5, image, -1e9)
    return keras.Model(image, layers.Dense(3, name="logits")(layers.Flatten()(x)))


def joined() -> Any:
    image = keras.Input((6, 6, 1), name="image")
    x = layers.Flatten()(image)
    both = [layers.Dense(4, "tanh")(x), layers.Rescaling(1000.0, 500.0)(x)]
    return keras.Model(image, layers.Dense(3, name="logits")(layers.Concatenate()(both)))


def trained_on_bytes() -> None:
    qat = keras_qat.quantize_model(network())
    qat.compile("sgd", "mse")
    qat.fit(np.round(255 * X).astype(np.uint8), np.zeros((64, 5)), verbose=0)


def not_assigned() -> None:
    recipe = recipes.int8()
    recipe.override("logits", quantize=False)
    keras_qat.quantize_model(network(), recipe)


def folder_of_images(folder: Path) -> None:
    (folder / "photo.png").write_bytes(tf.io.encode_png(np.zeros((6, 6, 1), np.uint8)).numpy())
    network().save(folder / "model.keras")
    Source(str(folder)).check(folder / "model.keras")


def saved_over(folder: Path) -> None:
    qat = calibrated(X)
    qat.save(folder / "qat.keras")
    keras_qat.export_tflite(qat, folder / "qat.keras")


def with_keras_3(folder: Path) -> None:
    keras_3 = pytest.importorskip("keras", minversion="3.0")
    calibrated(X).save(folder / "qat.keras")
    keras_3.models.load_model(folder / "qat.keras")


def nothing_quantized() -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Softmax()])
    keras_qat.quantize_model(model, "contrib")


MISTAKES: dict[str, Callable[[Path], Any]] = {
    "They fit as x / 255. Then call calibrate again": lambda _: calibrated(255 * X),
    "(uint8, 0 to 255) are not prepared as in training": lambda _: calibrated(
        np.round(255 * X).astype(np.uint8)
    ),
    r"They fit as 255 \* x": lambda _: calibrated(X / 255),
    "They fit as x / 255.": lambda _: trained_on_bytes(),
    "Pass the range used in training: add --pixels": folder_of_images,
    "All values of the calibration data are 0": lambda _: calibrated(0 * X),
    "The ranges come from 2 examples": lambda _: calibrated(X[:2]),
    "half of the examples vary by less than one quantized value": lambda _: calibrated(
        with_outlier(),
        keras.Sequential([keras.Input((6, 6, 1)), layers.Conv2D(3, 3), layers.ReLU()]),
    ),
    "is set by -1e+09, far outside of its other values": lambda _: calibrated(X, marked()),
    "is lost. Scale these tensors alike": lambda _: calibrated(X, joined()),
    "are lost, because all features share one range": lambda _: calibrated(
        X.reshape(64, -1) * [1e5, *35 * [1]],
        keras.Sequential([keras.Input((36,)), layers.Dense(2)]),
    ),
    "the statistics of a new layer, mean 0 and variance 1": lambda _: verified(network(fresh=True)),
    "is the same for all examples, perhaps because units are dead": lambda _: verified(
        network(dead=True)
    ),
    "keeps 1 layer in float: 1 LayerNormalization": lambda _: calibrated(
        X, network(False, False, layers.LayerNormalization())
    ),
    "The file computes in float: none of its tensors is quantized": lambda _: verified(
        network(), bytes(tf.lite.TFLiteConverter.from_keras_model(network()).convert())
    ),
    "returns a new recipe, which was not used": lambda _: not_assigned(),
    "an export would replace the saved Keras model there": saved_over,
    "Keras would load a file of that name as a model": lambda folder: keras_qat.export_tflite(
        calibrated(X), folder / "new.keras"
    ),
    "have seen no data yet, so they do not round": lambda _: keras_qat.quantize_model(
        network()
    ).predict(X, verbose=0),
    "quantizes nothing in": lambda _: nothing_quantized(),
    "Labels are not needed": lambda _: keras_qat.calibrate(calibrated(X), X, np.zeros(64)),
    "Load it with keras_qat.keras.models.load_model(path)": with_keras_3,
}
"""Words of the message -> the program."""


@pytest.mark.sample(3)
@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_answered(words, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(messages, "_SHOWN", set())
    answers: list[str] = []
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.WARNING):
        warnings.simplefilter("always")
        try:
            answers.append(str(MISTAKES[words](tmp_path)))
        except (ValueError, FileExistsError) as error:
            answers.append(str(error))
    answers += [str(warning.message) for warning in caught] + caplog.messages
    words = words.replace("\\", "")
    assert any(words in answer for answer in answers), answers


def test_the_page_has_all_of_them():
    assert [words for words in MISTAKES if words not in PAGE] == []


def test_a_program_without_mistakes_is_told_nothing(monkeypatch, caplog):
    monkeypatch.setattr(messages, "_SHOWN", set())
    qat = calibrated(X)  # A warning would fail the test.
    verdict = keras_qat.verify(qat, keras_qat.export_tflite(qat), X).verdict
    assert verdict.is_good and not caplog.messages
