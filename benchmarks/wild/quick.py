"""The networks written by hand, all in one process: what is in float, and whether files are exact.

python -m benchmarks.wild.quick [--target ethos_u55] [NAME ...]

For each: what is in float by default, for a target without float, and on request (normalizing
layers in integers); then, as quantized for the target, whether it trains a step and exports the
same bytes after it was saved and loaded, how many operators of the file compute in integers, and
which share of the file's codes model and simulation give, with the target's rounding and
XNNPACK's. The last lines count the rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras_qat
from benchmarks import zoo_worker
from benchmarks.wild.by_hand import BY_HAND
from keras_qat.keras2.backend import keras

COUNT = 8
"""Examples."""

TARGET = "ethos_u55"

COLUMNS = (
    *("network", "default", "target", "request", "trains", "saved", "integers", "codes"),
    *("simulated", "kB", "why"),
)

COUNTS: dict[str, Callable[[dict[str, str]], bool]] = {
    "networks": lambda row: True,
    "no float layer by default": lambda row: not row.get("default", "failed"),
    "no float layer for the target": lambda row: not row.get("target", "failed"),
    "no float layer on request": lambda row: not row.get("request", "failed"),
    "no float operator in the target's file": lambda row: _is_whole(row.get("integers", "-/")),
    "every code of model and simulation": lambda row: all(
        row.get(name) == "100.00%" for name in ("codes", "simulated")
    ),
    "trained a step, and saved and loaded with the same bytes": lambda row: (
        row.get("trains") == row.get("saved") == "yes"
    ),
}
"""What the last lines say -> whether a row counts."""


def _is_whole(share: str) -> bool:
    part, total = share.split("/")
    return part == total


def float_layers(model: Any, target: str) -> dict[str, dict[str, str]]:
    """Returns the layers that stay in float, with the reason for each, by what is asked for."""
    recipe = dataclasses.replace(keras_qat.recipes.int8(), without_float=True)
    default = keras_qat.plan(model).float_layers
    of_target = keras_qat.plan(model, target=target).float_layers if default else {}
    requested = keras_qat.plan(model, recipe).float_layers if of_target else {}
    return {"default": default, "target": of_target, "request": requested}


def measure(build: Any, target: str) -> dict[str, str]:
    """Takes a network through everything, and returns the cells of its row."""
    keras.utils.set_random_seed(1)
    model = build()
    left = float_layers(model, target)
    qat = keras_qat.quantize_model(model, target=target)
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
    saved = keras_qat.export_tflite(reloaded) == contents
    operations = zoo_worker.operations(contents)
    floats, total = sum(operations["float_operations"].values()), operations["operations"]
    exact = keras_qat.verify(qat, contents, data).identical
    shares = exact, zoo_worker.simulated(qat, contents, x, "xnnpack")
    return {
        **{asked: str(len(layers) or "") for asked, layers in left.items()},
        **{name: "yes" if good else "NO" for name, good in (("trains", trains), ("saved", saved))},
        "integers": f"{total - floats}/{total}",
        **dict(zip(("codes", "simulated"), (f"{share:.2%}" for share in shares), strict=True)),
        "kB": str(round(len(contents) / 1e3)),
        "why": "; ".join(dict.fromkeys(left["target"].values())).replace("|", "/"),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--target", default=TARGET)
    arguments = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n{'| --- ' * len(COLUMNS)}|", flush=True)
    rows = []
    for name, build in BY_HAND.items():
        short = name.removeprefix("by hand ")
        if arguments.names and short not in arguments.names:
            continue
        start = time.perf_counter()
        try:
            row = measure(build, arguments.target)
        except Exception as error:  # A network that fails is a row, too.
            row = {"why": f"{type(error).__name__}: {error}"[:200].replace("\n", " ")}
        rows.append({"network": short, **row})
        print(f"| {' | '.join(rows[-1].get(column, '-') for column in COLUMNS)} |", flush=True)
        print(f"{short}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    print(*(f"{sum(map(counts, rows))} {what}" for what, counts in COUNTS.items()), sep="\n")


if __name__ == "__main__":
    main()
