"""Pruned weights in TFLite's sparse form: size, size under gzip, and time, beside the usual form.

    python -m benchmarks.sparse_weights

TFLite's converter writes the form; 80 % of the weights of 1x1 convolutions are zero, one by one or
in blocks of input channels. Files take turns, one image each, on one thread; times are those of
the processor.
"""

from __future__ import annotations

import gzip
import statistics
import time
from typing import Any

import numpy as np
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter

import keras_qat
from benchmarks.markdown import head, row
from keras_qat.keras2.backend import keras

layers = keras.layers
SIZE, SHARE, TURNS = 96, 0.8, 60
BLOCKS = {1: "one by one", 4: "blocks of 4", 16: "blocks of 16"}
DENSE = tf.lite.Optimize.DEFAULT
SPARSE = tf.lite.Optimize.EXPERIMENTAL_SPARSITY
TITLES = ("zeros", "file", "kB", "gzip kB", "ms")
WIDTHS = (12, 15, 5, 7, 8)


def build(block: int) -> Any:
    """Makes a network of 190 000 weights, of which zeros come in blocks of input channels.

    It has the form that XNNPACK's sparse kernels ask for: a 3x3 convolution of an image with
    stride 2 and zeros on all sides, then 1x1 and depthwise convolutions, and a mean.
    """
    keras.utils.set_random_seed(0)
    numbers = np.random.default_rng(0)
    image = keras.Input((SIZE, SIZE, 3))
    x = layers.ZeroPadding2D(1)(image)
    x = layers.Conv2D(32, 3, strides=2, activation="relu")(x)
    for number, channels in enumerate((64, 128, 256, 256, 256)):
        if number == 1:
            x = layers.DepthwiseConv2D(3, strides=2, activation="relu")(layers.ZeroPadding2D(1)(x))
        elif number:
            x = layers.DepthwiseConv2D(3, padding="same", activation="relu")(x)
        x = layers.Conv2D(channels, 1, activation="relu", name=f"point_{number}")(x)
    x = layers.GlobalAveragePooling2D(keepdims=True)(x)
    model = keras.Model(image, layers.Conv2D(10, 1, name="logits")(x))
    for layer in model.layers:
        if layer.name.startswith("point"):
            kernel, bias = layer.get_weights()
            inputs, units = kernel.shape[-2:]
            is_kept = numbers.random((inputs // block, units)) > SHARE
            layer.set_weights([kernel * np.repeat(is_kept, block, 0), bias])
    return model


def converted(model: Any, x: np.ndarray, *optimizations: Any) -> bytes:
    """Returns TFLite's own file: in float, or in int8 with ranges from data."""
    converter = tf.lite.TFLiteConverter.from_keras_model(model)
    converter.optimizations = [*optimizations]
    if DENSE in optimizations:
        converter.representative_dataset = lambda: ([image[None]] for image in x)
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
        converter.inference_input_type = converter.inference_output_type = tf.int8
    return bytes(converter.convert())


def exported(model: Any, x: np.ndarray) -> bytes:
    """Returns this library's file."""
    qat = keras_qat.quantize_model(model)
    keras_qat.calibrate(qat, x)
    return keras_qat.export_tflite(qat)


def times(files: dict[str, bytes]) -> dict[str, str]:
    """Returns the median of milliseconds for one image, or why there is none."""
    found, runs = {}, {}
    for name, contents in files.items():
        interpreter = Interpreter(model_content=contents, num_threads=1)
        try:
            interpreter.allocate_tensors()
        except RuntimeError:
            found[name] = "refused"
        else:
            runs[name] = interpreter
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(TURNS):
        for name, interpreter in runs.items():
            start = time.process_time()
            interpreter.invoke()
            taken[name].append(1e3 * (time.process_time() - start))
    return found | {name: f"{statistics.median(turns):.2f}" for name, turns in taken.items()}


def main() -> None:
    """Prints a table."""
    x = np.random.default_rng(1).normal(size=(16, SIZE, SIZE, 3)).astype(np.float32)
    print(head(TITLES, WIDTHS))
    for block, label in BLOCKS.items():
        model = build(block)
        files = {
            "float": converted(model, x),
            "float, sparse": converted(model, x, SPARSE),
            "int8": converted(model, x, DENSE),
            "int8, sparse": converted(model, x, DENSE, SPARSE),
            "int8, keras_qat": exported(model, x),
        }
        ms = times(files)
        for name, contents in files.items():
            sizes = [f"{len(data) / 1000:.0f}" for data in (contents, gzip.compress(contents, 9))]
            print(row([label, name, *sizes, ms[name]], WIDTHS), flush=True)


if __name__ == "__main__":
    main()
