"""Asks the GPU that is there what could not be known without one, and prints a table.

    python -m benchmarks.gpu              all checks: `make test-gpu`
    python -m benchmarks.gpu --cpu repeat predict    some of them, on the CPU

tests     the tests of exactness: arithmetic, operators and whole networks
predict   whether `predict` gives every code of the file, which runs on the CPU
repeat    whether two trainings give the same weights bit for bit, with op determinism
copies    how often a step copies from the GPU to the host, which waits for it: by the graph and,
          on a GPU, by the profiler
memory    peaks of the GPU's memory against float, with the steps below
steps     step times against float, 128 images of 224x224, with XLA and without, in float32 and
          mixed_float16

Each check is a process of its own. The exit status is 1 if one fails, or if there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import markdown
from benchmarks.profile_step import events
from benchmarks.step_time import ROOT, in_own_process

TESTS = ("tests/arithmetic", "tests/ops", "tests/integer_graph", "tests/end_to_end")
BATCH, SIZE = 128, 224
GOALS = {"ResNet50": (1.15, 1.10), "MobileNetV2": (1.30, 1.15)}
"""Step times against float's that we aim at: without XLA, and with it."""
MEMORY_GOAL = 1.25
"""Peak memory against float's that we aim at; of copies to the host there should be no more."""
FORMS = ("float", "int8", "frozen")
POLICIES = ("float32", "mixed_float16")
TURNS = 20
STEPS_A_TURN = 8
"""The host launches a step while the GPU computes the one before, as it does in `fit`."""


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="all by default")
    parser.add_argument("--cpu", action="store_true", help="run checks where there is no GPU too")
    parser.add_argument("--one", metavar="CHECK", help=argparse.SUPPRESS)
    parser.add_argument("--peak-of", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_of:
        print(json.dumps(peak_of(*arguments.peak_of)))
        return
    if arguments.one:
        print(json.dumps(CHECKS[arguments.one]()))
        return
    device = in_own_process("--one", "device", program="benchmarks.gpu")
    if device is None and not arguments.cpu:
        sys.exit("TensorFlow sees no GPU here: nothing was run.")
    print(f"{device or 'CPU'}\n\n" + markdown.head(("check", "result", "ok"), (32, 44, 3)))
    passed = True
    for check in arguments.checks or [name for name in CHECKS if name != "device"]:
        for label, result, is_good in in_own_process("--one", check, program="benchmarks.gpu"):
            passed &= is_good
            row = (label, result, "yes" if is_good else "no")
            print(markdown.row(row, (32, 44, 3)), flush=True)
    sys.exit(not passed)


Rows = list[tuple[str, str, bool]]
"""Label, result and whether it is what is promised or aimed at."""


def device() -> str | None:
    """The name of the first GPU; None without one."""
    import tensorflow as tf

    for gpu in tf.config.list_physical_devices("GPU"):
        return str(tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name))
    return None


def tests() -> Rows:
    """Runs the tests of exactness."""
    command = [sys.executable, "-m", "pytest", "-q", *TESTS]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    sys.stderr.write(done.stdout)
    return [("tests of exactness", done.stdout.splitlines()[-1], done.returncode == 0)]


def predict() -> Rows:
    """Compares `predict` with the file, for some networks."""
    import keras_qat
    from benchmarks.models import batch, build

    rows = []
    for name in ("demo", "MobileNetV2"):
        for recipe in ("int8", "int16x8"):
            model = build(name)
            x, _ = batch(model)
            qat = keras_qat.quantize_model(model, recipe)
            keras_qat.calibrate(qat, x)
            report = keras_qat.verify(qat, keras_qat.export_tflite(qat), x, per_layer=False)
            identical = report.identical
            rows.append((f"predict, {name} {recipe}", f"{identical:.4%} of codes", identical == 1))
    return rows


def repeat() -> Rows:
    """Trains twice with op determinism."""
    import numpy as np
    import tensorflow as tf

    import keras_qat
    from benchmarks.models import batch, build
    from keras_qat.keras2.backend import keras

    tf.config.experimental.enable_op_determinism()

    def trained() -> list[Any]:
        qat = keras_qat.quantize_model(build("demo"))
        qat.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy")
        for _ in range(5):
            qat.train_on_batch(*batch(qat))
        return list(qat.get_weights())

    pairs = list(zip(trained(), trained(), strict=True))
    same = sum(np.array_equal(one, other) for one, other in pairs)
    return [("two trainings, bit for bit", f"{same} of {len(pairs)} weights", same == len(pairs))]


