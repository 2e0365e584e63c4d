"""Memory and time that `verify` and large embeddings take.

    python -m benchmarks.memory

Memory is the most that the process holds during a call beyond what it held before. Each case is a
process of its own, and `predict` runs before `verify`.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROWS, FEATURES = 500_000, 128
EXAMPLES = (2_000, 8_000)
CASES = ("predict", "export", *map(str, EXAMPLES))


def main() -> None:
    """The command."""
    if len(sys.argv) == 1:
        for case in CASES:
            subprocess.run([sys.executable, "-m", "benchmarks.memory", case], check=True)
    elif sys.argv[1].isdigit():
        measure_verify(int(sys.argv[1]))
    else:
        measure_embedding(sys.argv[1])


def measure_embedding(verb: str) -> None:
    """Prints what `predict` or `export_tflite` of a large embedding takes."""
    import keras_qat
    from keras_qat.keras2.backend import keras

    ids = keras.Input((20,), dtype="int32")
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(ROWS, FEATURES)(ids))
    model = keras.Model(ids, keras.layers.Dense(4)(x))
    x = np.random.default_rng(0).integers(0, ROWS, (256, 20)).astype("int32")
    qat = keras_qat.quantize_model(model)
    keras_qat.calibrate(qat, x[:32])
    del model
    gc.collect()
    size = ROWS * FEATURES * 4 / 2**20
    if verb == "export":
        report("export_tflite", lambda: keras_qat.export_tflite(qat), size)
        return
    for call in ("first", "second", "third"):
        report(f"{call} predict", lambda: qat.predict(x, verbose=0), size)


def measure_verify(count: int) -> None:
    """Prints what `predict` and `verify` of a small network take."""
    import keras_qat
    from benchmarks.networks import ds_cnn

    model = ds_cnn((49, 10, 1))
    x = np.random.default_rng(0).normal(size=(count, 49, 10, 1)).astype("float32")
    qat = keras_qat.quantize_model(model)
    keras_qat.calibrate(qat, x[:64])
    file = keras_qat.export_tflite(qat)
    for _ in range(2):
        report(f"float predict, {count} examples", lambda: model.predict(x, verbose=0))
        report(f"predict, {count} examples", lambda: qat.predict(x, verbose=0))
    for _ in range(2):
        report(f"verify, {count} examples", lambda: keras_qat.verify(qat, file, x))


def report(name: str, call: Callable[[], Any], size: float = 0.0) -> None:
    """Prints the CPU seconds of a call and the MB that it takes, also relative to a size."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # Linux counts the peak from now on.
    before, start = read_megabytes("VmRSS"), time.process_time()
    call()
    seconds = time.process_time() - start
    peak, after = (read_megabytes(key) - before for key in ("VmHWM", "VmRSS"))
    relative = f" ({peak / size:.2f} of the float model)" if size else ""
    print(f"{name}: {seconds:.2f} s, {peak:.0f} MB{relative}, keeps {after:.0f} MB", flush=True)


def read_megabytes(key: str) -> float:
    """Returns a figure of this process in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(key + ":"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
