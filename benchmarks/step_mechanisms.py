"""What each mechanism for fast training steps is worth: steps with one of them switched off.

    python -m benchmarks.step_mechanisms                        five networks
    python -m benchmarks.step_mechanisms ds_cnn --turns 60

CPU time of a step of Adam with 16 examples, against a float step. All forms of a network are
trained in one process. In each turn every form runs four steps, in random order, and the least of
the last three counts. A ratio is the median over the turns. For one thread, set
TF_NUM_INTRAOP_THREADS=1 and TF_NUM_INTEROP_THREADS=1.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

import keras_qat
from benchmarks import markdown
from benchmarks.networks import ds_cnn
from keras_qat.arithmetic import fake_quant
from keras_qat.keras2.backend import keras
from keras_qat.training import phase_graphs
from keras_qat.training.fake_quantization import activation_quantizer
from keras_qat.training.steps import optimizers, step_tensors

BATCH = 16
layers = keras.layers
Quantizer = activation_quantizer.ActivationQuantizer


def conv1d() -> Any:
    """Five convolutions over 256 steps."""
    image = x = keras.Input((256, 3))
    for filters, strides in ((32, 2), (64, 2), (64, 1), (128, 2), (128, 1)):
        x = layers.Conv1D(filters, 5, strides=strides, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(image, layers.Dense(6, activation="softmax")(x))


def transformer() -> Any:
    """Two blocks of 64 tokens with 64 features."""
    tokens = keras.Input((64,), dtype="int32")
    x = layers.Embedding(1000, 64)(tokens)
    for _ in range(2):
        attended = layers.MultiHeadAttention(4, 16)(x, x)
        x = layers.LayerNormalization()(layers.Add()([x, attended]))
        y = layers.Dense(64)(layers.Dense(128, activation="gelu")(x))
        x = layers.LayerNormalization()(layers.Add()([x, y]))
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(tokens, layers.Dense(4, activation="softmax")(x))


def of_applications(name: str, size: int) -> Callable[[], Any]:
    """A constructor of a network of `keras.applications` for images of a size."""
    constructor = getattr(keras.applications, name)
    return lambda: constructor(weights=None, input_shape=(size, size, 3), classes=10)


NETWORKS: dict[str, Callable[[], Any]] = {
    "ds_cnn": lambda: ds_cnn((49, 10, 1)),
    "conv1d": conv1d,
    "transformer": transformer,
    "MobileNetV2": of_applications("MobileNetV2", 96),
    "ResNet50": of_applications("ResNet50", 48),
}
OFF: dict[str, tuple[Any, str, Any]] = {
    "joined updates": (optimizers, "update_together", lambda optimizer, pairs: pairs),
    "joined weights": (step_tensors, "_quantize_weights", lambda layers: {}),
    "joined averages": (step_tensors, "_count_batches", lambda layers: {}),
    "ReLU in the quantizer": (Quantizer, "clips_at_zero", False),
    "products again": (activation_quantizer, "find_source", lambda x: None),
    "blocks of columns": (fake_quant, "LARGE", 2**60),
    "steps without reading": (phase_graphs, "is_undisturbed", lambda *_: False),
    "frozen": (phase_graphs, "MOST_RANGES", phase_graphs.MOST_RANGES),
    "frozen, no constants": (phase_graphs, "MOST_RANGES", 0),
}
"""Mechanism -> the attribute that switches it off."""


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="networks; all five by default")
    parser.add_argument("--turns", type=int, default=20)
    options = parser.parse_args()
    forms = ["float", "int8", *OFF]
    widths = [12, *[max(len(form), 6) for form in forms]]
    print(markdown.head(("network", *forms), widths), flush=True)
    for name in options.names or NETWORKS:
        steps = {form: prepare(name, form) for form in forms}
        times: dict[str, list[float]] = {form: [] for form in forms}
        for turn in range(options.turns):
            for form in random.Random(turn).sample(forms, len(forms)):
                times[form].append(min([count_seconds(steps[form]) for _ in range(4)][1:]))
        ratios = [
            statistics.median(np.divide(times[form], times["float"]).tolist()) for form in forms
        ]
        print(markdown.row((name, *(f"{ratio:.2f}" for ratio in ratios)), widths), flush=True)


def prepare(name: str, form: str) -> Callable[[], Any]:
    """A training step of a form, which is traced already."""
    keras.utils.set_random_seed(1)
    model = NETWORKS[name]()
    draw, shape = np.random.default_rng(1), (BATCH, *model.input_shape[1:])
    x = draw.uniform(-1, 1, shape) if len(shape) > 2 else draw.integers(0, 1000, shape)
    x, y = x.astype(model.inputs[0].dtype.as_numpy_dtype), np.arange(BATCH) % model.output_shape[-1]
    off = mock.patch.object(*OFF[form]) if form in OFF else contextlib.nullcontext()
    with off:
        if form != "float":
            model = keras_qat.quantize_model(model)
        model.compile("adam", "sparse_categorical_crossentropy")
        if form.startswith("frozen"):
            model.fit(x, y, batch_size=BATCH, verbose=0)
            keras_qat.freeze_ranges(model)
        batches = iter(tf.data.Dataset.from_tensors((x, y)).repeat())
        train = model.make_train_function()
        object.__setattr__(model, "undisturbed", form != "steps without reading")
        for _ in range(24 if form == "steps without reading" else 4):
            train(batches)
    return lambda: train(batches)


def count_seconds(step: Callable[[], Any]) -> float:
    """The CPU time of a step."""
    start = time.process_time()
    step()
    return time.process_time() - start


if __name__ == "__main__":
    main()
