"""Classifiers and an autoencoder of scikit-learn's handwritten digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import keras_qat
from benchmarks.digit_networks import autoencoder, data, fit, softmax, trained
from benchmarks.verdicts.cases import CASES, Case, Entry, calibrated, exported
from keras_qat import recipes
from keras_qat.analysis.verify.verdict import GOOD, OTHER, POOR
from keras_qat.keras2.backend import keras

layers = keras.layers


def case(qat: Any, file_of: Any = None, **options: Any) -> Case:
    """Returns the model with its file, or with the file of another model."""
    return exported(qat, data().x_test, data().y_test, file_of, **options)


def pictures(images: np.ndarray) -> Case:
    """Returns the autoencoder with ranges from images."""
    qat = calibrated(autoencoder(), images)
    return exported(qat, data().x_test, data().x_test)


def _healthy() -> dict[str, Callable[[], Case]]:
    """Models that do what their float model does."""
    x, y = data().x_train, data().y_train

    def plain(name: str, recipe: Any = "int8", **options: Any) -> Case:
        return case(calibrated(trained(name), x[:200], recipe, **options))

    def fine_tuned(name: str, recipe: Any, epochs: int = 6, **options: Any) -> Case:
        qat = calibrated(trained(name), x[:200], recipe, method="mse")
        return case(fit(qat, x, y, epochs, 1e-3), **options)

    def images() -> Case:
        return pictures(x[:200])

    def probabilities() -> Case:
        return case(calibrated(softmax(), x[:200]))

    def pixels(**options: Any) -> Case:
        qat = calibrated(trained("from pixels"), 255 * x[:200])
        return Case(
            qat, keras_qat.export_tflite(qat, **options), 255 * data().x_test, data().y_test
        )

    def corrected() -> Case:
        qat = calibrated(trained("MobileNetV2"), x[:200])
        keras_qat.bias_correction(qat, x[:200])
        return case(qat)

    def symmetric() -> Case:
        """The same network behind images of -1 to 1."""
        image = keras.Input((16, 16, 1), name="image")
        model = keras.Model(image, trained("LeNet")(layers.Rescaling(0.5, 0.5)(image)))
        qat = calibrated(model, 2 * x[:200] - 1)
        return Case(qat, keras_qat.export_tflite(qat), 2 * data().x_test - 1, data().y_test)

    return {
        "LeNet, calibrated": lambda: plain("LeNet"),
        "ResNet-20, calibrated": lambda: plain("ResNet-20"),
        "MobileNetV2, calibrated": lambda: plain("MobileNetV2"),
        "DS-CNN, percentiles": lambda: plain("DS-CNN", method="percentile"),
        "ResNet-20, fine-tuned": lambda: fine_tuned("ResNet-20", "int8"),
        "LeNet, contrib, fine-tuned": lambda: fine_tuned(
            "LeNet", recipes.contrib(symmetric=True), input_range=(0.0, 1.0)
        ),
        "LeNet, weights of 4 bits, fine-tuned": lambda: fine_tuned("LeNet", recipes.int4_weights()),
        "LeNet, weights of 2 bits, fine-tuned": lambda: fine_tuned("LeNet", recipes.low_bits(2, 8)),
        "ResNet-20, contrib, fine-tuned": lambda: fine_tuned(
            "ResNet-20", recipes.contrib(symmetric=True), input_range=(0.0, 1.0)
        ),
        "ResNet-20, 4 bits, fine-tuned": lambda: fine_tuned("ResNet-20", recipes.low_bits(4, 4)),
        "DS-CNN, int16x8": lambda: plain("DS-CNN", "int16x8"),
        "MobileNetV2, probabilities": probabilities,
        "autoencoder": images,
        "LSTM": lambda: plain("recurrent"),
        "dense, LayerNormalization in float": lambda: plain("normalized"),
        "a number beside features": lambda: plain("gated"),
        "LeNet, mean squared error": lambda: plain("LeNet", method="mse"),
        "LeNet, one example at a time, uint8": lambda: case(
            calibrated(trained("LeNet"), x[:200]), batch_size=1, input_dtype="uint8"
        ),
        "MobileNetV2, bias correction": corrected,
        "pixels, Rescaling inside": pixels,
        "pixels, bytes": lambda: pixels(input_dtype="uint8"),
        "LeNet, images of -1 to 1": symmetric,
        "GRU": lambda: plain("gru"),
        "causal attention": lambda: plain("attentive"),
    }


def _announced() -> dict[str, Callable[[], Case]]:
    """Models that are good, and of which something has to be said."""

    def rounded_again() -> Case:
        """TFLite has no zero points for weights."""
        qat = calibrated(trained("LeNet"), data().x_train[:200], "contrib", method="mse")
        fit(qat, data().x_train, data().y_train, 6, 1e-3)
        return case(qat, input_range=(0.0, 1.0))

    def packed() -> Case:
        """The kernels of packed weights sum in other steps than those of bytes."""
        qat = calibrated(trained("LeNet"), data().x_train[:200], "int4_weights", method="mse")
        fit(qat, data().x_train, data().y_train, 6, 1e-3)
        return case(qat, pack_int4=True)

    return {
        "LeNet, contrib, asymmetric weights, fine-tuned": rounded_again,
        "LeNet, packed weights of 4 bits, fine-tuned": packed,
    }


def _broken() -> dict[str, tuple[str, Callable[[], Case]]]:
    """Models that were broken on purpose -> the verdict, and the model."""
    x = data().x_train

    def with_data(name: str, images: np.ndarray, recipe: Any = "int8") -> Case:
        return case(calibrated(trained(name), images, recipe))

    def with_outlier() -> Case:
        images = x[:200].copy()
        images[0, 0, 0] = 1000.0
        return with_data("DS-CNN", images)

    def with_weights(name: str, change: Callable[[Any], None]) -> Case:
        model = keras.models.clone_model(trained(name))
        model.set_weights(trained(name).get_weights())
        change(model)
        return case(calibrated(model, x[:200]))

    def without_statistics(model: Any) -> None:
        for layer in model.layers:
            if isinstance(layer, layers.BatchNormalization):
                layer.moving_mean.assign(tf.zeros_like(layer.moving_mean))
                layer.moving_variance.assign(tf.ones_like(layer.moving_variance))

    def dead(model: Any) -> None:
        dense = [layer for layer in model.layers if isinstance(layer, layers.Dense)][1]
        dense.bias.assign(tf.fill(dense.bias.shape, -100.0))

    def later_weights() -> Case:
        model = trained("LeNet")
        qat = calibrated(model, x[:200])
        for layer in qat.layers:
            for inner in getattr(layer, "sublayers", []):
                if isinstance(inner, layers.Conv2D):
                    inner.kernel.assign(20.0 * inner.kernel)
        return case(qat)

    def missing() -> Case:
        """Missing pixels are -999, which the model replaces by zero."""
        inner = trained("LeNet")
        image = keras.Input((16, 16, 1), name="image")
        model = keras.Model(image, inner(layers.ReLU()(image)))
        images, tests = x[:200].copy(), data().x_test.copy()
        images[:, :2], tests[:, :2] = -999.0, -999.0
        qat = calibrated(model, images)
        return Case(qat, keras_qat.export_tflite(qat), tests, data().y_test)

    def other(name: str, **options: Any) -> Case:
        qat = calibrated(trained(name), x[:200])
        return case(qat, calibrated(trained(name, **options), x[:200]))

    def converted() -> Case:
        qat = calibrated(trained("LeNet"), x[:200])
        file = tf.lite.TFLiteConverter.from_keras_model(trained("LeNet")).convert()
        return Case(qat, file, data().x_test, data().y_test)

    return {
        "LeNet, calibrated with 0..255": (POOR, lambda: with_data("LeNet", 255 * x[:200])),
        "ResNet-20, calibrated with uint8": (
            POOR,
            lambda: with_data("ResNet-20", (255 * x[:200]).astype(np.uint8)),
        ),
        "MobileNetV2, calibrated with zeros": (
            POOR,
            lambda: with_data("MobileNetV2", 0 * x[:200]),
        ),
        "DS-CNN, one outlier": (POOR, with_outlier),
        "autoencoder, calibrated with 0..255": (
            POOR,
            lambda: pictures(255 * x[:200]),
        ),
        "LeNet, one pale example": (POOR, lambda: with_data("LeNet", 0.1 * x[:1])),
        "ResNet-20, no BatchNormalization statistics": (
            POOR,
            lambda: with_weights("ResNet-20", without_statistics),
        ),
        "LeNet, dead layer": (POOR, lambda: with_weights("LeNet", dead)),
        "MobileNetV2, 2 bits": (
            POOR,
            lambda: with_data("MobileNetV2", x[:200], recipes.low_bits(2, 2)),
        ),
        "LeNet, missing pixels are -999": (POOR, missing),
        "LeNet, weights changed after calibration": (POOR, later_weights),
        "a large number beside features": (
            POOR,
            lambda: with_data("gated, large number", x[:200]),
        ),
        "LeNet, file of another seed": (OTHER, lambda: other("LeNet", seed=1)),
        "ResNet-20, file of an earlier epoch": (OTHER, lambda: other("ResNet-20", epochs=3)),
        "LeNet, file in float": (OTHER, converted),
    }


def _register() -> None:
    for name, make in _healthy().items():
        CASES[name] = Entry(GOOD, make, "digits")
    for name, make in _announced().items():
        CASES[name] = Entry(GOOD, make, "digits", is_announced=True)
    for name, (truth, make) in _broken().items():
        CASES[name] = Entry(truth, make, "digits")


_register()
