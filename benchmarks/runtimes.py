"""Which runtimes compute files alike: operators by themselves and small networks, code for code.

    python -m benchmarks.runtimes write FOLDER
    OTHER_PYTHON benchmarks/runtime_worker.py FOLDER ai_edge_litert > litert-1.2.json
    OTHER_PYTHON benchmarks/runtime_worker.py FOLDER tensorflow > tensorflow-2.15.json
    python -m benchmarks.runtimes table *.json
    python -m benchmarks.runtimes processors FOLDER

`write` makes random examples of all operators, and families of small networks, with inputs and the
codes that the simulation gives. The worker runs them in another environment, which has numpy and a
runtime alone. `table` prints which share of the codes is another one, for what differs anywhere.
`processors` prints it for x86 and 64-bit ARM, from what `write` or benchmarks.structures simulated.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import keras_qat
from keras_qat.integer_graph.resolve import resolve
from keras_qat.ops.all_ops import ROWS
from keras_qat.tflite.reader import FileGraph
from tests.helpers import observe
from tests.networks import composite, convolutional
from tests.ops.examples import EXAMPLES
from tests.ops.examples.example import BATCH
from tests.ops.harness import file_of, in_integers, node_of, random_inputs, sized

FAMILIES: tuple[str, ...] = ("xnnpack", "xnnpack_arm64", "reference")


def operators(
    seeds: int, families: tuple[str, ...] = FAMILIES
) -> Iterator[tuple[str, bytes, dict[str, np.ndarray]]]:
    """Name, file and arrays of each operator's examples; of products also as CONV_2D."""
    for op in ROWS:
        for bits in (8, 16):
            if op.name not in EXAMPLES or not op.has_kernel_for(bits):
                continue
            for seed in range(seeds):
                node, numbers = node_of(op, bits, seed)
                inputs = random_inputs(node, numbers)
                forms = [dict(node.attributes)]
                if "form" in node.attributes and bits == 8:
                    forms.append({**node.attributes, "form": "convolution"})
                for attributes in forms:
                    each = sized(dataclasses.replace(node, attributes=attributes), BATCH)
                    form = " as CONV_2D" if attributes is not forms[0] else ""
                    contents = file_of(each)
                    graph = FileGraph(contents)
                    arrays = [inputs[name] for name in graph.inputs]
                    result = {family: in_integers(each, inputs, family) for family in families}
                    yield f"{op.name}{form}, {bits} bits.{seed}", contents, _named(arrays, result)


def networks(
    families: tuple[str, ...] = FAMILIES,
) -> Iterator[tuple[str, bytes, dict[str, np.ndarray]]]:
    """Likewise of families of small networks."""
    for name, family in {**convolutional.FAMILIES, **composite.FAMILIES}.items():
        if any(None in shape for shape in family.shapes):
            continue
        x = family.inputs(BATCH)
        qat = observe(keras_qat.quantize_model(family.model()), *x)
        contents = keras_qat.export_tflite(qat, batch_size=BATCH)
        graph = FileGraph(contents)
        given = x if len(x) > 1 else x[0]
        result = {}
        for kernels in families:
            simulated = keras_qat.simulate(qat, given, kernels)
            if simulated.float_layers:
                break
            result[kernels] = [
                simulated.outputs[name].codes for name in _by_index(graph, graph.outputs, "outputs")
            ]
        else:
            ends = resolve(qat).inputs
            codes = {
                name: row if params is None else params.quantize(row)
                for (name, params), row in zip(
                    ((name, end.params) for name, end in ends.items()), x, strict=True
                )
            }
            arrays = [codes[name] for name in _by_index(graph, graph.inputs, "inputs")]
            yield f"network {name}.0", contents, _named(arrays, result)


def _by_index(graph: FileGraph, ends: Any, end: Any) -> list[str]:
    names = {end.index: name for name, end in ends.items()}
    return [names[index] for index in graph.ends(end)]


def _named(inputs: list[Any], found: dict[Any, list[Any]]) -> dict[str, np.ndarray]:
    arrays = {f"input_{place}": np.asarray(array) for place, array in enumerate(inputs)}
    for family, outputs in found.items():
        arrays |= {f"{family}_{place}": np.asarray(output) for place, output in enumerate(outputs)}
    return arrays


def write(folder: Path, seeds: int) -> None:
    """Writes all files, with inputs and expected codes beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in (operators(seeds), networks()):
        for name, contents, arrays in source:
            (folder / f"{name}.tflite").write_bytes(contents)
            np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]


def table(paths: list[Path]) -> str:
    """What differs in any of the runtimes, for each family of kernels, as Markdown."""
    runtimes = [json.loads(path.read_text()) for path in paths]
    names = sorted({name.rsplit(".", 1)[0] for runtime in runtimes for name in runtime["files"]})
    lines = []
    for kernels in FAMILIES:
        heads = " | ".join(runtime["runtime"] for runtime in runtimes)
        lines += [f"{kernels} | {heads}", " | ".join(["---"] * (len(runtimes) + 1))]
        cells = {name: [_cell(runtime, name, kernels) for runtime in runtimes] for name in names}
        differing = {name: cell for name, cell in cells.items() if set(cell) != {"="}}
        lines += [" | ".join([name, *problem]) for name, problem in differing.items()]
        lines += [f"\n{len(names) - len(differing)} of {len(names)} are equal in all.\n"]
    return "\n".join(lines)


def _cell(runtime: dict[str, Any], name: str, kernels: str) -> str:
    """How one runtime computes one kind of file."""
    result = [
        results[kernels]
        for file, results in runtime["files"].items()
        if file.rsplit(".", 1)[0] == name
    ]
    differing = size = 0
    refused = collections.Counter[str]()
    for item in result:
        if isinstance(item, str):
            refused["ends the process" if "ends" in item else "refused"] += 1
        else:
            differing, size = differing + item[0], size + item[1]
    parts = [f"{word} {count} of {len(result)}" for word, count in refused.items()]
    if differing:
        parts.append(f"{differing / size:.2%}")
    return ", ".join(parts) or "="


def processors(folder: Path) -> str:
    """Returns which share of the codes differs between x86 and 64-bit ARM, as Markdown."""
    sizes, differing = collections.Counter[str](), collections.Counter[str]()
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as arrays:
            for key in arrays:
                if key.startswith(other := "xnnpack_arm64_"):
                    x86 = arrays[key.replace(other, "xnnpack_")]
                    name = re.sub(r"\.\d+$", "", path.stem)
                    sizes[name] += x86.size
                    differing[name] += int(np.count_nonzero(x86 != arrays[key]))
    lines = ["| files | codes | differing | share |", "| --- | --- | --- | --- |"]
    for name, count in (+differing).items():
        lines.append(f"| {name} | {sizes[name]} | {count} | {count / sizes[name]:.2%} |")
    lines.append(f"\n{len(+differing)} of {len(sizes)} kinds differ, of {sizes.total()} codes.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=re.split(r"\n\n", __doc__ or "")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writes = commands.add_parser("write")
    writes.add_argument("folder", type=Path)
    writes.add_argument("--seeds", type=int, default=6)
    commands.add_parser("table").add_argument("files", type=Path, nargs="+")
    commands.add_parser("processors").add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.command == "write":
        write(given.folder, given.seeds)
    elif given.command == "processors":
        print(processors(given.folder))
    else:
        print(table(given.files))


if __name__ == "__main__":
    main()
