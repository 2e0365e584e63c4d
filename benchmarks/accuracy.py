"""Accuracy of int8 files, as the TFLite interpreter gives it: without training, and with some.

    PYTHONPATH=tutorials python -m benchmarks.accuracy --directory build/accuracy

Small networks on Fashion-MNIST (or `--data digits`), trained in float. Parts: `table`, libraries
and bits side by side, all with the same budget of training; `ranges`, ways to take ranges from 64
images; `weights`, what changes weights, from 256 images without labels.
What tells most comes first, for all networks and seeds. Every row is kept in the
directory: a run that was cut short goes on. tfmot takes part where it is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from demo_data import Data, digits, fashion_mnist

import keras_qat
from benchmarks import half_precision, networks
from benchmarks.half_precision import fit
from keras_qat import recipes
from keras_qat.config.recipes import Ranges
from keras_qat.keras2.backend import keras
from keras_qat.tflite.interpreter import FileInterpreter

IMAGES, UNLABELLED, OUTLIER = 64, 256, 1000.0
METHODS = ("minmax", "percentile", "mse")
RECIPES: dict[str, Any] = {
    "8/8": recipes.int8(),
    "8/4": recipes.int8(activation_bits=4),
    "4/8": recipes.int8(weight_bits=4),
}
"""Bits of weights and activations -> recipe."""
NETWORKS: dict[str, Callable[[networks.Shape], Any]] = networks.NETWORKS | {
    name: lambda shape, make=make: make() for name, make in half_precision.NETWORKS.items()
}


@dataclasses.dataclass(frozen=True)
class Budget:
    """How much training there is.

    Args:
        epochs: of the float model.
        more: of quantization-aware training.
        rate: its first learning rate; it falls to zero along a cosine.
        batch: images of a step.
        iterations: of learned rounding, for each layer.
    """

    epochs: int
    more: int
    rate: float
    batch: int
    iterations: int


@dataclasses.dataclass(frozen=True)
class Case:
    """A float model that was trained, and what rows are measured with.

    Args:
        model: the float model.
        data: images and classes.
        budget: of training.
        trained_on: where the weights of the model that is trained on are kept.
    """

    model: Any
    data: Data
    budget: Budget
    trained_on: Path

    @property
    def steps(self) -> int:
        """Of training on."""
        return self.budget.more * (len(self.data.x_train) // self.budget.batch)

    def fit(self, model: Any, share: float = 1.0, *callbacks: Any) -> Any:
        """The model, trained on with a share of the learning rate."""
        keras.utils.set_random_seed(1)
        budget = self.budget
        fit(model, self.data, budget.more, share * budget.rate, budget.batch, *callbacks)
        return model


Rows = dict[str, Callable[[Case], float]]


def of_file(contents: bytes, data: Data) -> float:
    """Accuracy of a file's classes, in percent."""
    file = FileInterpreter(contents)
    (name,) = file.inputs
    (codes,) = file.run({name: data.x_test}, 100).values()
    return float(100 * np.mean(codes.argmax(-1) == data.y_test))


def of_qat(qat: Any, data: Data) -> float:
    """Accuracy of the file of a quantization-aware model."""
    return of_file(keras_qat.export_tflite(qat), data)


def of_float(model: Any, data: Data) -> float:
    """Accuracy of a Keras model's classes, in percent."""
    return float(100 * np.mean(model.predict(data.x_test, verbose=0).argmax(-1) == data.y_test))


def by_tflite(model: Any, images: np.ndarray | None = None) -> bytes:
    """The file of TFLite's post-training quantization, or of tfmot's model without images."""
    converter = tf.lite.TFLiteConverter.from_keras_model(model)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if images is not None:
        converter.representative_dataset = lambda: ([image[None]] for image in images)
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    converter.inference_input_type = converter.inference_output_type = tf.int8
    return converter.convert()


def calibrated(model: Any, images: np.ndarray, method: Any, recipe: Any, **options: Any) -> Any:
    """A quantization-aware model with ranges."""
    qat = keras_qat.quantize_model(model, recipe)
    keras_qat.calibrate(qat, images, method=method, **options)
    return qat


