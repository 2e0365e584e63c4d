"""Find the step that a difficult network needs with `keras_qat.tune`: seconds on a CPU.

    python tutorials/tune_digits.py

The network reads handwritten digits and the brightness of the picture. Its one output holds a
brightness of up to 2000 lux beside scores from 0 to 1, so one range for all of them leaves no
steps for the scores. `tune` tries one step after another, keeps what helps, and stops when the
file is as accurate as asked.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from demo_data import digits

import keras_qat
from keras_qat.keras2.backend import keras

layers = keras.layers
LUX = 2000


def make_network() -> keras.Model:
    """Return the network."""
    image = keras.Input((8, 8, 1), name="image")
    x = layers.Conv2D(24, 3, padding="same", activation="relu")(image)
    depthwise = layers.DepthwiseConv2D(3, padding="same", activation="relu", name="depthwise")
    pointwise = layers.Conv2D(32, 1, activation="relu", name="pointwise")
    x = layers.Flatten()(layers.MaxPooling2D()(pointwise(depthwise(x))))
    scores = layers.Dense(10, "softmax", name="scores")(x)
    light = layers.Rescaling(LUX, name="light")(layers.Dense(1)(x))
    return keras.Model(image, layers.Concatenate(name="outputs")([light, scores]))


def measure_loss(y: np.ndarray, outputs: np.ndarray) -> object:
    """Return the loss of the brightness and of the scores."""
    return keras.losses.mse(y[:, :1] / LUX, outputs[:, :1] / LUX) + (
        keras.losses.categorical_crossentropy(y[:, 1:], outputs[:, 1:])
    )


def measure_accuracy(y: np.ndarray, outputs: np.ndarray) -> float:
    """Return the share of digits that were read correctly."""
    return float(np.mean(y[:, 1:].argmax(-1) == outputs[:, 1:].argmax(-1)))


def run(folder: Path, epochs: int = 20) -> tuple[keras_qat.TuneResult, keras_qat.Report]:
    """Train the float network, tune, and write and verify the file."""
    data = digits()
    x = np.concatenate([data.x_train, data.x_test])
    labels = np.eye(10)[np.concatenate([data.y_train, data.y_test])]
    y = np.column_stack([LUX * x.mean((1, 2, 3)), labels]).astype("float32")
    train, validation, test = (slice(0, 1000), slice(1000, 1400), slice(1400, None))

    keras.utils.set_random_seed(1)
    model = make_network()
    model.compile(keras.optimizers.Adam(3e-3), measure_loss)
    model.fit(x[train], y[train], epochs=epochs, verbose=0)

    result = keras_qat.tune(
        model,
        (x[train], y[train]),
        (x[validation], y[validation]),
        metric=measure_accuracy,
        max_drop=0.5,
    )
    print(result)
    contents = result.export(folder / "digits.tflite")
    report = keras_qat.verify(result.model, contents, x[test])
    in_float = measure_accuracy(y[test], model.predict(x[test], verbose=0))
    tuned = measure_accuracy(y[test], result.model.predict(x[test], verbose=0))
    print(f"On test images: {in_float:.1%} in float, {tuned:.1%} tuned; {report.identical:.0%} of")
    print("the file's outputs are identical to the model's.")
    return result, report


if __name__ == "__main__":
    run(Path())
