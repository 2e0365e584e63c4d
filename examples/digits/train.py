"""Trains a float network, then trains it further with quantization."""

from pathlib import Path

import tf_keras as keras
from data import TRAIN, VALIDATION, load
from tf_keras import layers

import keras_qat

EPOCHS, QAT_EPOCHS, BATCH = 20, 5, 32


def build_model() -> keras.Model:
    """Returns a small convolutional network."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1), name="image"),
            layers.Conv2D(16, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.DepthwiseConv2D(3, strides=2, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Conv2D(32, 1, activation="relu"),
            layers.Flatten(),
            layers.Dense(10, activation="softmax", name="digit"),
        ]
    )


def main() -> None:
    """Trains, and saves the quantization-aware model."""
    x, y = load(TRAIN)
    validation = load(VALIDATION)
    keras.utils.set_random_seed(0)
    model = build_model()
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0)
    print(f"float: {100 * model.evaluate(*validation, verbose=0)[1]:.1f} %")

    print(keras_qat.plan(model, target="tflm"))
    qat = keras_qat.quantize_model(model, target="tflm")
    qat.compile(keras.optimizers.Adam(1e-4), model.loss, metrics=["accuracy"])
    steps = -(-len(x) // BATCH)
    callbacks = [
        keras_qat.callbacks.QuantDelay(steps),
        keras_qat.callbacks.FreezeBatchNorm(3 * steps),
    ]
    qat.fit(x, y, batch_size=BATCH, epochs=QAT_EPOCHS, verbose=0, callbacks=callbacks)
    print(f"int8: {100 * qat.evaluate(*validation, verbose=0)[1]:.1f} %")
    Path("build").mkdir(exist_ok=True)
    qat.save("build/digits.keras")


if __name__ == "__main__":
    main()
