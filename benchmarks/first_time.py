"""What a user waits for at the beginning: CPU time of the first run of each verb.

    python -m benchmarks.first_time                     MobileNetV2, ResNet50, EfficientNetB0
    python -m benchmarks.first_time DenseNet121

16 images, beside the float model's where Keras has the verb; each model in a process of its own.
"Again" is the second time, in which nothing is traced.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.models import BATCH, batch, build

NAMES = ("MobileNetV2", "ResNet50", "EfficientNetB0")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of keras.applications")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        measure(arguments.one)
        return
    print("| model | verb | float | int8 | again |\n| --- | --- | --- | --- | --- |", flush=True)
    for name in arguments.names or NAMES:
        subprocess.run([sys.executable, "-m", "benchmarks.first_time", "--one", name], check=True)


def seconds(verb: Callable[[], Any]) -> float:
    """CPU time of this process."""
    start = time.process_time()
    verb()
    return time.process_time() - start


def measure(name: str) -> None:
    """Prints a row for each verb."""
    import keras_qat
    from keras_qat.keras2.backend import keras

    model = build(name)
    x, y = batch(model)

    def row(verb: str, ours: Callable[[], Any], theirs: Callable[[], Any] | None = None) -> None:
        known = "" if theirs is None else f"{seconds(theirs):.1f} s"
        first, again = seconds(ours), seconds(ours)
        print(f"| {name} | {verb} | {known} | {first:.1f} s | {again:.1f} s |", flush=True)

    made: list[Any] = []
    row("quantize_model", lambda: made.append(keras_qat.quantize_model(model)))
    qat = made[0]
    row("calibrate", lambda: keras_qat.calibrate(qat, x))
    row("predict", lambda: qat.predict(x, BATCH, 0), lambda: model.predict(x, BATCH, 0))
    row("qat(x)", lambda: qat(x), lambda: model(x))
    for variant in (model, qat):
        variant.compile("sgd", "sparse_categorical_crossentropy")
    options = {"batch_size": BATCH, "verbose": 0}
    row("fit", lambda: qat.fit(x, y, **options), lambda: model.fit(x, y, **options))
    row("evaluate", lambda: qat.evaluate(x, y, **options), lambda: model.evaluate(x, y, **options))
    keras_qat.calibrate(qat, x)
    with tempfile.TemporaryDirectory() as folder:
        kept, file = Path(folder) / "model.keras", Path(folder) / "model.tflite"
        row("save", lambda: qat.save(kept), lambda: model.save(Path(folder) / "float.keras"))
        row("load_model", lambda: keras.models.load_model(kept))
        row("export_tflite", lambda: keras_qat.export_tflite(qat, file))
        row("verify", lambda: keras_qat.verify(qat, file, x))
        row("verify, per layer", lambda: keras_qat.verify(qat, file, x, per_layer=True))
        row("simulate", lambda: keras_qat.simulate(qat, x))


if __name__ == "__main__":
    main()