def of_table() -> Rows:
    """Libraries, bits and ranges, all with the same budget of training."""

    def trained_on(case: Case) -> Any:
        model = keras.models.clone_model(case.model)
        if case.trained_on.exists():
            model.load_weights(case.trained_on)
        else:
            model.set_weights(case.model.get_weights())
            case.fit(model).save_weights(case.trained_on)
        return model

    def by_tfmot(case: Case) -> float:
        import tensorflow_model_optimization as tfmot

        qat = tfmot.quantization.keras.quantize_model(case.model)
        return of_file(by_tflite(case.fit(qat)), case.data)

    def calibrate(recipe: Any, case: Case) -> float:
        return of_qat(calibrated(case.model, unlabelled(case), "minmax", recipe), case.data)

    def learn(case: Case) -> float:
        qat = calibrated(case.model, unlabelled(case), "mse", recipes.int8(weight_bits=4))
        keras_qat.learn_rounding(qat, unlabelled(case), iterations=case.budget.iterations)
        return of_qat(qat, case.data)

    def train(
        recipe: Any,
        case: Case,
        share: float = 1.0,
        method: str = "mse",
        freezes: bool = False,
    ) -> float:
        qat = calibrated(case.model, unlabelled(case), method, recipe)
        callbacks = [keras_qat.callbacks.FreezeBatchNorm(case.steps // 2)] if freezes else []
        case.fit(qat, share, *callbacks)
        return of_qat(qat, case.data)

    def low(weights: int, activations: int, ranges: Ranges) -> Rows:
        recipe = recipes.low_bits(weights, activations, ranges=ranges)
        return {f"{weights}/{activations} {ranges}": partial(train, recipe)}

    tensor = {bits: recipes.int8(bits, per_channel=False) for bits in (8, 4)}
    rows: Rows = {
        "float, trained on": lambda case: of_float(trained_on(case), case.data),
        "TFLite 8/8": lambda case: of_file(by_tflite(case.model, unlabelled(case)), case.data),
        "calibrate 8/8": partial(calibrate, recipes.int8()),
        "calibrate 8/8 per tensor": partial(calibrate, tensor[8]),
        "8/8": partial(train, recipes.int8(), method="minmax"),
        "tfmot 8/8": by_tfmot,
        "8/8 per tensor": partial(train, tensor[8], method="minmax"),
        **low(4, 8, "learned"),
        "learn_rounding 4/8": learn,
        **low(4, 4, "learned"),
        **low(2, 2, "learned"),
        **low(3, 3, "learned"),
        "float, trained on, TFLite 8/8": lambda case: of_file(
            by_tflite(trained_on(case), unlabelled(case)), case.data
        ),
        "8/8, rate x 0.3": partial(train, recipes.int8(), share=0.3, method="minmax"),
    }
    if not importlib.util.find_spec("tensorflow_model_optimization"):
        del rows["tfmot 8/8"]
    for ranges in ("learned_clipping", "moving_average"):
        for bits in ((2, 2), (4, 8), (4, 4), (3, 3)):
            rows |= low(*bits, ranges)
    for bits in ((4, 4), (3, 3), (2, 2)):
        label = f"{bits[0]}/{bits[1]} learned, FreezeBatchNorm"
        rows[label] = partial(train, recipes.low_bits(*bits), freezes=True)
    faster = partial(train, recipes.low_bits(4, 4), share=3.0, freezes=True)
    rows["4/4 learned, FreezeBatchNorm, rate x 3"] = faster
    rows |= low(8, 8, "learned") | low(8, 8, "learned_clipping")
    rows["calibrate 4/8"] = partial(calibrate, recipes.int8(4))
    rows["calibrate 4/8 per tensor"] = partial(calibrate, tensor[4])
    rows["4/8 per tensor"] = partial(train, tensor[4])
    return rows


def unlabelled(case: Case) -> np.ndarray:
    """The images that ranges and weights are found with."""
    return case.data.x_train[:UNLABELLED]


def with_outlier(images: np.ndarray) -> np.ndarray:
    """The images, one pixel of them far too large."""
    images = images.copy()
    images[5, 3, 3] = OUTLIER
    return images


def of_ranges() -> Rows:
    """Ways to take ranges."""

    def tflite(change: Callable[[np.ndarray], np.ndarray], case: Case) -> float:
        return of_file(by_tflite(case.model, change(case.data.x_train[:IMAGES])), case.data)

    def measure(
        method: str, bits: str, count: int, change: Callable[[np.ndarray], np.ndarray], case: Case
    ) -> float:
        images = change(case.data.x_train[:count])
        return of_qat(calibrated(case.model, images, method, RECIPES[bits]), case.data)

    rows: Rows = {
        "TFLite 8/8, 64 images": partial(tflite, np.asarray),
        "TFLite 8/8, outlier": partial(tflite, with_outlier),
    }
    for method in METHODS:
        for bits in RECIPES:
            rows[f"{method} {bits}"] = partial(measure, method, bits, IMAGES, np.asarray)
        rows[f"{method} 8/8, outlier"] = partial(measure, method, "8/8", IMAGES, with_outlier)
    for count in (1, 2, 4, 8, 16, 512):
        rows[f"minmax 8/8, {count} images"] = partial(measure, "minmax", "8/8", count, np.asarray)
    return rows


def of_weights() -> Rows:
    """What changes weights without labels."""

    def measure(
        recipe: Any, change: Callable[[Any, Case], None], case: Case, **options: Any
    ) -> float:
        qat = calibrated(case.model, unlabelled(case), "mse", recipe, **options)
        change(qat, case)
        return of_qat(qat, case.data)

    def learn(qat: Any, case: Case) -> None:
        keras_qat.learn_rounding(qat, unlabelled(case), iterations=case.budget.iterations)

    def correct(qat: Any, case: Case) -> None:
        keras_qat.bias_correction(qat, unlabelled(case))

    def nothing(qat: Any, case: Case) -> None:
        pass

    rows: Rows = {}
    for bits in (8, 4, 3, 2):
        recipe = recipes.int8(bits)
        rows[f"{bits}/8 to the nearest"] = partial(measure, recipe, nothing)
        rows[f"{bits}/8 least error"] = partial(measure, recipe, nothing, weights="mse")
        rows[f"{bits}/8 bias_correction"] = partial(measure, recipe, correct, weights="mse")
        rows[f"{bits}/8 learn_rounding"] = partial(measure, recipe, learn)
    return rows


PARTS: dict[str, Callable[[], Rows]] = {
    "table": of_table,
    "ranges": of_ranges,
    "weights": of_weights,
}
"""Name on the command line -> rows by their labels."""


def case_of(name: str, seed: int, data: Data, directory: Path, budget: Budget) -> Case:
    """A float model, trained or as it was kept, and what belongs to it."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    path = directory / f"{name}-{seed}.weights.h5"
    model = NETWORKS[name](data.x_train.shape[1:])
    if path.exists():
        model.load_weights(path)
    else:
        fit(model, data, budget.epochs, 3e-3, budget.batch)
        model.save_weights(path)
    return Case(model, data, budget, directory / f"{name}-{seed}-on.weights.h5")


def measure(rows: Rows, data: Data, directory: Path, budget: Budget, options: Any) -> None:
    """Measures what is missing, and prints how far it is."""
    left = [
        (label, name, seed)
        for label in rows
        for seed in range(options.seeds)
        for name in options.networks
        if label not in kept(directory, name, seed)
    ]
    start = time.monotonic()
    for done, (label, name, seed) in enumerate(left):
        accuracy = rows[label](case_of(name, seed, data, directory, budget))
        result = kept(directory, name, seed) | {label: accuracy}
        (directory / f"{name}-{seed}.json").write_text(json.dumps(result, indent=1))
        minutes = (time.monotonic() - start) / 60 / (done + 1) * (len(left) - done - 1)
        print(
            f"{done + 1:>4} of {len(left)}, {minutes:.0f} min left: {name} {seed} {label:<46}"
            f"{accuracy:>8.2f}",
            flush=True,
        )


def kept(directory: Path, name: str, seed: int) -> dict[str, float]:
    """Label of a row -> accuracy, as far as measured."""
    path = directory / f"{name}-{seed}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def main() -> None:
    """Measures what is missing and prints the means over seeds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", choices=["digits", "fashion-mnist"], default="fashion-mnist")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=[*networks.NETWORKS])
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=["table"])
    parser.add_argument("--rows", nargs="*", help="labels of the rows, in order")
    parser.add_argument("--train", type=int, default=60_000, help="images")
    parser.add_argument("--test", type=int, default=10_000, help="images")
    parser.add_argument("--epochs", type=int, default=3, help="of the float model")
    parser.add_argument("--more", type=int, default=1, help="epochs of quantization-aware training")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate of those")
    parser.add_argument("--batch", type=int, default=128, help="images of a training step")
    parser.add_argument("--iterations", type=int, default=500, help="of learned rounding, a layer")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    budget = Budget(options.epochs, options.more, options.rate, options.batch, options.iterations)
    data = (digits() if options.data == "digits" else fashion_mnist(options.train)).subset(
        options.train, options.test
    )
    rows: Rows = {"float": lambda case: of_float(case.model, case.data)}
    for part in options.parts:
        rows |= PARTS[part]()
    wanted = ("float", *rows) if options.rows is None else ("float", *options.rows)
    if unknown := set(wanted) - set(rows):
        parser.error(f"no rows: {', '.join(sorted(unknown))}. There are: {', '.join(rows)}")
    rows = {label: rows[label] for label in wanted}
    measure(rows, data, options.directory, budget, options)
    print(table(options.directory, options.networks, rows))


def table(directory: Path, names: list[str], labels: Iterable[str]) -> str:
    """The means over seeds, as a page shows them."""
    result = {
        name: [json.loads(path.read_text()) for path in sorted(directory.glob(f"{name}-*.json"))]
        for name in names
    }
    lines = [f"| | {' | '.join(result)} |", "| --- |" + " --- |" * len(result)]
    for label in labels:
        cells = []
        for runs in result.values():
            values = [run[label] for run in runs if label in run]
            spread = f" ± {np.std(values):.2f}" if len(values) > 1 else ""
            cells.append(f"{np.mean(values):.2f}{spread}" if values else "")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
