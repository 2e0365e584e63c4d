"""How long exporting to TFLite takes, beside tensorflow_model_optimization.

    python -m benchmarks.export_time                 # ResNet50
    python -m benchmarks.export_time MobileNetV2 --pairs 5 --size 224
    python -m benchmarks.export_time --all           # every ResNet and EfficientNet

Both convert a quantization-aware model that has seen data, to int8 with int8 ends, in one process
and taking turns; the ratio is that of each pair. Without tfmot only keras_qat is timed. Peak memory
is what the export adds to the process that holds the model, the file included, in multiples of the
float weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import keras_qat
from benchmarks.memory import read_megabytes
from keras_qat.keras2.backend import keras

ALL = (
    *(f"ResNet{depth}{version}" for version in ("", "V2") for depth in (50, 101, 152)),
    *(f"EfficientNetB{size}" for size in range(8)),
)


def build(name: str, size: int) -> Any:
    """A model of `keras.applications` with random weights."""
    keras.utils.set_random_seed(1)
    return getattr(keras.applications, name)(
        weights=None, input_shape=(size, size, 3), classes=10, classifier_activation=None
    )


def exporters(name: str, size: int) -> dict[str, Callable[[], bytes]]:
    """What converts, by library. tfmot quantizes few models, and may not be installed."""
    model = build(name, size)
    x = np.random.default_rng(1).uniform(-1, 1, (8, size, size, 3)).astype(np.float32)
    qat = keras_qat.quantize_model(model)
    keras_qat.calibrate(qat, x, batch_size=8)
    result = {"keras_qat": lambda: keras_qat.export_tflite(qat)}
    try:
        from tensorflow_model_optimization.quantization.keras import quantize_model
    except ImportError:
        return result
    theirs = quantize_model(build(name, size))
    theirs(x, training=True)

    def convert() -> bytes:
        converter = tf.lite.TFLiteConverter.from_keras_model(theirs)
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        converter.inference_input_type = converter.inference_output_type = tf.int8
        return converter.convert()

    return result | {"tfmot": convert}


def peak_memory(name: str, size: int) -> float:
    """What one export takes at most beside the model, in multiples of the float weights (Linux)."""
    model = keras_qat.quantize_model(build(name, size))
    megabytes = 4 * model.count_params() / 2**20
    keras_qat.calibrate(model, np.zeros((1, size, size, 3), np.float32), batch_size=1)
    gc.collect()
    before = read_megabytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # Peak memory counts from here.
    keras_qat.export_tflite(model)
    return (read_megabytes("VmHWM") - before) / megabytes


def measure(name: str, size: int, pairs: int) -> dict[str, Any]:
    """Seconds and bytes per library, and the ratio of each pair."""
    result = exporters(name, size)
    seconds: dict[str, list[float]] = {library: [] for library in result}
    sizes = {}
    for _ in range(pairs):
        for library, export in result.items():
            start = time.perf_counter()
            sizes[library] = len(export())
            seconds[library].append(round(time.perf_counter() - start, 2))
    ratios = (
        [ours / theirs for ours, theirs in zip(*seconds.values(), strict=True)]
        if len(seconds) == 2
        else []
    )
    return {"model": name, "size": size, "seconds": seconds, "bytes": sizes, "ratios": ratios}


def in_own_process(name: str, size: int) -> float:
    """`peak_memory`, in a new process."""
    command = [sys.executable, "-m", "benchmarks.export_time", "--memory-of", name]
    done = subprocess.run(
        [*command, "--size", str(size)], stdout=subprocess.PIPE, check=True, text=True
    )
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    """Prints a table, and writes the figures as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", default=["ResNet50"])
    parser.add_argument("--size", type=int, default=96, help="height and width of the images")
    parser.add_argument("--pairs", type=int, default=3, help="how often each is timed")
    parser.add_argument("--all", action="store_true", help="every ResNet and EfficientNet")
    parser.add_argument("--memory-of", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.memory_of:
        print(peak_memory(options.memory_of, options.size))
        return
    print(f"{'model':<16}{'library':<12}{'median':>10}{'MB':>8}  all, in seconds")
    results = []
    for name in ALL if options.all else options.models:
        result = measure(name, options.size, options.pairs)
        result["peak_memory"] = in_own_process(name, options.size)
        results.append(result)
        for library, seconds in result["seconds"].items():
            megabytes = result["bytes"][library] / 1e6
            median = f"{statistics.median(seconds):.1f} s"
            print(f"{result['model']:<16}{library:<12}{median:>10}{megabytes:>8.1f}  {seconds}")
        if result["ratios"]:
            ratio = statistics.median(result["ratios"])
            print(f"{result['model']:<16}median of the pairs' ratios: {ratio:.2f}")
        peak = result["peak_memory"]
        print(f"{result['model']:<16}peak memory: {peak:.1f} times the weights", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
