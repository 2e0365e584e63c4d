"""Structures of the tests in four widths, as files, with the values that the model gives for them.

    python -m benchmarks.structures FOLDER "int16x8" [--count 40]
    python -m tests.arm64.emulator FOLDER cortex-a76 > a76.json

Writes the files of one width: families of small networks, the networks of microcontrollers, and
random models with seeds of their own. Prints how many, and what has no file of this width: what
`plan` leaves in float, and, packed, what has no weights of 4 bits.
"""

from __future__ import annotations

import argparse
import functools
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import hypothesis
import numpy as np

import keras_qat
from benchmarks.arena import NETWORKS
from keras_qat import recipes
from keras_qat.frontend.keras2.backend import keras
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.passes.pack_int4 import packs_int4, with_int4
from keras_qat.integer_graph.resolve import resolve
from keras_qat.ops.node import Tensor
from keras_qat.tflite.reader import FileGraph
from tests.helpers import observe
from tests.networks import composite, convolutional, single_layers
from tests.random_graphs.sketch import built, random_inputs
from tests.random_graphs.test_random_graphs import KNOWN_SIZES

WIDTHS: dict[str, Callable[[], recipes.Recipe]] = {
    "int8": recipes.int8,
    "one scale": functools.partial(recipes.int8, per_channel=False),
    "int16x8": recipes.int16x8,
    "packed int4": recipes.int4_weights,
}
"""Columns of the tables -> the recipe. The last one's files hold two weights in a byte."""

FAMILIES = {**convolutional.FAMILIES, **composite.FAMILIES, **single_layers.FAMILIES}
KERNELS = ("xnnpack", "xnnpack_arm64")
BATCH = 3
OBSERVED = 12


class Example(NamedTuple):
    """A file, with inputs and expected values by name; or the reason why there is none."""

    name: str
    contents: bytes = b""
    arrays: Mapping[str, np.ndarray] = MappingProxyType({})
    reason: str = ""


def families(
    width: str, kernels: Sequence[str] = KERNELS, names: Sequence[str] = tuple(FAMILIES)
) -> Iterator[Example]:
    """Each family as one model, which has an output for each structure."""
    for name in names:
        family = FAMILIES[name]
        yield example(name, family.model, family.inputs(OBSERVED), width, kernels)


def networks(width: str, kernels: Sequence[str] = KERNELS) -> Iterator[Example]:
    """Networks of microcontrollers, of MLPerf Tiny's kind among them."""
    for name, build in NETWORKS.items():
        shape = build().input_shape[1:]
        x = np.random.default_rng(0).normal(size=(OBSERVED, *shape)).astype(np.float32)
        yield example(name.replace("/", " "), build, [x], width, kernels)


def random_models(
    width: str, kernels: Sequence[str] = KERNELS, count: int = 40, seed: int = 0
) -> list[Example]:
    """As many random models of all operators."""
    made: list[Example] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(KNOWN_SIZES)
    def make(sketch: Any) -> None:
        model = built(sketch)
        x = random_inputs(model, OBSERVED, sketch.scale)
        name = f"random {seed}.{len(made)}"
        made.append(example(name, functools.partial(built, sketch), x, width, kernels))

    make()
    return made


def example(
    name: str, build: Callable[[], Any], x: list[np.ndarray], width: str, kernels: Sequence[str]
) -> Example:
    """A float model's file of one width, and what it has to give for some of the inputs.

    Outputs that follow from layers in float are left out: the last places of floats differ.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    try:
        qat = observe(keras_qat.quantize_model(build(), WIDTHS[width]()), *x, batches=1)
    except ValueError as error:
        return Example(name, reason=f"refused: {error}")
    if width == "packed int4":
        if not packs_int4(with_int4(resolve(qat))):
            return Example(name, reason="no weights of 4 bits")
        qat.pack_int4 = True
    resolved = resolve(qat)
    exact = exact_outputs(resolved)
    if not exact:
        return Example(name, reason="layers in float")
    contents = keras_qat.export_tflite(qat, batch_size=BATCH)
    graph = FileGraph(contents)
    given = [array[:BATCH] for array in x]
    inputs = {
        end: array if tensor.params is None else tensor.params.quantize(array)
        for (end, tensor), array in zip(resolved.inputs.items(), given, strict=True)
    }
    ends = ends_in_order(graph, "inputs")
    arrays = {f"input_{index}": np.asarray(inputs[end]) for index, end in enumerate(ends)}
    for family in kernels:
        result = keras_qat.simulate(qat, given if len(x) > 1 else given[0], family)
        for index, end in enumerate(ends_in_order(graph, "outputs")):
            if end in exact:
                output = result.outputs[end]
                arrays[f"{family}_{index}"] = np.asarray(getattr(output, "codes", output))
    return Example(name, contents, arrays)


def exact_outputs(graph: ResolvedGraph) -> set[str]:
    """Returns the outputs that no layer in float goes before."""
    floats: set[Any] = set()
    for node in graph.nodes:
        if node.in_float or floats.intersection(x for x in node.inputs if isinstance(x, Tensor)):
            floats.update(node.outputs)
    return {name for name, tensor in graph.outputs.items() if tensor not in floats}


def ends_in_order(graph: FileGraph, ends: Any) -> list[str]:
    """Names of a file's inputs or outputs, in its order."""
    names = {tensor.index: name for name, tensor in getattr(graph, ends).items()}
    return [names[index] for index in graph.ends(ends)]


def write(examples: Iterable[Example], folder: Path) -> Counter[str]:
    """Writes files and arrays, and counts them, and the reasons of those without a file."""
    folder.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    for made in examples:
        counts[made.reason or "files"] += 1
        if not made.reason:
            outputs = [made.arrays[key] for key in made.arrays if key.startswith("xnnpack_arm64_")]
            counts["outputs"] += len(outputs)
            counts["codes"] += sum(output.size for output in outputs)
            (folder / f"{made.name}.tflite").write_bytes(made.contents)
            np.savez(folder / f"{made.name}.npz", **made.arrays)  # type: ignore[arg-type]
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=re.split(r"\n\n", __doc__ or "")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("width", choices=WIDTHS)
    parser.add_argument("--count", type=int, default=40, help="random models")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    drawn = random_models(given.width, count=given.count, seed=given.seed)
    for kind, examples in {
        "families": families(given.width),
        "networks": networks(given.width),
        "random models": drawn,
    }.items():
        print(f"{kind}: {dict(write(examples, given.folder))}", flush=True)


if __name__ == "__main__":
    main()
