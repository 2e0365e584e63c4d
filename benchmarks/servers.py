"""onnxruntime: integers of the int8 file beside the model's, its speed beside float.

    python -m benchmarks.servers --models MobileNetV2 ResNet50

Weights are random, with statistics of BatchNormalization as after training; ranges are those of
random images. Networks end before their classifier, where there are most integers. Times are of one
image on one thread, in time of the processor: other work beside does not count. Networks of the zoo
take 96 x 96 pixels.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Literal

import numpy as np
import onnxruntime
import tensorflow as tf
import tf2onnx

import keras_qat
from benchmarks.markdown import head, row
from benchmarks.models import build
from benchmarks.zoo_worker import settle
from keras_qat.keras2.backend import keras

TITLES = ("network", "recipe", "runtime", "same", "largest", "float ms", "int8 ms", "ratio")
WIDTHS = (14, 9, 18, 10, 7, 8, 7, 5)
ACTIVATIONS: dict[str, Literal["uint8", "int8"]] = {"int8": "uint8", "symmetric": "int8"}
Run = Callable[[np.ndarray], np.ndarray]


def open_file(contents: bytes) -> Run:
    """Returns what computes a file on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(contents, options)
    name = session.get_inputs()[0].name
    return lambda x: session.run(None, {name: x})[0]


def in_turn(runs: tuple[Run, Run], x: np.ndarray, rounds: int) -> list[float]:
    """Milliseconds of the processor for each, medians of runs in turn."""
    times: list[list[float]] = [[], []]
    for _ in range(rounds + 2):
        for run, taken in zip(runs, times, strict=True):
            start = time.process_time()
            run(x)
            taken.append(1000 * (time.process_time() - start))
    return [statistics.median(taken[2:]) for taken in times]


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["MobileNetV2", "ResNet50"])
    parser.add_argument("--examples", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print(head(TITLES, WIDTHS))
    for name in options.models:
        whole = build(name)
        model = keras.Model(whole.input, whole.layers[-2].output)  # Without softmax.
        images = np.random.default_rng(0).normal(size=(options.examples, *model.input_shape[1:]))
        x = images.astype(np.float32)
        settle(model, x)
        signature = [tf.TensorSpec(model.input_shape, tf.float32, name="image")]
        as_float = tf2onnx.convert.from_keras(model, signature, opset=17)[0].SerializeToString()
        for recipe, activations in ACTIVATIONS.items():
            qat = keras_qat.quantize_model(model, recipe)
            keras_qat.calibrate(qat, x)
            (output,) = keras_qat.resolve(qat).outputs.values()
            assert output.params is not None
            contents = keras_qat.export_onnx(qat, activations=activations)
            expected = qat.predict(x, verbose=0)
            run = open_file(contents)
            steps = np.abs(np.rint((run(x) - expected) / output.params.scale))
            floats, integers = in_turn((open_file(as_float), run), x[:1], options.rounds)
            runtime = f"onnxruntime {onnxruntime.__version__}"
            cells = [name, recipe, runtime, f"{np.mean(steps == 0):.2%}"]
            cells += [f"{steps.max():.0f}", f"{floats:.1f}", f"{integers:.1f}"]
            print(row([*cells, f"{floats / integers:.2f}"], WIDTHS), flush=True)


if __name__ == "__main__":
    main()
