"""The networks written by hand, all in one process: what is in float, and whether files are exact.

python -m benchmarks.wild.quick [NAME ...]

For each: how many layers are in float by default and for a target without float, whether the model
trains a step, exports the same file after it is saved and loaded, and whether model and simulation
give all codes of the file, with XNNPACK.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import keras_qat
from benchmarks import zoo_worker
from benchmarks.wild.by_hand import BY_HAND
from keras_qat.frontend.keras2.backend import keras

COUNT = 8
"""Examples."""

COLUMNS = "network, in float, without float, trains, reloads, integers, codes, simulated, kB, why"


def measure(build: Any) -> list[str]:
    """Takes a network through everything, and returns the cells of its row."""
    keras.utils.set_random_seed(1)
    model = build()
    default = keras_qat.plan(model).float_layers
    recipe = dataclasses.replace(keras_qat.recipes.int8(), without_float=True)
    left = keras_qat.plan(model, recipe).float_layers
    qat = keras_qat.quantize_model(model, recipe)
    x = zoo_worker.arrays(qat, COUNT)
    data, few = (x, [row[:4] for row in x]) if len(x) > 1 else (x[0], x[0][:4])
    trains = zoo_worker.train_step(qat, few, eagerly=True)
    keras_qat.freeze_batch_norm(qat)
    qat(data, training=True)
    contents = keras_qat.export_tflite(qat)
    customs = {type(layer).__name__: type(layer) for layer in model._flatten_layers()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        qat.save(path)
        with keras.utils.custom_object_scope(customs):
            reloaded = keras.models.load_model(path)
    reloads = keras_qat.export_tflite(reloaded) == contents
    report = keras_qat.verify(qat, contents, data, per_layer=False)
    operations = zoo_worker.operations(contents)
    floats = sum(operations["float_operations"].values())
    total = operations["operations"]
    return [
        *(str(len(layers) or "") for layers in (default, left)),
        *("yes" if good else "NO" for good in (trains, reloads)),
        f"{total - floats}/{total}",
        *(f"{share:.2%}" for share in (report.identical, zoo_worker.simulated(qat, contents, x))),
        str(round(len(contents) / 1e3)),
        "; ".join(dict.fromkeys(left.values())).replace("|", "/"),
    ]


def main() -> None:
    """The command."""
    print(f"| {COLUMNS.replace(', ', ' | ')} |\n{'| --- ' * (COLUMNS.count(',') + 1)}|", flush=True)
    for name, build in BY_HAND.items():
        short = name.removeprefix("by hand ")
        if sys.argv[1:] and short not in sys.argv[1:]:
            continue
        start = time.perf_counter()
        try:
            cells = measure(build)
        except Exception as error:  # A network that fails is a row, too.
            cells = [f"{type(error).__name__}: {error}"[:200]]
        print(f"| {' | '.join([short, *cells])} |", flush=True)
        print(f"{short}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
