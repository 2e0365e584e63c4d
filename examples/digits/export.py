"""Exports the trained model, and verifies that the file computes the same."""

import sys

import tf_keras as keras
from data import TEST, load

import keras_qat


def main() -> None:
    """Writes the file; exits with 1 if it does not compute what the model computes."""
    qat = keras.models.load_model("build/digits.keras")
    keras_qat.export_tflite(qat, "build/digits.tflite")
    report = keras_qat.verify(qat, "build/digits.tflite", load(TEST)[0], kernels="reference")
    print(report)
    if report.identical < 1:
        sys.exit("build/digits.tflite differs from the model.")


if __name__ == "__main__":
    main()
