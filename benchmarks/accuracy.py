"""Accuracy of int8 files without training: ways to take ranges, and TFLite's own quantization.

    PYTHONPATH=tutorials python -m benchmarks.accuracy --directory /tmp/accuracy

Small networks on Fashion-MNIST (or `--data digits`), trained in float; ranges from 64 images
of the training set, without labels; accuracy of all test images in the TFLite interpreter. Every
row is kept in the directory: a run that was cut short goes on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from demo_data import DATA, Data

import keras_qat
from benchmarks.half_precision import NETWORKS, fit
from keras_qat import recipes
from keras_qat.interpreter import TFLiteModel
from keras_qat.keras2.backend import keras

TRAIN, EPOCHS, IMAGES, OUTLIER = 10_000, 4, 64, 1000.0
METHODS = ("minmax", "percentile", "mse", "entropy")
RECIPES: dict[str, Any] = {
    "8/8": recipes.int8(),
    "8/4": recipes.int8(activation_bits=4),
    "4/8": recipes.int4_weights(),
}
"""Bits of weights and activations -> recipe."""


def of_file(contents: bytes, data: Data) -> float:
    """Accuracy of a file's classes, in percent."""
    file = TFLiteModel(contents)
    (name,) = file.inputs
    (codes,) = file.run({name: data.x_test}, 100).values()
    return float(100 * np.mean(codes.argmax(-1) == data.y_test))


def of_float(model: Any, data: Data) -> float:
    """Accuracy of a Keras model's classes, in percent."""
    return float(100 * np.mean(model.predict(data.x_test, verbose=0).argmax(-1) == data.y_test))


def by_tflite(model: Any, images: np.ndarray) -> bytes:
    """The file of TFLite's post-training quantization."""
    converter = tf.lite.TFLiteConverter.from_keras_model(model)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: ([each[None]] for each in images)
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    converter.inference_input_type = converter.inference_output_type = tf.int8
    return converter.convert()


def calibrated(model: Any, images: np.ndarray, method: Any, bits: str = "8/8") -> bytes:
    """The file of `calibrate`."""
    qat = keras_qat.quantize_model(model, RECIPES[bits])
    keras_qat.calibrate(qat, images, method=method)
    return keras_qat.export_tflite(qat)


def with_outlier(images: np.ndarray) -> np.ndarray:
    """The images, one pixel of them far too large."""
    images = images.copy()
    images[5, 3, 3] = OUTLIER
    return images


def rows(model: Any, data: Data) -> dict[str, Callable[[], float]]:
    """What is measured of a trained float model, by its label."""
    images = data.x_train[:IMAGES]
    broken = with_outlier(images)
    found: dict[str, Callable[[], float]] = {
        "float": partial(of_float, model, data),
        "TFLite 8/8": lambda: of_file(by_tflite(model, images), data),
        "TFLite 8/8, outlier": lambda: of_file(by_tflite(model, broken), data),
    }

    def add(label: str, *arguments: Any) -> None:
        found[label] = lambda: of_file(calibrated(model, *arguments), data)

    for method in METHODS:
        for bits in RECIPES:
            add(f"{method} {bits}", images, method, bits)
        add(f"{method} 8/8, outlier", broken, method)
    for count in (1, 2, 4, 8, 16, 512):
        add(f"minmax 8/8, {count} images", data.x_train[:count], "minmax")
    return found


def trained(name: str, seed: int, data: Data, directory: Path) -> Any:
    """A float model, trained or as it was kept."""
    keras.utils.set_random_seed(seed)
    path = directory / f"{name}-{seed}.weights.h5"
    model = NETWORKS[name]()
    if path.exists():
        model.load_weights(path)
        return model
    fit(model, data, EPOCHS, 3e-3)
    model.save_weights(path)
    return model


def main() -> None:
    """Measures what is missing and prints the means over seeds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", choices=list(DATA), default="fashion-mnist")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS))
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    data = DATA[options.data]().subset(TRAIN, 10_000)
    for seed in range(options.seeds):
        for name in options.networks:
            path = options.directory / f"{name}-{seed}.json"
            kept = json.loads(path.read_text()) if path.exists() else {}
            model = trained(name, seed, data, options.directory)
            for label, measure in rows(model, data).items():
                if label not in kept:
                    kept[label] = measure()
                    path.write_text(json.dumps(kept, indent=1))
                    print(f"{name} {seed} {label:<28}{kept[label]:>8.2f}", flush=True)
    print(table(options.directory, options.networks))


def table(directory: Path, networks: list[str]) -> str:
    """The means over seeds, as a page shows them."""
    found = {
        name: [json.loads(path.read_text()) for path in sorted(directory.glob(f"{name}-*.json"))]
        for name in networks
    }
    labels = dict.fromkeys(label for runs in found.values() for run in runs for label in run)
    lines = [f"| | {' | '.join(found)} |", "| --- |" + " --- |" * len(found)]
    for label in labels:
        cells = []
        for runs in found.values():
            values = [run[label] for run in runs if label in run]
            cells.append(f"{np.mean(values):.2f} ± {np.std(values):.2f}" if values else "")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
