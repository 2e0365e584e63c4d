"""The smallest files that CMSIS-NN, TFLite Micro and XNNPACK compute wrongly, with their values.

    python -m benchmarks.kernel_faults FOLDER

For each, NAME.tflite, NAME.in (all inputs of all runs, as they lie in memory) and NAME.exp (the
outputs that TFLite Micro's own kernels give). They are written for `target="tflm"`: files for
`target="cmsis_nn"` have other operators there. results/kernel_faults.md has the results.
"""

from __future__ import annotations

import argparse
import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import keras_qat
from keras_qat import recipes
from keras_qat.integer_graph.resolve import resolve
from keras_qat.keras2.backend import keras

layers = keras.layers
RUNS = 8


def stack(shape: tuple[int, ...], *stacked: Any, batch: int | None = None) -> Any:
    return keras.Sequential([keras.Input(shape, batch), *stacked])


def computed(shape: tuple[int, ...], function: Callable[[Any], Any]) -> Any:
    x = keras.Input(shape)
    return keras.Model(x, function(x))


ONE_SCALE = functools.partial(recipes.int8, per_channel=False)

FAULTS: dict[str, tuple[Callable[[], recipes.Recipe], Callable[[], Any]]] = {
    "lstm": (recipes.int8, lambda: stack((1, 2), layers.LSTM(2, stateful=True), batch=1)),
    "transpose_conv_padding": (
        recipes.int8,
        lambda: stack((3, 3, 1), layers.Conv2DTranspose(1, 4, 2, "same")),
    ),
    "transpose_conv_narrow": (
        recipes.int8,
        lambda: stack((3, 1), layers.Conv1DTranspose(2, 2, 3)),
    ),
    "transpose_conv_cropped": (
        recipes.int8,
        lambda: stack((3, 3, 1), layers.Conv2DTranspose(1, 3, 2, "same", output_padding=0)),
    ),
    "transpose_conv_relu_int16": (
        recipes.int16x8,
        lambda: stack((2, 2, 1), layers.Conv2DTranspose(1, 2, 2, activation="relu")),
    ),
    "conv_row": (recipes.int8, lambda: stack((7, 4), layers.Conv1D(4, 4, 3, "same"))),
    "conv_groups_int16": (
        recipes.int16x8,
        lambda: stack((2, 2, 4), layers.Conv2D(2, 1, groups=2)),
    ),
    "conv_groups_int4": (
        recipes.int4_weights,
        lambda: stack((2, 2, 4), layers.Conv2D(2, 1, groups=2)),
    ),
    "dense_one_scale": (ONE_SCALE, lambda: stack((2, 4), layers.Dense(2))),
    "maximum_five_axes": (
        recipes.int8,
        lambda: computed((2, 1, 1, 2), lambda x: tf.maximum(x, tf.tanh(x))),
    ),
    "matmul_five_axes": (
        recipes.int8,
        lambda: computed((2, 2, 2, 2), lambda x: tf.matmul(x, tf.tanh(x))),
    ),
    "transpose_five_axes": (
        recipes.int8,
        lambda: computed((2, 3, 2, 2), lambda x: layers.Permute((2, 1, 4, 3))(tf.tanh(x))),
    ),
    "relu_int16": (recipes.int16x8, lambda: stack((4096,), layers.ReLU())),
    "leaky_relu_int16": (recipes.int16x8, lambda: stack((4096,), layers.LeakyReLU(0.2))),
    "sub_int16": (recipes.int16x8, lambda: computed((4096,), lambda x: x - tf.tanh(x))),
    "softmax_one_class_int16": (recipes.int16x8, lambda: stack((4, 1), layers.Softmax())),
    "mean_row": (
        recipes.int8,
        lambda: computed((2, 40_000), lambda x: tf.reduce_mean(tf.square(x) * [[1.0], [0.1]], -1)),
    ),
}
"""Name of the file -> the recipe and the model in float."""


def write(name: str, folder: Path) -> None:
    """Writes the file of a fault, its inputs and what has to come out."""
    recipe, build = FAULTS[name]
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    model = build()
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(RUNS, *model.input_shape[1:])).astype(np.float32)
    qat = keras_qat.quantize_model(model, recipe(), target="tflm")
    keras_qat.calibrate(qat, x)
    qat.pack_int4 = recipe is recipes.int4_weights
    contents = keras_qat.export_tflite(qat)
    ((_, tensor),) = resolve(qat).inputs.items()
    assert tensor.params is not None
    (output,) = keras_qat.simulate(qat, x, "tflm").outputs.values()
    (folder / f"{name}.tflite").write_bytes(contents)
    (folder / f"{name}.in").write_bytes(np.asarray(tensor.params.quantize(x)).tobytes())
    (folder / f"{name}.exp").write_bytes(output.codes.tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=re.split(r"\n\n", __doc__ or "")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    for name in FAULTS:
        write(name, folder)
        print(name, (folder / f"{name}.tflite").stat().st_size, "bytes", flush=True)


if __name__ == "__main__":
    main()