def copies() -> Rows:
    """Counts what a step copies to the host."""
    from benchmarks.models import VARIANTS, batch, build
    from benchmarks.operations import counts_of, in_a_step_of_fit
    from keras_qat.arithmetic import plain_operations

    is_on_gpu = device() is not None
    plain_operations.has_gpu = lambda: True
    rows: Rows = []
    for name in GOALS:
        of_float = 0.0
        for form in FORMS:
            model = VARIANTS[form](build(name))
            copied: float = counts_of(model, batch(model)).host_reads.total()
            result = f"{copied} in the graph and around it"
            if is_on_gpu:
                copied = in_a_step_of_fit(copies_to_host, model, batch(model))
                result = f"{result}, {copied:.1f} seen"
            of_float = copied if form == "float" else of_float
            is_good = copied <= of_float
            rows.append((f"{name}, {form}: copies to the host", result, is_good))
    return rows


def copies_to_host(call: Callable[[], Any]) -> int:
    """The number of copies from a GPU to the host in a call, as the profiler sees them."""
    names = [name for plane, name, _ in events(call, 1) if "GPU" in plane]
    return sum("MemcpyD2H" in name for name in names)


def memory() -> Rows:
    """Compares peaks of memory with float's."""
    rows = []
    for policy in POLICIES:
        for name in GOALS:
            peaks = {
                form: in_own_process("--peak-of", name, form, policy, program="benchmarks.gpu")
                for form in FORMS
            }
            for form, peak in peaks.items():
                ratio = peak / peaks["float"]
                result = f"{peak:.0f} MB, {ratio:.2f}x (goal {MEMORY_GOAL:.2f}x)"
                rows.append((f"{name} {policy}, {form}: memory", result, ratio <= MEMORY_GOAL))
    return rows


def peak_of(name: str, form: str, policy: str) -> float:
    """Peak memory of some training steps in MB: a GPU's, or without one this process's."""
    import tensorflow as tf

    from benchmarks import models
    from benchmarks.step_time import functions, peak_memory
    from keras_qat.keras2.backend import keras

    keras.mixed_precision.set_global_policy(policy)
    if device() is None:
        model = models.VARIANTS[form](models.build(name))
        return peak_memory(model, models.batch(model))
    models.BATCH, models.SIZE = BATCH, SIZE
    model = models.VARIANTS[form](models.build(name))
    step, _ = functions(model, models.batch(model), jit_compile=False)
    step()  # While cuDNN tries algorithms it takes more.
    tf.config.experimental.reset_memory_stats("GPU:0")
    for _ in range(3):
        step()
    return float(tf.config.experimental.get_memory_info("GPU:0")["peak"]) / 2**20


def steps() -> Rows:
    """Compares step times with float's."""
    from benchmarks import models
    from benchmarks.step_time import measure
    from keras_qat.keras2.backend import keras

    models.BATCH, models.SIZE = BATCH, SIZE
    for slow in ("contrib", "tfmot"):
        models.VARIANTS.pop(slow)
    rows = []
    for policy in POLICIES:
        keras.mixed_precision.set_global_policy(policy)
        for name, goals in GOALS.items():
            for jit_compile, goal in zip((False, True), goals, strict=True):
                measured = measure(name, TURNS, jit_compile, steps_a_turn=STEPS_A_TURN)
                for form, row in measured.items():
                    label = f"{name} {policy}{' XLA' if jit_compile else ''}, {form}"
                    result = f"{1000 * row['step_s']:.1f} ms, {row['step_ratio']:.2f}x"
                    rows.append((label, f"{result} (goal {goal:.2f}x)", row["step_ratio"] <= goal))
    return rows


CHECKS: dict[str, Callable[[], Any]] = {
    "device": device,
    "tests": tests,
    "predict": predict,
    "repeat": repeat,
    "copies": copies,
    "memory": memory,
    "steps": steps,
}

if __name__ == "__main__":
    main()
