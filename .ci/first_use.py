"""What a new user does with an installed package: from a float model to a verified file."""

import json
import subprocess
import sys

import numpy as np
import tf_keras as keras

import keras_qat

x = np.random.default_rng(0).normal(size=(32, 8, 8, 1)).astype("float32")
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(4, 3, use_bias=False),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.Flatten(),
        keras.layers.Dense(3, activation="softmax"),
    ]
)
qat = keras_qat.quantize_model(model)
qat.compile("sgd", "sparse_categorical_crossentropy")
qat.fit(x, np.arange(32) % 3, verbose=0)
qat.save("qat.keras")
keras_qat.export_tflite(qat, "model.tflite")
assert keras_qat.verify(qat, "model.tflite", x).identical == 1

np.save("x.npy", x)
command = ["keras-qat", "verify", "qat.keras", "model.tflite", "x.npy", "--json"]
told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
assert json.loads(told)["identical"] == 1
print(f"Python {sys.version.split()[0]}: keras_qat {keras_qat.__version__} works")
