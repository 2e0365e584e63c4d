"""Small networks of many kinds, trained on scikit-learn's handwritten digits: see `verdicts`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tutorials"))

from demo_data import Data, digits

from benchmarks.networks import NETWORKS
from keras_qat.keras2.backend import keras

layers = keras.layers
BATCH = 32


@functools.cache
def data() -> Data:
    """The digits, 16x16 pixels."""
    images = digits()
    x_train, x_test = (x.repeat(2, 1).repeat(2, 2) for x in (images.x_train, images.x_test))
    return Data(x_train, images.y_train, x_test, images.y_test)


def fit(model: Any, x: Any, y: Any, epochs: int, rate: float = 3e-3, loss: Any = None) -> Any:
    """Trains a model."""
    steps = epochs * -(-len(x) // BATCH)
    model.compile(
        keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(rate, steps)),
        loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(x, y, BATCH, epochs, verbose=0)
    return model


@functools.cache
def trained(name: str, seed: int = 0, epochs: int = 12) -> Any:
    """A network of `benchmarks.networks`, or one of the builders below, trained in float."""
    keras.utils.set_random_seed(seed)
    build = BUILDERS.get(name) or functools.partial(NETWORKS[name], (16, 16, 1))
    x = data().x_train * (255.0 if name == "from pixels" else 1.0)
    return fit(build(), x, data().y_train, epochs)


def gated(ink: float = 1.0) -> Any:
    """Features beside the amount of ink, in units of its own, with a normalization behind both."""
    image = keras.Input((16, 16, 1), name="image")
    x = layers.Conv2D(16, 3, 2, activation="relu")(image)
    x = layers.Flatten()(layers.Conv2D(32, 3, 2, activation="relu")(x))
    x = layers.Dense(16, activation="tanh", name="features")(x)
    amount = layers.Rescaling(ink)(layers.GlobalAveragePooling2D()(image))
    x = layers.BatchNormalization(momentum=0.9)(layers.Concatenate(name="both")([x, amount]))
    return keras.Model(image, layers.Dense(10, name="logits")(x))


def recurrent() -> Any:
    """An LSTM over the rows of an image."""
    image = keras.Input((16, 16, 1), name="image")
    x = layers.LSTM(24)(layers.Reshape((16, 16))(image))
    return keras.Model(image, layers.Dense(10, name="logits")(x))


def normalized() -> Any:
    """Dense layers with a normalization between them, which computes in float."""
    image = keras.Input((16, 16, 1), name="image")
    x = layers.Dense(64, activation="relu")(layers.Flatten()(image))
    x = layers.Dense(32, activation="relu")(layers.LayerNormalization(name="norm")(x))
    return keras.Model(image, layers.Dense(10, name="logits")(x))


def softmax() -> Any:
    """The MobileNetV2 with probabilities."""
    model = trained("MobileNetV2")
    return keras.Model(model.input, layers.Softmax(name="classes")(model.output))


def attentive() -> Any:
    """Attention over the rows of an image, each of which sees those above it."""
    image = keras.Input((16, 16, 1), name="image")
    rows = layers.Dense(24, "relu")(layers.Reshape((16, 16))(image))
    seen = layers.MultiHeadAttention(2, 12)(rows, rows, use_causal_mask=True)
    x = layers.GlobalAveragePooling1D()(layers.Add()([rows, seen]))
    return keras.Model(image, layers.Dense(10, name="logits")(x))


def from_pixels() -> Any:
    """A network that rescales pixels by itself."""
    pixels = keras.Input((16, 16, 1), name="image")
    x = layers.Conv2D(16, 3, 2, activation="relu")(layers.Rescaling(1 / 255)(pixels))
    x = layers.Flatten()(layers.BatchNormalization()(layers.Conv2D(32, 3, 2)(x)))
    return keras.Model(pixels, layers.Dense(10, name="logits")(layers.ReLU()(x)))


def gru() -> Any:
    """A GRU over the rows of an image."""
    image = keras.Input((16, 16, 1), name="image")
    x = layers.GRU(24)(layers.Reshape((16, 16))(image))
    return keras.Model(image, layers.Dense(10, name="logits")(x))


BUILDERS: dict[str, Callable[[], Any]] = {
    "attentive": attentive,
    "from pixels": from_pixels,
    "gru": gru,
    "recurrent": recurrent,
    "normalized": normalized,
    "gated": gated,
    "gated, large number": functools.partial(gated, 1024.0),
}


@functools.cache
def autoencoder() -> Any:
    """A network that returns images, trained in float."""
    keras.utils.set_random_seed(0)
    image = keras.Input((16, 16, 1), name="image")
    x = layers.Conv2D(16, 3, 2, padding="same", activation="relu")(image)
    x = layers.Conv2D(8, 3, 2, padding="same", activation="relu")(x)
    x = layers.UpSampling2D(4)(x)
    model = keras.Model(image, layers.Conv2D(1, 5, padding="same", name="image_out")(x))
    return fit(model, data().x_train, data().x_train, 12, loss="mse")
