"""The models that the time benchmarks measure, and the forms in which they are trained."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import keras_qat
from keras_qat.keras2.backend import keras

__all__ = ["BATCH", "SIZE", "VARIANTS", "batch", "build", "has_tfmot"]

TUTORIALS = Path(__file__).parent.parent / "tutorials"
SIZE = 96
BATCH = 16
CLASSES = 10


def build(name: str) -> Any:
    """A float model with random weights: of `keras.applications`, or the network of the demo."""
    keras.utils.set_random_seed(1)
    if name == "demo":
        sys.path.insert(0, str(TUTORIALS))
        demo: Any = importlib.import_module("demo")
        return demo.build((28, 28, 1), CLASSES)
    constructor = getattr(keras.applications, name)
    return constructor(weights=None, input_shape=(SIZE, SIZE, 3), classes=CLASSES)


def batch(model: Any) -> tuple[np.ndarray, np.ndarray]:
    """Random images and labels."""
    images = np.random.default_rng(1).uniform(-1, 1, (BATCH, *model.input_shape[1:]))
    return images.astype(np.float32), np.arange(BATCH) % CLASSES


def _tfmot(model: Any) -> Any:
    import tensorflow_model_optimization as tfmot

    return tfmot.quantization.keras.quantize_model(model)


def _frozen(model: Any) -> Any:
    qat = keras_qat.quantize_model(model)
    qat.compile("sgd", "sparse_categorical_crossentropy")
    qat.fit(*batch(model), batch_size=BATCH, verbose=0)  # The ranges of training, not of inference.
    keras_qat.freeze_ranges(qat)
    return qat


VARIANTS: dict[str, Callable[[Any], Any]] = {
    "float": lambda model: model,
    "int8": lambda model: keras_qat.quantize_model(model, "int8"),
    "frozen": _frozen,
    "contrib": lambda model: keras_qat.quantize_model(model, "contrib"),
    "tfmot": _tfmot,
}
"""Name of a form -> what makes it of a float model: "frozen" is int8 with frozen ranges. tfmot
refuses some models with an error."""


def has_tfmot() -> bool:
    """Whether tensorflow_model_optimization is installed."""
    return importlib.util.find_spec("tensorflow_model_optimization") is not None
