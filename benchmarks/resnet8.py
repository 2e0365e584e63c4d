"""ResNet8 of MLPerf Tiny with its published weights on CIFAR-10, its weights rounded to 4 bits.

    curl -LO https://github.com/mlcommons/tiny/raw/master/benchmark/training/\
image_classification/trained_models/pretrainedResnet.h5
    python -m benchmarks.resnet8 pretrainedResnet.h5

Ranges and rounding come from training images without labels, other ones for each seed. Test images
tell how often the quantized network gives the class that the float network gives, and how often the
right one. Keras downloads CIFAR-10, or `--data` names an .npz file with `x_train`, `x_test` and
`y_test`. Seconds are those of the CPU, for all that is done without the test.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import keras_qat
from keras_qat import recipes
from keras_qat.keras2.backend import keras

Change = Callable[..., None]


def ways() -> dict[str, tuple[Any, int, Change | None]]:
    """Label -> recipe, number of training images, and what follows `calibrate`."""
    learn, longer = (partial(keras_qat.learn_rounding, iterations=n) for n in (500, 1500))
    int8, int4, ends = recipes.int8(), recipes.int4_weights(), recipes.int4_weights(end_bits=8)
    return {
        "8/8 calibrate": (int8, 256, None),
        "4/8 calibrate": (int4, 256, None),
        "4/8 bias_correction": (int4, 256, keras_qat.bias_correction),
        "4/8 learn_rounding": (int4, 256, learn),
        "4/8 learn_rounding, 1 024 images": (int4, 1024, learn),
        "4/8 learn_rounding, 1 024 images, 1 500 steps": (int4, 1024, longer),
        "the same, ends of 8 bits": (ends, 1024, longer),
    }


def main() -> None:
    """Measures all ways and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("weights", type=Path, help="pretrainedResnet.h5 of MLPerf Tiny")
    parser.add_argument("--data", type=Path, help="an .npz file instead of Keras' CIFAR-10")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    if options.data:
        arrays = np.load(options.data)
        train, test, labels = (arrays[name] for name in ("x_train", "x_test", "y_test"))
    else:
        (train, _), (test, labels) = keras.datasets.cifar10.load_data()
    train, test = train.astype(np.float32), test.astype(np.float32)
    labels = labels.ravel()
    model = keras.models.load_model(options.weights, compile=False)
    in_float = model.predict(test, verbose=0)
    share = 100 * (in_float.argmax(-1) == labels).mean()
    print(f"In float {share:.1f} % of {len(test)} test images are right.\n")
    print("| | same class, % | right, % | seconds |\n| --- | --- | --- | --- |")
    for label, (recipe, count, change) in ways().items():
        rows = []
        for seed in range(options.seeds):
            images = train[np.random.default_rng(seed).permutation(len(train))[:count]]
            begin = time.process_time()
            qat = keras_qat.quantize_model(model, recipe)
            keras_qat.calibrate(qat, images, method="mse")
            if change is not None:
                change(qat, images)
            seconds = time.process_time() - begin
            classes = qat.predict(test, verbose=0).argmax(-1)
            same = 100 * (classes == in_float.argmax(-1)).mean()
            rows.append((same, 100 * (classes == labels).mean(), seconds))
        (same, right, seconds), spread = np.mean(rows, 0), np.std(rows, 0, ddof=1)
        print(
            f"| {label} | {same:.1f} ± {spread[0]:.1f} | {right:.1f} ± {spread[1]:.1f} | "
            f"{seconds:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
