"""How time and memory of each verb grow with the number of layers.

    python -m benchmarks.scale                 ResNets, DenseNets and chains of up to 1000 blocks
    python -m benchmarks.scale chain:10 chain:100

Each model is measured in a process of its own, in seconds of CPU time. "predict" is the first one,
of two images. The last column is seconds in all for 1000 layers: where growth is linear it stays
the same within a series.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import markdown

ROOT = Path(__file__).parent.parent
SERIES = (
    *("ResNet50", "ResNet101", "ResNet152"),
    *("DenseNet121", "DenseNet201"),
    *("chain:10", "chain:100", "chain:1000"),
)
VERBS = ("plan", "quantize_model", "predict", "save", "load", "export")
SIZE = 64


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SERIES)}")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one)))
        return
    titles = ("model      ", "layers", *VERBS, "peak MB", "s/1000 layers")
    widths = [len(title) for title in titles]
    print(markdown.head(titles, widths), flush=True)
    rows = []
    for name in arguments.names or SERIES:
        row = in_own_process(name)
        rows.append(row)
        seconds = [row["seconds"][verb] for verb in VERBS]
        cells = (
            row["name"],
            str(row["layers"]),
            *(f"{second:.2f} s" for second in seconds),
            str(row["peak_mb"]),
            f"{1000 * sum(seconds) / row['layers']:.1f}",
        )
        print(markdown.row(cells, widths), flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=1) + "\n")


def in_own_process(name: str) -> dict[str, Any]:
    """`measure`, in a new process."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", "--one", name],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        env={"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ},
    )
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def build(name: str) -> Any:
    """A model of `keras.applications`, or a chain of so many residual blocks."""
    from keras_qat.keras2.backend import keras

    if not name.startswith("chain:"):
        constructor = getattr(keras.applications, name)
        return constructor(weights=None, input_shape=(SIZE, SIZE, 3), classes=10)
    sys.setrecursionlimit(20_000)  # Keras walks back a chain by recursion, in float too.
    layers = keras.layers
    inputs = x = keras.Input((8, 8, 8))
    for _ in range(int(name.split(":")[1])):
        y = layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same", use_bias=False)(x))
        x = layers.add([x, layers.ReLU()(y)])
    return keras.Model(inputs, x)


def measure(name: str) -> dict[str, Any]:
    """Seconds of each verb on a model, and the peak memory of this process in MB."""
    import numpy as np

    import keras_qat
    from keras_qat.keras2.backend import keras

    model = build(name)
    seconds = {}

    def timed(verb: str, call: Any) -> Any:
        start = time.process_time()
        result = call()
        seconds[verb] = round(time.process_time() - start, 3)
        return result

    timed("plan", lambda: keras_qat.plan(model))
    qat = timed("quantize_model", lambda: keras_qat.quantize_model(model))
    images = np.random.default_rng(1).normal(size=(2, *model.input_shape[1:]))
    qat(images, training=True)
    timed("predict", lambda: qat.predict(images, verbose=0))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        timed("save", lambda: qat.save(path))
        timed("load", lambda: keras.models.load_model(path))
    timed("export", lambda: keras_qat.export_tflite(qat))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return {"name": name, "layers": len(model.layers), "seconds": seconds, "peak_mb": peak}


if __name__ == "__main__":
    main()
