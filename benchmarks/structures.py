"""Structures of the tests in four widths, as files, with the values that the model gives for them.

    python -m benchmarks.structures FOLDER "int16x8" [--count 40]
    python -m tests.arm64.emulator FOLDER cortex-a76 > a76.json
    python -m benchmarks.structures FOLDER "int8" --target cmsis_nn

Writes the files of one width: families of small networks, networks of other tests' tables, those of
microcontrollers, and random models with seeds of their own. Prints how many, and what has no file
of this width: what `plan` leaves in float, and, packed, what has no weights of 4 bits. Files for a
target compute one example, have its forms, and what it does not run is counted.
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
import tensorflow as tf

import keras_qat
from benchmarks.arena import NETWORKS
from keras_qat import recipes
from keras_qat.integer_graph.graph import ResolvedGraph
from keras_qat.integer_graph.passes import has_int4, pack_int4
from keras_qat.integer_graph.resolve import resolve
from keras_qat.keras2.backend import keras
from keras_qat.ops.node import Tensor
from keras_qat.targets import problems
from keras_qat.tflite.reader import FileGraph
from tests.helpers import images, observe
from tests.networks import composite, convolutional, single_layers
from tests.networks.tables import TABLES, Network
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
COUNTED = ("xnnpack_arm64_", "tflm_")
BATCH = 8
OBSERVED = 12


class Example(NamedTuple):
    """A file, with inputs and expected values by name; or the reason why there is none."""

    name: str
    contents: bytes = b""
    arrays: Mapping[str, np.ndarray] = MappingProxyType({})
    reason: str = ""


def find_families(names: Sequence[str] = tuple(FAMILIES)) -> dict[str, Network]:
    """Each family as one model, which has an output for each structure."""

    def make_inputs(name: str, model: Any) -> list[np.ndarray]:
        return FAMILIES[name].inputs(OBSERVED)

    return {
        name: Network(FAMILIES[name].model, functools.partial(make_inputs, name)) for name in names
    }


def find_tables() -> dict[str, Network]:
    """Networks of other tests' tables."""
    return {
        f"{table}, {name}": network
        for table, rows in TABLES.items()
        for name, network in rows.items()
    }


def find_networks() -> dict[str, Network]:
    """Networks of microcontrollers, of MLPerf Tiny's kind among them."""
    return {name.replace("/", " "): Network(build, normal) for name, build in NETWORKS.items()}


def make_examples(networks: Mapping[str, Network], *how: Any) -> Iterator[Example]:
    """The file of each network; the other arguments are those of `example`."""
    return (example(name, network, *how) for name, network in networks.items())


def normal(model: Any) -> np.ndarray:
    """Normally distributed inputs."""
    return images(OBSERVED, model.input_shape[1:], seed=0)


def given(x: list[np.ndarray], model: Any) -> list[np.ndarray]:
    """These inputs, whatever the model."""
    return x


def random_models(
    width: str,
    kernels: Sequence[str] = KERNELS,
    target: str | None = None,
    count: int = 40,
    seed: int = 0,
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
        network = Network(functools.partial(built, sketch), functools.partial(given, x))
        made.append(example(f"random {seed}.{len(made)}", network, width, kernels, target))

    make()
    return made


def example(
    name: str,
    network: Network,
    width: str,
    kernels: Sequence[str] = KERNELS,
    target: str | None = None,
) -> Example:
    """A float model's file of one width, and what it has to give for some of its inputs."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    recipe = WIDTHS[width]()
    for layer in network.opened:
        recipe = recipe.override(layer, open=True)
    try:
        model = network.build()
        x = tf.nest.flatten(network.inputs(model))
        qat = observe(keras_qat.quantize_model(model, recipe, target=target), *x, batches=1)
    except ValueError as error:
        return Example(name, reason=f"refused: {error}")
    if width == "packed int4":
        if not has_int4(pack_int4(resolve(qat))):
            return Example(name, reason="no weights of 4 bits")
        qat.pack_int4 = True
    return file_of(name, qat, [array[:BATCH] for array in x], kernels, target)


def file_of(
    name: str, qat: Any, x: list[np.ndarray], kernels: Sequence[str], target: str | None = None
) -> Example:
    """A quantized model's file, and what it has to give.

    Outputs that follow from layers in float are left out: the last places of floats differ.
    """
    resolved = resolve(qat)
    exact = exact_outputs(resolved)
    if not exact:
        return Example(name, reason="layers in float")
    if target and problems(qat, target):
        return Example(name, reason="does not run there, as plan says")
    contents = keras_qat.export_tflite(qat, batch_size=1 if target else len(x[0]), target=target)
    graph = FileGraph(contents)
    inputs = {
        end: array if tensor.params is None else tensor.params.quantize(array)
        for (end, tensor), array in zip(resolved.inputs.items(), x, strict=True)
    }
    ends = ends_in_order(graph, "inputs")
    arrays = {f"input_{index}": np.asarray(inputs[end]) for index, end in enumerate(ends)}
    for family in kernels:
        result = keras_qat.simulate(qat, x if len(x) > 1 else x[0], family)
        for index, end in enumerate(ends_in_order(graph, "outputs")):
            if end in exact:
                output = result.outputs[end]
                arrays[f"{family}_{index}"] = np.asarray(getattr(output, "codes", output))
    return Example(name, contents, arrays)


def exact_outputs(graph: ResolvedGraph) -> set[str]:
    """Returns the outputs that no real numbers go before which a layer computes in float.

    Indices and truth values that it makes of inputs are the same everywhere.
    """
    floats: set[Any] = set()
    for node in graph.nodes:
        in_float = node.op is None and any(tensor.is_float for tensor in node.outputs)
        if in_float or floats.intersection(x for x in node.inputs if isinstance(x, Tensor)):
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
            outputs = [made.arrays[key] for key in made.arrays if key.startswith(COUNTED)]
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
    parser.add_argument("--target", help="such as cmsis_nn: what TFLite Micro's kernels give")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    how = asked.width, ("tflm",) if asked.target else KERNELS, asked.target
    for kind, examples in {
        "families": make_examples(find_families(), *how),
        "tables": make_examples(find_tables(), *how),
        "networks": make_examples(find_networks(), *how),
        "random models": random_models(*how, count=asked.count, seed=asked.seed),
    }.items():
        print(f"{kind}: {dict(write(examples, asked.folder))}", flush=True)


if __name__ == "__main__":
    main()
