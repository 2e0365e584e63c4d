"""Accuracy of int8 files, as the TFLite interpreter gives it: without training, and with some.

    PYTHONPATH=tutorials python -m benchmarks.accuracy --directory /tmp/accuracy
    PYTHONPATH=tutorials python -m benchmarks.accuracy --directory /tmp/accuracy --parts training

Small networks on Fashion-MNIST (or `--data digits`), trained in float. `ranges`: ways to take
ranges from 64 images, and TFLite's own quantization. `weights`: what changes weights, from 256
images without labels. `training`: the same number of epochs for all. Every row is kept in the
directory: a run that was cut short goes on. All images, and training as long as for a paper:

    ... --parts ranges weights training --train 60000 --epochs 20 --more 10
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from demo_data import Data, digits, fashion_mnist

import keras_qat
from benchmarks.half_precision import BATCH, NETWORKS, fit
from keras_qat import recipes
from keras_qat.interpreter import TFLiteModel
from keras_qat.keras2.backend import keras

TRAIN, EPOCHS, IMAGES, UNLABELLED, OUTLIER = 10_000, 4, 64, 256, 1000.0
METHODS = ("minmax", "percentile", "mse", "entropy")
RECIPES: dict[str, Any] = {
    "8/8": recipes.int8(),
    "8/4": recipes.int8(activation_bits=4),
    "4/8": recipes.int4_weights(),
}
"""Bits of weights and activations -> recipe."""
TRAINED = ((8, 8), (4, 8), (4, 4), (3, 3), (2, 2))
"""Bits of weights and activations that are trained."""
Rows = dict[str, Callable[[], float]]


@dataclasses.dataclass(frozen=True)
class Budget:
    """How much training there is.

    Args:
        epochs: of the float model.
        more: of quantization-aware training.
        rate: its first learning rate; it falls to zero along a cosine.
        iterations: of learned rounding, for each layer.
    """

    epochs: int
    more: int
    rate: float
    iterations: int


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


def calibrated(model: Any, images: np.ndarray, method: Any, recipe: Any, **options: Any) -> Any:
    """A quantization-aware model with ranges."""
    qat = keras_qat.quantize_model(model, recipe)
    keras_qat.calibrate(qat, images, method=method, **options)
    return qat


def with_outlier(images: np.ndarray) -> np.ndarray:
    """The images, one pixel of them far too large."""
    images = images.copy()
    images[5, 3, 3] = OUTLIER
    return images


def of_ranges(model: Any, data: Data, budget: Budget) -> Rows:
    """Ways to take ranges."""
    images = data.x_train[:IMAGES]
    broken = with_outlier(images)
    found: Rows = {
        "TFLite 8/8": lambda: of_file(by_tflite(model, images), data),
        "TFLite 8/8, outlier": lambda: of_file(by_tflite(model, broken), data),
    }

    def add(label: str, images: np.ndarray, method: str, bits: str = "8/8") -> None:
        found[label] = lambda: of_file(
            keras_qat.export_tflite(calibrated(model, images, method, RECIPES[bits])), data
        )

    for method in METHODS:
        for bits in RECIPES:
            add(f"{method} {bits}", images, method, bits)
        add(f"{method} 8/8, outlier", broken, method)
    for count in (1, 2, 4, 8, 16, 512):
        add(f"minmax 8/8, {count} images", data.x_train[:count], "minmax")
    return found


def of_weights(model: Any, data: Data, budget: Budget) -> Rows:
    """What changes weights without labels."""
    images = data.x_train[:UNLABELLED]

    def measure(recipe: Any, change: Callable[[Any], None], **options: Any) -> float:
        qat = calibrated(model, images, "mse", recipe, **options)
        change(qat)
        return of_file(keras_qat.export_tflite(qat), data)

    def learn(qat: Any) -> None:
        keras_qat.learn_rounding(qat, images, iterations=budget.iterations)

    def correct(qat: Any) -> None:
        keras_qat.bias_correction(qat, images)

    def mixed(bits: int) -> float:
        found = keras_qat.search_bits(model, images[:64], bits / 8, bits=(2, 3, 4, 5, 6, 8))
        return measure(found.recipe, learn)

    rows: Rows = {}
    for bits in (8, 4, 3, 2):
        recipe = recipes.int8(bits)
        rows[f"{bits}/8 to the nearest"] = partial(measure, recipe, lambda qat: None)
        rows[f"{bits}/8 least error"] = partial(measure, recipe, lambda qat: None, weights="mse")
        rows[f"{bits}/8 bias_correction"] = partial(measure, recipe, correct, weights="mse")
        rows[f"{bits}/8 learn_rounding"] = partial(measure, recipe, learn)
    for bits in (4, 3):
        rows[f"{bits}/8 on average: search_bits, learn_rounding"] = partial(mixed, bits)
    return rows


def of_training(model: Any, data: Data, budget: Budget) -> Rows:
    """What trains, all with the same budget."""
    images = data.x_train[:UNLABELLED]

    def measure(
        recipe: Any, labels: bool = True, again: bool = False, learn: bool = False
    ) -> float:
        keras.utils.set_random_seed(1)
        qat = calibrated(model, images, "mse", recipe)
        if learn:
            keras_qat.learn_rounding(qat, images, iterations=budget.iterations)
        if labels:
            fit(qat, data, budget.more, budget.rate)
        else:
            _distill(qat, model, data, budget)
        if again:
            keras_qat.reestimate_batch_norm(qat, data.x_train, steps=50, batch_size=BATCH)
        return of_file(keras_qat.export_tflite(qat), data)

    rows: Rows = {}
    for weights, activations in TRAINED:
        bits = f"{weights}/{activations}"
        for ranges in ("moving_average", "learned", "learned_clipping"):
            recipe = recipes.low_bits(weights, activations, ranges=ranges)
            rows[f"{bits} {ranges}"] = partial(measure, recipe)
        recipe = recipes.low_bits(weights, activations)
        rows[f"{bits} learned, Distiller"] = partial(measure, recipe, labels=False)
        rows[f"{bits} learned, reestimate_batch_norm"] = partial(measure, recipe, again=True)
    return rows


def _distill(qat: Any, model: Any, data: Data, budget: Budget) -> None:
    """Trains without labels."""
    steps = budget.more * (len(data.x_train) // BATCH)
    distiller = keras_qat.Distiller(qat, model)
    schedule = keras.optimizers.schedules.CosineDecay(budget.rate, steps)
    distiller.compile(keras.optimizers.Adam(schedule))
    distiller.fit(data.x_train, batch_size=BATCH, epochs=budget.more, verbose=0)


PARTS = {"ranges": of_ranges, "weights": of_weights, "training": of_training}
"""Name on the command line -> rows by their labels."""


def trained(name: str, seed: int, data: Data, directory: Path, epochs: int) -> Any:
    """A float model, trained or as it was kept."""
    keras.utils.set_random_seed(seed)
    path = directory / f"{name}-{seed}.weights.h5"
    model = NETWORKS[name]()
    if path.exists():
        model.load_weights(path)
        return model
    fit(model, data, epochs, 3e-3)
    model.save_weights(path)
    return model


def main() -> None:
    """Measures what is missing and prints the means over seeds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", choices=["digits", "fashion-mnist"], default="fashion-mnist")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=["ranges", "weights"])
    parser.add_argument("--rows", nargs="*", help="words that labels of rows begin with")
    parser.add_argument("--train", type=int, default=TRAIN, help="images")
    parser.add_argument("--test", type=int, default=10_000, help="images")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="of the float model")
    parser.add_argument("--more", type=int, default=2, help="epochs of quantization-aware training")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate of those")
    parser.add_argument("--iterations", type=int, default=500, help="of learned rounding, a layer")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    budget = Budget(options.epochs, options.more, options.rate, options.iterations)
    data = (digits() if options.data == "digits" else fashion_mnist(options.train)).subset(
        options.train, options.test
    )
    for seed in range(options.seeds):
        for name in options.networks:
            path = options.directory / f"{name}-{seed}.json"
            kept = json.loads(path.read_text()) if path.exists() else {}
            model = trained(name, seed, data, options.directory, options.epochs)
            rows: Rows = {"float": partial(of_float, model, data)}
            for part in options.parts:
                rows |= PARTS[part](model, data, budget)
            for label, measure in rows.items():
                wanted = not options.rows or label.startswith(("float", *options.rows))
                if wanted and label not in kept:
                    kept[label] = measure()
                    path.write_text(json.dumps(kept, indent=1))
                    print(f"{name} {seed} {label:<46}{kept[label]:>8.2f}", flush=True)
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
