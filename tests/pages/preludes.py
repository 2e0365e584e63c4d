"""Defines what pages mean by "your model" and "your data": names that their programs use.

Pages that are not listed define all names.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_qat
from tests.helpers import keras, layers, quantize_on

Names = dict[str, Any]


def make_model() -> Any:
    """Returns a classifier of 8x8 images."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1), name="image"),
            layers.Conv2D(4, 3, use_bias=False, name="conv"),
            layers.BatchNormalization(name="conv_bn"),
            layers.ReLU(name="conv_relu"),
            layers.Flatten(name="flatten"),
            layers.Dense(3, name="logits"),
        ]
    )


def data() -> Names:
    """Returns random images and labels, and the imports of every page."""
    numbers = np.random.default_rng(0)
    x = numbers.uniform(size=(48, 8, 8, 1)).astype(np.float32)
    y = numbers.integers(0, 3, 48)
    return {
        "np": np,
        "tf": tf,
        "keras": keras,
        "keras_qat": keras_qat,
        "x_train": x[:32],
        "y_train": y[:32],
        "x_test": x[32:],
        "y_test": y[32:],
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "make_model": make_model,
    }


def float_model() -> Names:
    return data() | {"model": make_model()}


def calibrated() -> Names:
    """Returns a float model, and the quantization-aware model with ranges."""
    names = float_model()
    qat = quantize_on(names["model"], names["x_train"])
    return names | {"qat": qat}


def compiled() -> Names:
    """Returns compiled models, to train on batches that never end."""
    names = calibrated()
    names["qat"].compile("sgd", names["loss"])
    batches = tf.data.Dataset.from_tensor_slices((names["x_train"], names["y_train"])).batch(8)
    return names | {"batches": batches, "stream": batches.repeat(), "steps_per_epoch": 2}


def own_layers() -> Names:
    class MyDense(layers.Dense):
        pass

    class ChannelShuffle(layers.Layer):
        def call(self, x: Any) -> Any:
            return tf.concat([x[..., ::2], x[..., 1::2]], -1)

    class MySoftmax(layers.Layer):
        dim = -1

    own = (MyDense, ChannelShuffle, MySoftmax)
    normalized = [layers.LayerNormalization(), layers.GroupNormalization(2)]
    model = keras.Sequential([keras.Input((8, 8, 4)), *normalized])
    return data() | {"model": model} | {name.__name__: name for name in own}


def of_keras_3() -> Names:
    """Returns a model of Keras 3, saved."""
    keras_3 = pytest.importorskip("keras")
    model = keras_3.Sequential([keras_3.Input((8, 8, 1)), keras_3.layers.Flatten()])
    model.add(keras_3.layers.Dense(3, activation="softmax"))
    model.save("model.keras")
    return data()


def for_micro() -> Names:
    """Skips pages about microcontrollers if TFLite Micro is missing."""
    pytest.importorskip("tflite_micro")
    return float_model()


def with_litert() -> Names:
    """Skips pages that run files if there is no interpreter."""
    pytest.importorskip("ai_edge_litert")
    return calibrated()


PAGES: dict[Callable[[], Names], str] = {
    compiled: "bits calibrate choosing coming-from-tfmot distribution training",
    for_micro: "boards streaming targets",
    calibrated: "accuracy-drops export reading simulate",
    with_litert: "feeding phones serving",
    float_model: "index skip",
    of_keras_3: "keras-3",
    own_layers: "layers",
    data: "recurrent",
}
PRELUDES = {f"docs/{page}.md": make for make, pages in PAGES.items() for page in pages.split()}
