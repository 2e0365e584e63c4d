"""What a short `fit` with callbacks costs, tracing included: 5 epochs of a small model.

    python -m benchmarks.fit_time                 two models, 5 pairs each
    python -m benchmarks.fit_time residual --pairs 9
    python -m benchmarks.fit_time residual --profile

1797 handwritten digits in batches of 32, as README trains: quantization from the second epoch on,
BatchNormalization and ranges frozen from the fourth and the fifth. Each form is trained in a fresh
process, float and int8 in turn, the first of them another one in each pair. CPU time of `fit`.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks import markdown

EPOCHS, BATCH = 5, 32
FORMS = ("float", "int8", "int8 with callbacks")
NAMES = ("plain", "residual")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="of int8 with callbacks")
    parser.add_argument("--one", metavar="FORM", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.names or NAMES
    if options.one or options.profile:
        for name in names:
            print(fit_seconds(name, options.one or FORMS[-1], options.profile))
        return
    widths = (9, 20, 9, 6, 30)
    print(markdown.head(("model", "form", "CPU", "ratio", "of each pair"), widths), flush=True)
    for name in names:
        times: dict[str, list[float]] = {form: [] for form in FORMS}
        for pair in range(options.pairs):
            for form in FORMS if pair % 2 else reversed(FORMS):
                times[form].append(in_process(name, form))
        for form, seconds in times.items():
            ratios = [one / two for one, two in zip(seconds, times["float"], strict=True)]
            median = f"{statistics.median(seconds):.2f} s"
            each = " ".join(f"{ratio:.2f}" for ratio in ratios)
            cells = (name, form, median, f"{statistics.median(ratios):.2f}", each)
            print(markdown.row(cells, widths), flush=True)


def in_process(name: str, form: str) -> float:
    """Trains one form in a process of its own, and returns the CPU seconds of `fit`."""
    command = [sys.executable, "-m", "benchmarks.fit_time", name, "--one", form]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(run.stdout.split()[-1])


def fit_seconds(name: str, form: str, profile: bool = False) -> float:
    """Trains one form in this process, and returns the CPU seconds of `fit`."""
    from sklearn.datasets import load_digits

    import keras_qat
    from keras_qat.keras2.backend import keras

    x, y = load_digits(return_X_y=True)
    x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
    warm_up = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    warm_up.compile("adam", "mse")
    warm_up.fit(y[:BATCH, None], y[:BATCH], verbose=0)
    model = network(name)
    if form != "float":
        model = keras_qat.quantize_model(model)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    steps, callbacks = len(x) // BATCH, keras_qat.callbacks
    given = [
        callbacks.QuantDelay(steps),
        callbacks.FreezeBatchNorm(3 * steps),
        callbacks.FreezeRanges(4 * steps),
    ]
    profiler = cProfile.Profile(time.process_time)
    start = time.process_time()
    if profile:
        profiler.enable()
    model.fit(x, y, BATCH, EPOCHS, verbose=0, callbacks=given if form == FORMS[-1] else [])
    profiler.disable()
    seconds = time.process_time() - start
    if profile:
        pstats.Stats(profiler).sort_stats("cumtime").print_stats(80)
    return seconds


def network(name: str) -> Any:
    """Makes two convolutions, or four residual blocks, before the layer that names a digit."""
    from keras_qat.keras2.backend import keras

    layers = keras.layers
    keras.utils.set_random_seed(0)

    def normed(x: Any, layer: Any, relu: bool = True) -> Any:
        x = layers.BatchNormalization()(layer(x))
        return layers.ReLU()(x) if relu else x

    inputs = keras.Input((8, 8, 1))
    x = normed(inputs, layers.Conv2D(16, 3, padding="same", use_bias=False))
    if name == "plain":
        x = normed(x, layers.Conv2D(32, 3, padding="same", use_bias=False))
    else:
        for _ in range(4):
            y = normed(x, layers.DepthwiseConv2D(3, padding="same", use_bias=False))
            y = normed(y, layers.Conv2D(16, 1, use_bias=False), relu=False)
            x = layers.Add()([x, y])
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(x))


if __name__ == "__main__":
    main()
