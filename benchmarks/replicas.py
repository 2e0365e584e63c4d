"""Counts what the replicas of a training step exchange, and reckons it for larger clusters.

    python -m benchmarks.replicas                       MobileNetV2 on 1, 2, 4 and 8 replicas
    python -m benchmarks.replicas ResNet50 --replicas 2

Each row is a process of its own with so many logical CPU devices. Gradients have the size of the
weights. What else a replica has reduced is noted while the step is traced: moving statistics of
BatchNormalization, all at once at the step's end, and ranges, each where it is used. The second
table is reckoned, not run: with a ring each replica sends 2 (n - 1) / n times those bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks import markdown

MEASURED = (1, 2, 4, 8)
SIZE = 32
"""Pixels of the images, on which what is exchanged does not depend."""
RECKONED = (2, 8, 64, 256)
KINDS = ("gradients", "BatchNormalization", "ranges")
COLUMNS = (
    ("replicas", 8),
    ("form", 5),
    *((f"{kind}, bytes", 25) for kind in KINDS),
    ("reductions of ranges", 20),
)
RING = (("replicas", 8), *((f"{kind}, kB sent", 27) for kind in KINDS), ("ranges / gradients", 18))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="?", default="MobileNetV2", help="MobileNetV2 by default")
    parser.add_argument("--replicas", nargs="*", type=int, default=MEASURED, help="1 2 4 8")
    parser.add_argument("--one", nargs=2, metavar=("FORM", "N"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        form, count = arguments.one
        print(json.dumps(exchanged(arguments.name, form, int(count))))
        return
    print(markdown.head(*zip(*COLUMNS, strict=True)), flush=True)
    sizes: dict[str, int] = {}
    program = [sys.executable, "-m", "benchmarks.replicas", arguments.name, "--one"]
    for count, form in itertools.product(arguments.replicas, ("float", "int8")):
        command = [*program, form, str(count)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        sizes = json.loads(run.stdout.splitlines()[-1])
        cells = *(f"{sizes[kind]:,}" for kind in KINDS), str(sizes["reductions"])
        row = markdown.row((str(count), form, *cells), [width for _, width in COLUMNS])
        print(row, flush=True)
    print("\nReckoned for int8:\n\n" + markdown.head(*zip(*RING, strict=True)))
    for count in RECKONED:
        sent = [2 * (count - 1) / count * sizes[kind] / 1000 for kind in KINDS]
        share = f"{sent[2] / sent[0]:.4%}" if sent[0] else ""
        cells = str(count), *(f"{size:,.1f}" for size in sent), share
        print(markdown.row(cells, [width for _, width in RING]))


def exchanged(name: str, form: str, count: int) -> dict[str, int]:
    """Returns the bytes that a step asks each replica to reduce, by kind."""
    import tensorflow as tf

    from benchmarks import models

    models.SIZE = SIZE
    strategy = _strategy(count)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})  # Takes longest.
    with strategy.scope():
        model = models.VARIANTS[form](models.build(name))
        model.compile("sgd", "sparse_categorical_crossentropy")
        model.optimizer.build(model.trainable_variables)  # Else a step is traced twice.
    with noted() as reductions:
        model.fit(*models.batch(model), batch_size=models.BATCH, verbose=0)
    gradients = sum(map(_bytes, model.trainable_weights)) if count > 1 else 0
    sizes = {"gradients": gradients, "BatchNormalization": 0, "ranges": 0, "reductions": 0}
    for tensors in reductions:  # Ranges are single numbers, moving statistics vectors.
        kind = "BatchNormalization" if any(x.shape.rank for x in tensors) else "ranges"
        sizes[kind] += sum(map(_bytes, tensors))
        sizes["reductions"] += kind == "ranges"
    return sizes


def _bytes(tensor: Any) -> int:
    return int(tensor.shape.num_elements() * tensor.dtype.size)


def _strategy(count: int) -> Any:
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * count
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(count)])


@contextlib.contextmanager
def noted() -> Iterator[list[list[Any]]]:
    """Notes the tensors that the first replica asks to reduce while a step is traced."""
    import tensorflow as tf
    from tensorflow.python.distribute.distribute_lib import ReplicaContextBase as Context

    reductions: list[list[Any]] = []
    before = Context.all_reduce

    def all_reduce(self: Any, operation: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.get_static_value(self.replica_id_in_sync_group) == 0:
            reductions.append(tf.nest.flatten(value))
        return before(self, operation, value, *args, **kwargs)

    Context.all_reduce = all_reduce
    try:
        yield reductions
    finally:
        Context.all_reduce = before


if __name__ == "__main__":
    main()
