"""What users of the finished model wait for: `predict` in both runtimes, and training steps.

    python -m benchmarks.waiting                      eleven networks
    python -m benchmarks.waiting lstm gru --turns 20
    python -m benchmarks.waiting ds_cnn conv1d --job  the whole job instead

CPU time against the float model. All forms of a network run in one process, in random order in
each turn, and a ratio is the median over the turns. For one thread, set TF_NUM_INTRAOP_THREADS=1
and TF_NUM_INTEROP_THREADS=1.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

import keras_qat
from benchmarks import markdown
from benchmarks.networks import ds_cnn
from benchmarks.step_mechanisms import BATCH, conv1d, count_seconds, of_applications, transformer
from benchmarks.step_time import functions
from keras_qat.keras2.backend import keras

layers = keras.layers
EXAMPLES, EPOCHS = 2048, 5
"""Of the whole job."""
COLUMNS = ("network", "step", "first predict", "predict, auto", "predict, tensorflow", "obstacle")


def recurrent(layer: Any) -> Any:
    """Two layers of 64 units over 64 steps of 32 features."""
    inputs = keras.Input((64, 32))
    x = layer(64)(layer(64, return_sequences=True)(inputs))
    return keras.Model(inputs, layers.Dense(6, activation="softmax")(x))


def vision_transformer() -> Any:
    """Four blocks of 64 patches with 64 features."""
    image = keras.Input((32, 32, 3))
    x = layers.Reshape((64, 64))(layers.Conv2D(64, 4, strides=4)(image))
    x = layers.Add()([x, layers.Embedding(64, 64)(np.arange(64)[None])])
    for _ in range(4):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 16)(y, y)])
        y = layers.Dense(128, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(64)(y)])
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(image, layers.Dense(10, activation="softmax")(x))


def u_net() -> Any:
    """Two levels of convolutions down and up again, of 64x64 pixels."""

    def convolve(x: Any, filters: int) -> Any:
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
            x = layers.ReLU()(layers.BatchNormalization()(x))
        return x

    image = keras.Input((64, 64, 3))
    first = convolve(image, 16)
    second = convolve(layers.MaxPooling2D()(first), 32)
    x = convolve(layers.MaxPooling2D()(second), 64)
    x = layers.Concatenate()([layers.Conv2DTranspose(32, 2, strides=2)(x), second])
    x = layers.Conv2DTranspose(16, 2, strides=2)(convolve(x, 32))
    x = convolve(layers.Concatenate()([x, first]), 16)
    return keras.Model(image, layers.Conv2D(4, 1, activation="softmax")(x))


NETWORKS: dict[str, Callable[[], Any]] = {
    "MobileNetV2": of_applications("MobileNetV2", 96),
    "MobileNet": of_applications("MobileNet", 96),
    "ResNet50": of_applications("ResNet50", 64),
    "EfficientNetB0": of_applications("EfficientNetB0", 96),
    "u_net": u_net,
    "conv1d": conv1d,
    "ds_cnn": lambda: ds_cnn((49, 10, 1)),
    "transformer": transformer,
    "vision_transformer": vision_transformer,
    "lstm": partial(recurrent, layers.LSTM),
    "gru": partial(recurrent, layers.GRU),
}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="networks; all by default")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--batches", type=int, default=8, help="batches of each `predict`")
    parser.add_argument("--job", action="store_true", help="measure the whole job")
    options = parser.parse_args()
    if options.job:
        for name in options.names or NETWORKS:
            print(name, measure_job(NETWORKS[name]), flush=True)
        return
    widths = [max(len(title), 18) for title in COLUMNS]
    print(markdown.head(COLUMNS, widths), flush=True)
    for name in options.names or NETWORKS:
        row = measure(NETWORKS[name](), options.turns, options.batches)
        print(markdown.row((name, *row), widths), flush=True)


def measure(model: Any, turns: int, batches: int) -> list[str]:
    """Returns the ratios of a network, and why the interpreter does not run it."""
    x, y = draw(model, BATCH * batches)
    qat = keras_qat.quantize_model(model)
    first = (x[:BATCH], y[:BATCH])
    forms = {"float": model, "int8": qat}
    steps = {form: functions(one, first, jit_compile=False)[0] for form, one in forms.items()}
    ratios = [compare(steps, turns, warm_up=24)]
    predicts = {form: partial(one.predict, x, BATCH, 0) for form, one in forms.items()}
    seconds = {form: count_seconds(call) for form, call in predicts.items()}
    ratios.append(seconds["int8"] / seconds["float"])
    ratios.append(compare(predicts, turns, warm_up=8))
    inference: Any = qat.exact_inference()
    obstacle = inference.file.obstacle
    qat.runtime = "tensorflow"
    ratios.append(compare(predicts, turns, warm_up=8))
    return [*(f"{ratio:.2f}" for ratio in ratios), obstacle]


def measure_job(build: Callable[[], Any]) -> dict[str, float]:
    """Returns the CPU seconds of each step of the whole job, and the ratio."""
    model = build()
    x, y = draw(model, EXAMPLES)
    train(build(), x[:BATCH], y[:BATCH], [])  # TensorFlow starts.
    start = keras.models.clone_model(model)
    seconds = {"float": count_seconds(partial(train, start, x, y, []))}
    made: list[Any] = []
    seconds["quantize_model"] = count_seconds(lambda: made.append(keras_qat.quantize_model(model)))
    (qat,) = made
    epoch, callbacks = EXAMPLES // BATCH, keras_qat.callbacks
    given = [callbacks.QuantDelay(epoch), callbacks.FreezeBatchNorm(3 * epoch)]
    seconds["fit"] = count_seconds(partial(train, qat, x, y, given))
    seconds["export_tflite"] = count_seconds(lambda: made.append(keras_qat.export_tflite(qat)))
    seconds["verify"] = count_seconds(partial(keras_qat.verify, qat, made[1], x))
    ratio = sum(seconds.values()) / seconds["float"] - 1.0
    return {name: round(value, 2) for name, value in {**seconds, "ratio": ratio}.items()}


def train(model: Any, x: np.ndarray, y: np.ndarray, callbacks: list[Any]) -> None:
    """Trains five epochs."""
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x, y, BATCH, EPOCHS, verbose=0, callbacks=callbacks)


def draw(model: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Random inputs and labels."""
    generator, shape = np.random.default_rng(1), (count, *model.input_shape[1:])
    x = generator.uniform(-1, 1, shape) if len(shape) > 2 else generator.integers(0, 1000, shape)
    labels = generator.integers(0, model.output_shape[-1], (count, *model.output_shape[1:-1]))
    return x.astype(model.inputs[0].dtype.as_numpy_dtype), labels


def compare(calls: Mapping[str, Callable[[], Any]], turns: int, warm_up: int) -> float:
    """Returns the median ratio of "int8" to "float"."""
    for call in calls.values():
        for _ in range(warm_up):
            call()
    ratios = []
    for turn in range(turns):
        order = random.Random(turn).sample(list(calls), len(calls))
        seconds = {form: count_seconds(calls[form]) for form in order}
        ratios.append(seconds["int8"] / seconds["float"])
    return statistics.median(ratios)


if __name__ == "__main__":
    main()
