"""How a training step grows with layers, pixels and examples, in float and quantization-aware.

    python -m benchmarks.growth                  all series: some six minutes on 2 cores
    python -m benchmarks.growth pixels

Steps of both forms are taken in turns in one process, their median is printed; peak memory is that
of a process of its own for each form.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from typing import Any

from benchmarks import step_time
from benchmarks.step_time import functions, in_turns, peak_memory

SERIES = {
    "layers": (5, 20, 80, 160),
    "pixels": (32, 64, 128, 256),
    "examples": (2, 8, 32, 128),
}
"""What grows: blocks of a chain of residual blocks, the width and height of the images that
MobileNetV2 gets four of, how many of 64x64 pixels it gets at once."""
FORMS = ("float", "int8")
TURNS = 7


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("series", nargs="*", metavar="SERIES")
    parser.add_argument("--times-of", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--memory-of", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.times_of:
        print(json.dumps(times(*options.times_of)))
        return
    if options.memory_of:
        print(json.dumps(memory(*options.memory_of)))
        return
    in_own_process = partial(step_time.in_own_process, program="benchmarks.growth")
    print("| | | float, ms | int8, ms | float, MB | int8, MB |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for series in options.series or SERIES:
        for size in SERIES[series]:
            seconds = in_own_process("--times-of", series, str(size))
            cells = [f"{1000 * seconds[form]:.0f}" for form in FORMS]
            for form in FORMS:
                cells.append(str(in_own_process("--memory-of", series, str(size), form)))
            print(f"| {series} | {size} | {' | '.join(cells)} |", flush=True)


def build(series: str, size: int) -> tuple[Any, tuple[Any, Any]]:
    """A float model, with images and labels."""
    import numpy as np

    from benchmarks import scale
    from keras_qat.keras2.backend import keras

    side, examples = 64, 4
    if series == "layers":
        chain = scale.build(f"chain:{size}")
        x = keras.layers.GlobalAveragePooling2D()(chain.output)
        model = keras.Model(chain.input, keras.layers.Dense(10, "softmax")(x))
    else:
        side, examples = (size, 4) if series == "pixels" else (side, size)
        shape = (side, side, 3)
        model = keras.applications.MobileNetV2(weights=None, input_shape=shape, classes=10)
    images = np.random.default_rng(1).uniform(-1, 1, (examples, *model.input_shape[1:]))
    return model, (images.astype(np.float32), np.arange(examples) % 10)


def times(series: str, size: str) -> dict[str, float]:
    """Seconds of a step of each form."""
    from benchmarks.models import VARIANTS

    model, data = build(series, int(size))
    steps = {form: functions(VARIANTS[form](model), data, False)[0] for form in FORMS}
    return {form: statistics.median(in_turn) for form, in_turn in in_turns(steps, TURNS).items()}


def memory(series: str, size: str, form: str) -> int:
    """Peak memory of this process in MB, after some steps of one form."""
    from benchmarks.models import VARIANTS

    model, data = build(series, int(size))
    model = VARIANTS[form](model)
    return peak_memory(model, data)


if __name__ == "__main__":
    main()
