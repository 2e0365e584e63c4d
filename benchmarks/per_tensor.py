"""Accuracy of weights with one scale for the tensor, with and without training.

    PYTHONPATH=tutorials python -m benchmarks.per_tensor --seeds 1

The networks and data of `benchmarks.accuracy`, trained in float, then quantization-aware for some
epochs more; accuracy of all test images as the model predicts, which is that of its file.
"""

from __future__ import annotations

import argparse
from typing import Any

from demo_data import DATA, Data

import keras_qat
from benchmarks.accuracy import EPOCHS, TRAIN, of_float
from benchmarks.half_precision import NETWORKS, fit
from keras_qat import recipes
from keras_qat.keras2.backend import keras

RATE = 1e-3
"""Where the learning rate of the second training begins; it falls to zero."""


def accuracies(model: Any, recipe: Any, data: Data, epochs: int) -> tuple[float, float]:
    """Accuracy with ranges from data alone, and after training."""
    qat = keras_qat.quantize_model(model, recipe)
    keras_qat.calibrate(qat, data.x_train[:512])
    before = of_float(qat, data)
    fit(qat, data, epochs, RATE)
    return before, of_float(qat, data)


def main() -> None:
    """Prints a line for each network, seed and recipe."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", choices=list(DATA), default="fashion-mnist")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--train", type=int, default=TRAIN)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS))
    options = parser.parse_args()
    data = DATA[options.data]().subset(options.train, 10_000)
    for seed in range(options.seeds):
        for name in options.networks:
            keras.utils.set_random_seed(seed)
            model = NETWORKS[name]()
            fit(model, data, EPOCHS, 3e-3)
            print(f"{name} {seed} float {of_float(model, data):.2f}", flush=True)
            for bits in (8, 4):
                for per_channel in (True, False):
                    keras.utils.set_random_seed(seed)
                    recipe = recipes.int8(bits, per_channel=per_channel)
                    before, after = accuracies(model, recipe, data, options.epochs)
                    kind = "per channel" if per_channel else "per tensor"
                    print(
                        f"{name} {seed} {bits} bits {kind}: calibrated {before:.2f}, "
                        f"trained {after:.2f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
