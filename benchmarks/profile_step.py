"""Where the time of a training step goes, operation by operation, in each form of a model.

    python -m benchmarks.profile_step MobileNetV2
    python -m benchmarks.profile_step ResNet50 --rows 30 --forms float int8 frozen
    python -m benchmarks.profile_step MobileNetV2 --forms float int8 --inference

Milliseconds of all cores together per step, from TensorFlow's profiler: all forms of a model in
turns in one process, of each operation the least of the rounds. Operations of one kind are
added up; convolutions (also transposed and by channel, with their gradients) are one row, as are
those of BatchNormalization. Small operations on ranges and counters, many but quick, are the row
"others", with how many operations a step runs in all.
"""

from __future__ import annotations

import argparse
import collections
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

STEPS, ROUNDS = 6, 3
WARM_UP = 24
"""Steps before the first round; functions that are called often are traced after 20."""
GROUPS = {"Conv": "convolutions", "BatchNorm": "BatchNormalization", "MatMul": "dense"}
"""Part of an operation's name -> the row that it is counted in."""
SKIPPED = ("__inference", "_SOURCE", "_SINK", "Iterator", "ReadVariableOp")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", help="a constructor of keras.applications, or demo")
    parser.add_argument("--rows", type=int, default=16, help="the longest; 16 by default")
    parser.add_argument("--forms", nargs="*", metavar="FORM", help="all by default")
    parser.add_argument("--inference", action="store_true", help="instead of a training step")
    arguments = parser.parse_args()
    from benchmarks.models import VARIANTS, batch, build, has_tfmot
    from benchmarks.step_time import functions

    steps = {}
    for form in arguments.forms or VARIANTS:
        if form == "tfmot" and not has_tfmot():
            continue
        model = VARIANTS[form](build(arguments.name))
        training, inference = functions(model, batch(model), jit_compile=False)
        training()  # Without ranges a model would predict in float.
        steps[form] = inference if arguments.inference else training
        for _ in range(WARM_UP):
            steps[form]()
    rounds = [{form: profile(step) for form, step in steps.items()} for _ in range(ROUNDS)]
    print_table({form: least([round[form] for round in rounds]) for form in steps}, arguments.rows)


def least(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The least of each row."""
    return {row: min(round.get(row, 0.0) for round in rounds) for row in set().union(*rounds)}


def profile(step: Any) -> dict[str, float]:
    """Milliseconds per step of each row, and the number of operations as "operations"."""
    total: dict[str, float] = collections.defaultdict(float)
    for plane, event, milliseconds in events(step, STEPS):
        # An operation's events are called "name:kind".
        name, colon, kind = event.partition(":")
        kind = kind.partition("#")[0].strip()
        if not colon or kind.startswith((":", *SKIPPED)) or name.startswith(SKIPPED):
            continue
        if "CPU" in plane:
            row = next((row for part, row in GROUPS.items() if part in kind), kind)
            total[row] += milliseconds / STEPS
            total["operations"] += 1 / STEPS
    return total


def events(step: Callable[[], Any], steps: int) -> Iterator[tuple[str, str, float]]:
    """Yields what TensorFlow's profiler sees of some steps: device, name and milliseconds."""
    import tensorflow as tf
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=3, python_tracer_level=0)
    with tempfile.TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder, options):
            for _ in range(steps):
                step()
        (path,) = Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                yield plane.name, name, event.duration_ps / 1e9


def print_table(found: dict[str, dict[str, float]], rows: int) -> None:
    """The longest rows in Markdown, then the rest of them, the sum and the count."""
    counts = [item.pop("operations") for item in found.values()]
    kinds = {kind for item in found.values() for kind in item}
    longest = {kind: max(item.get(kind, 0.0) for item in found.values()) for kind in kinds}
    names = sorted(longest, key=lambda kind: -longest[kind])[:rows]
    print(f"| {'ms per step':24s} | " + " | ".join(f"{form:>8s}" for form in found) + " |")
    print(f"|{'-' * 26}|" + "|".join("-" * 9 + ":" for _ in found) + "|")
    for name in names:
        print_row(name, [item.get(name, 0.0) for item in found.values()])
    totals = [sum(item.values()) for item in found.values()]
    shown = [sum(item.get(name, 0.0) for name in names) for item in found.values()]
    print_row("others", [all_ - some for all_, some in zip(totals, shown, strict=True)])
    print_row("sum", totals)
    print_row("operations (count)", counts)


def print_row(name: str, values: Iterable[float]) -> None:
    """A line of the table."""
    print(f"| {name:24s} | " + " | ".join(f"{value:8.1f}" for value in values) + " |")


if __name__ == "__main__":
    main()
