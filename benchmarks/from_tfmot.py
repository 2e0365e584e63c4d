"""Takes a network over that tfmot trained: accuracy of both libraries' files, and how they agree.

    python -m benchmarks.from_tfmot

Three residual networks on scikit-learn's handwritten digits, each with other random weights: 30
epochs in float, 20 with tfmot's quantization. Needs tensorflow-model-optimization.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter
from sklearn.datasets import load_digits

import keras_qat
from keras_qat.keras2.backend import keras

layers = keras.layers
TRAINED = 1200
SEEDS = 3


def build() -> Any:
    """Makes a network with a depthwise convolution, BatchNormalization and a sum."""
    image = keras.Input((8, 8, 1), name="image")
    start = layers.Conv2D(12, 3, padding="same", activation="relu", name="stem")(image)
    inner = layers.DepthwiseConv2D(3, padding="same", use_bias=False, name="depthwise")(start)
    inner = layers.ReLU(6.0, name="relu6")(layers.BatchNormalization(name="norm")(inner))
    inner = layers.Conv2D(12, 1, use_bias=False, name="project")(inner)
    inner = layers.BatchNormalization(name="project_norm")(inner)
    merged = layers.ReLU(name="merged")(layers.Add(name="add")([inner, start]))
    features = layers.Flatten(name="flatten")(layers.MaxPooling2D(name="pool")(merged))
    return keras.Model(image, layers.Dense(10, "softmax", name="logits")(features), name="digits")


def classes(contents: bytes, x: np.ndarray) -> np.ndarray:
    """Returns the class that a file gives each example."""
    interpreter = Interpreter(model_content=contents)
    (taken,), (given,) = interpreter.get_input_details(), interpreter.get_output_details()
    interpreter.resize_tensor_input(taken["index"], x.shape)
    interpreter.allocate_tensors()
    if taken["dtype"] == np.int8:
        scale, zero_point = taken["quantization"]
        x = np.clip(np.rint(x / scale) + zero_point, -128, 127).astype(np.int8)
    interpreter.set_tensor(taken["index"], x)
    interpreter.invoke()
    return np.asarray(interpreter.get_tensor(given["index"])).argmax(-1)


def main() -> None:
    """Trains, converts and prints the table."""
    import tensorflow_model_optimization as tfmot

    x, y = load_digits(return_X_y=True)
    x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
    unseen, labels = x[TRAINED:], y[TRAINED:]
    print("seed  float  tfmot's file  from_tfmot's file  same class  bytes: tfmot, from_tfmot")
    for seed in range(SEEDS):
        keras.utils.set_random_seed(seed)
        model = build()
        model.compile("adam", "sparse_categorical_crossentropy")
        model.fit(x[:TRAINED], y[:TRAINED], epochs=30, verbose=0)
        theirs = tfmot.quantization.keras.quantize_model(model)
        theirs.compile("adam", "sparse_categorical_crossentropy")
        theirs.fit(x[:TRAINED], y[:TRAINED], epochs=20, verbose=0)
        converter = tf.lite.TFLiteConverter.from_keras_model(theirs)
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        files = converter.convert(), keras_qat.export_tflite(keras_qat.from_tfmot(theirs))
        answers = [
            model.predict(unseen, verbose=0).argmax(-1),
            *(classes(f, unseen) for f in files),
        ]
        in_float, before, after = (100 * np.mean(answer == labels) for answer in answers)
        same = 100 * np.mean(answers[1] == answers[2])
        print(
            f"{seed:>4}  {in_float:>5.2f}  {before:>12.2f}  {after:>17.2f}  {same:>10.2f}  "
            f"{len(files[0]):>12}, {len(files[1])}"
        )


if __name__ == "__main__":
    main()
