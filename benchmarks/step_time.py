"""What a quantization-aware training step costs against a float one.

    python -m benchmarks.step_time                       all models: about 15 minutes on 2 cores
    python -m benchmarks.step_time MobileNetV2           this one
    python -m benchmarks.step_time demo --jit-compile    compiled by XLA
    python -m benchmarks.step_time --cpu                 CPU time, where others use the machine too

All forms of a model are trained in one process, one step of each in turn, so that what else the
machine does meets all of them. A ratio is the median over the turns of step time divided by the
float step's in the same turn. Peak memory is that of a process of its own for each form. With
tensorflow_model_optimization installed, that library is measured too.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import markdown

ROOT = Path(__file__).parent.parent
MODELS = ("MobileNet", "MobileNetV2", "ResNet50", "EfficientNetB0", "demo")
"""Constructors of `keras.applications`, and the network of `tutorials/demo.py`."""
WARM_UP = 24
"""Steps before the first that counts; functions that are called often are traced after 20."""
COLUMNS = (
    ("model", 15),
    ("form", 8),
    ("step", 8),
    ("ratio", 6),
    ("inference", 9),
    ("first step", 10),
    ("quantize", 8),
    ("peak memory", 18),
)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="models; all five by default")
    parser.add_argument("--turns", type=int, default=20, help="steps of each form, 20 by default")
    parser.add_argument("--jit-compile", action="store_true", help="compile with XLA")
    parser.add_argument("--cpu", action="store_true", help="CPU time of all threads together")
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--times-of", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--memory-of", nargs=2, metavar=("NAME", "FORM"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.times_of:
        clock = time.process_time if arguments.cpu else time.perf_counter
        result = measure(arguments.times_of, arguments.turns, arguments.jit_compile, clock)
        print(json.dumps(result))
        return
    if arguments.memory_of:
        name, form = arguments.memory_of
        print(json.dumps(memory_of(name, form)))
        return
    options = ["--turns", str(arguments.turns), *["--jit-compile"] * arguments.jit_compile]
    options += ["--cpu"] * arguments.cpu
    print(markdown.head(*zip(*COLUMNS, strict=True)), flush=True)
    rows = []
    for name in arguments.names or MODELS:
        result = in_own_process("--times-of", name, *options)
        for form, row in result.items():
            if not arguments.no_memory:
                row["peak_mb"] = in_own_process("--memory-of", name, form)
            base = result["float"]
            rows.append({"model": name, "form": form, **row})
            print(line(rows[-1], base), flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=1) + "\n")


def measure(
    name: str,
    turns: int,
    jit_compile: bool,
    clock: Callable[[], float] = time.perf_counter,
    steps_a_turn: int = 1,
) -> dict[str, dict[str, Any]]:
    """The figures of each form of a model: seconds, and ratios to the float form."""
    from benchmarks.models import VARIANTS, batch, build, has_tfmot

    result: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], Any]] = {}
    inferences: dict[str, Callable[[], Any]] = {}
    for form, quantize in VARIANTS.items():
        if form == "tfmot" and not has_tfmot():
            continue
        model = build(name)
        try:
            seconds, quantized = timed(partial(quantize, model))
        except Exception as error:  # What tfmot refuses is a result too.
            if form != "tfmot":
                raise
            first_line = str(error).partition("\n")[0]
            print(f"{name}: tfmot: {type(error).__name__}: {first_line}"[:100], file=sys.stderr)
            continue
        steps[form], inferences[form] = functions(quantized, batch(model), jit_compile)
        first, _ = timed(steps[form])
        result[form] = {"quantize_s": seconds, "first_step_s": first}
        inferences[form]()
    for kind, calls in (("step", steps), ("inference", inferences)):
        times = in_turns(calls, turns, clock, steps_a_turn)
        for form, row in result.items():
            pairs = zip(times[form], times["float"], strict=True)
            row[f"{kind}_s"] = statistics.median(times[form])
            row[f"{kind}_ratio"] = statistics.median(one / base for one, base in pairs)
    return result


def functions(
    model: Any, data: tuple[Any, Any], jit_compile: bool
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A training step of a model, and a run with `training=False`, without Python around them."""
    import tensorflow as tf

    from keras_qat.keras2.backend import keras

    loss = keras.losses.SparseCategoricalCrossentropy()
    model.compile(keras.optimizers.SGD(1e-3), loss, jit_compile=jit_compile)
    dataset = tf.data.Dataset.from_tensors(data).repeat()
    if tf.config.list_physical_devices("GPU"):
        dataset = dataset.apply(tf.data.experimental.prefetch_to_device("/GPU:0"))
    batches = iter(dataset)
    train, predict = model.make_train_function(), model.make_predict_function()
    object.__setattr__(model, "undisturbed", True)  # As in `fit`, which else reads counters.
    return lambda: train(batches), lambda: predict(batches)


def in_turns(
    calls: dict[str, Callable[[], Any]],
    turns: int,
    clock: Callable[[], float] = time.perf_counter,
    steps_a_turn: int = 1,
) -> dict[str, list[float]]:
    """Seconds that each call took, as many of each in every turn as asked for."""
    import tensorflow as tf

    def steps(call: Callable[[], Any], number: int) -> None:
        for _ in range(number):
            call()
        tf.test.experimental.sync_devices()  # A call returns when all is launched on a GPU.

    for call in calls.values():
        steps(call, WARM_UP)
    times: dict[str, list[float]] = {form: [] for form in calls}
    for _ in range(turns):
        for form, call in calls.items():
            seconds, _ = timed(partial(steps, call, steps_a_turn), clock)
            times[form].append(seconds / steps_a_turn)
    return times


def timed(
    call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter
) -> tuple[float, Any]:
    """Seconds that a call took, and what it returned."""
    start = clock()
    result = call()
    return clock() - start, result


def memory_of(name: str, form: str) -> int:
    """`peak_memory` of one form of a model."""
    from benchmarks.models import VARIANTS, batch, build

    model = VARIANTS[form](build(name))
    return peak_memory(model, batch(model))


def peak_memory(model: Any, data: tuple[Any, Any]) -> int:
    """Peak memory of this process in MB, after some training steps of a model."""
    gc.collect()  # The float model, which training does not need any more.
    step, _ = functions(model, data, jit_compile=False)
    for _ in range(3):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def in_own_process(*arguments: str, program: str = "benchmarks.step_time") -> Any:
    """What a program prints last in a new process: this one, with other arguments."""
    # This one stays small: a new process counts its parent's memory as its own peak.
    command = [sys.executable, "-m", program, *arguments]
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_USE_LEGACY_KERAS": "1", **os.environ}
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True, env=environment
    )
    return json.loads(done.stdout.splitlines()[-1])


def line(row: dict[str, Any], base: dict[str, Any]) -> str:
    """A row of the table, in Markdown."""
    memory = "-"
    if "peak_mb" in row:
        memory = f"{row['peak_mb']} MB ({row['peak_mb'] / base['peak_mb']:.2f}x)"
    cells = (
        row["model"],
        row["form"],
        f"{1000 * row['step_s']:.0f} ms",
        f"{row['step_ratio']:.2f}x",
        f"{row['inference_ratio']:.2f}x",
        f"{row['first_step_s']:.1f} s",
        f"{row['quantize_s']:.1f} s",
        memory,
    )
    return markdown.row(cells, [width for _, width in COLUMNS])


if __name__ == "__main__":
    main()
