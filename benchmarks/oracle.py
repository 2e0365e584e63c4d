"""Records what the library computes for every network at hand, and compares it after a change.

    python -m benchmarks.oracle record build/oracle             before the change
    python -m benchmarks.oracle compare build/oracle            after it
    python -m benchmarks.oracle record build/oracle --share 0.1 a tenth of the networks
    python -m benchmarks.oracle record build/oracle -k lstm     networks whose names contain "lstm"
    python -m benchmarks.oracle compare build/oracle --plans    compare plans only, ten times faster

A refactoring must not change a single integer. `record` quantizes, calibrates and exports each
network of `tests/networks` and `benchmarks/wild`, and writes one line of JSON for each: hashes of
all integers, the operators, the layers in float with the reasons, the names of the weights and a
hash of the file. `compare` does the same again and prints what differs. It ends with 1 if anything
does. Networks that are recorded already are skipped, so an interrupted `record` goes on.

Both run in one process with fixed seeds. Floats may differ on another processor, so both must run
on the same machine.
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import json
import re
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import keras_qat
from benchmarks.rotation import find_part
from benchmarks.structures import FAMILIES, Network, given
from benchmarks.wild.by_hand import BY_HAND
from benchmarks.zoo_worker import arrays
from keras_qat.graph.calls import Call, flatten_values
from keras_qat.graph.facts import describe_arguments
from keras_qat.integer_graph.resolve import resolve
from keras_qat.keras2.backend import keras
from tests.helpers import observe
from tests.networks.every_layer import example
from tests.networks.forms import FORMS
from tests.networks.tables import TABLES

COUNT = 8
"""Examples of each network."""

TARGET = "ethos_u55"
"""Target of the networks in `benchmarks/wild`: it has no float, so most rewrites apply."""

Record = dict[str, Any]


def find_networks() -> Iterator[tuple[str, Network, str | None]]:
    """Yield the name, the network and the target of every network."""
    for name, family in FAMILIES.items():
        yield (
            f"family {name}",
            Network(family.model, functools.partial(given, family.inputs(COUNT))),
            None,
        )
    for table, rows in TABLES.items():
        for name, network in rows.items():
            yield f"{table}, {name}", network, None
    for subject, forms in FORMS.items():
        if subject not in TABLES:
            for name, form in forms.items():
                yield f"form {subject}, {name}", Network(form.model, form.inputs), form.target
    for name in list_layers():
        yield f"layer {name}", Network(functools.partial(example, name), draw_inputs), None
    for name, build in BY_HAND.items():
        yield name, Network(build, draw_inputs), None
        yield f"{name} for {TARGET}", Network(build, draw_inputs), TARGET


def list_layers() -> list[str]:
    """Return the names of the Keras layers that have an example."""
    layers = keras.layers
    classes = (name for name in dir(layers) if isinstance(getattr(layers, name), type))
    return [name for name in classes if issubclass(getattr(layers, name), layers.Layer)]


def draw_inputs(model: Any) -> list[np.ndarray]:
    """Return random inputs for a model."""
    return arrays(model, COUNT)


def hash_array(array: Any) -> str:
    """Return a short hash of an array's type, shape and values."""
    array = np.ascontiguousarray(array)
    head = f"{array.dtype}{array.shape}".encode()
    return hashlib.sha256(head + array.tobytes()).hexdigest()[:12]


def record(network: Network, target: str | None) -> Record:
    """Quantize, calibrate, run and export a network; return what was computed.

    A network that is refused has the error in its record: the refusal must not change either.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    recipe = make_recipe(network)
    try:
        model = network.build()
        x = [array[:COUNT] for array in tf.nest.flatten(network.inputs(model))]
        qat = observe(keras_qat.quantize_model(model, recipe, target=target), *x, batches=1)
        data = x if len(x) > 1 else x[0]
        graph = resolve(qat)
        result: Record = {
            "float layers": keras_qat.plan(model, recipe, target=target).float_layers,
            "operators": [node.op.name if node.op else "float" for node in graph.nodes],
            "weights": [f"{weight.name} {tuple(weight.shape)}" for weight in qat.weights],
            "predict": [hash_array(y) for y in tf.nest.flatten(qat.predict(data, verbose=0))],
        }
        simulated = keras_qat.simulate(qat, data)
        result["tensors"] = {name: hash_array(t.codes) for name, t in simulated.tensors.items()}
        contents = keras_qat.export_tflite(qat)
        result["file"] = hashlib.sha256(contents).hexdigest()[:12]
    except Exception as error:  # A refusal is part of the record.
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    return result


def record_plan(network: Network, target: str | None) -> Record:
    """Plan a network; return its calls after lowering and how each tensor is quantized."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    recipe = make_recipe(network)
    try:
        plan = keras_qat.plan(network.build(), recipe, target=target)
    except Exception as error:  # A refusal is part of the record.
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    values = plan.graph.values()
    number = {value: f"%{index}" for index, value in enumerate(values)}

    def describe_call(call: Call) -> str:
        arguments = describe_arguments(call, lambda value: number.get(value, value.name))
        outputs = [f"{number[value]} {value!r}" for value in flatten_values(call.outputs)]
        config = hash_text(describe_config(call.layer))
        return f"{outputs} = {type(call.layer).__name__} {config} {hash_text(str(arguments))}"

    weights = {
        call.name: [hash_array(weight) for weight in plan.graph.weights.get(call.layer, ())]
        for call in plan.graph.calls
    }
    return {
        "calls": {call.name: describe_call(call) for call in plan.graph.calls},
        "order": [call.name for call in plan.graph.calls],
        "rows": [str(row) for row in plan.rows],
        "ranges": [str((r.spec, r.observed, r.rounded, r.rounds)) for r in plan.ranges],
        "float layers": plan.float_layers,
        "problems": list(map(str, plan.problems)),
        "weights": {name: hashes for name, hashes in weights.items() if hashes},
    }


def hash_plan(network: Network, target: str | None) -> str:
    """Return a hash of what a plan decides, without anything that is computed in float."""
    plan = record_plan(network, target)
    order = [call.partition(" = ")[2].split()[0] for call in plan.get("calls", {}).values()]
    return hash_text(str([order, *(plan.get(key) for key in ("rows", "float layers", "error"))]))


def describe_config(layer: Any) -> str:
    """Return the configuration of a layer without its name."""
    try:
        config = {**layer.get_config(), "symbol": getattr(layer, "symbol", "")}
    except Exception as error:  # A layer that cannot be saved.
        return type(error).__name__
    config.pop("name", None)
    return re.sub(r" at 0x[0-9a-f]+|'module': '[^']*'", "", repr(config))


def hash_text(text: str) -> str:
    """Return a short hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def make_recipe(network: Network) -> Any:
    """Return the recipe of a network: the default one, which traces `network.opened`."""
    recipe = keras_qat.recipes.int8()
    for layer in network.opened:
        recipe = recipe.override(layer, open=True)
    return recipe


def list_differences(before: Any, after: Any) -> list[str]:
    """Return one line for each entry of two records that differs."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return [f"{before} -> {after}"] if before != after else []
    lines = []
    for key in sorted({*before, *after}):
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
            first = names[0]
            lines.append(
                f"{key}: {len(names)} of {len({**old, **new})} differ, "
                f"first {first!r}: {old.get(first)} -> {new.get(first)}"
            )
        else:
            lines.append(f"{key}: {str(old)[:150]} -> {str(new)[:150]}")
    return lines


def is_drawn(name: str, share: float, seed: str) -> bool:
    """Return whether a network belongs to the share of the networks that is run."""
    return zlib.crc32(f"{seed}{name}".encode()) / 2**32 < share


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("verb", choices=("record", "compare"))
    parser.add_argument("path", type=Path, help="a folder for records, or a text file for hashes")
    parser.add_argument("-k", default="", help="only networks whose names contain this")
    parser.add_argument("--share", type=float, default=1.0, help="share of the networks, 0 to 1")
    parser.add_argument("--plans", action="store_true", help="plans only, without integers")
    parser.add_argument("--again", action="store_true", help="replace what is recorded")
    parser.add_argument("--draw", default="", help="any text, which decides what is in the share")
    parser.add_argument("--part", type=int, help="networks of a part of benchmarks.rotation")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    path, is_hashed = arguments.path, arguments.path.suffix == ".txt"
    take: Callable[[Network, str | None], Any] = record_plan if arguments.plans else record
    if is_hashed:
        take = hash_plan
    else:
        path.mkdir(parents=True, exist_ok=True)
        path /= "plans.jsonl" if arguments.plans else "records.jsonl"
    known = read_records(path)
    seen = differing = new = 0
    for name, network, target in find_networks():
        if arguments.k not in name or not is_drawn(name, arguments.share, arguments.draw):
            continue
        if arguments.part not in (None, find_part(name)):
            continue
        if arguments.verb == "record" and name in known and not arguments.again:
            continue
        if arguments.verb == "compare" and name not in known:
            new += 1
            continue
        found, seen = json.loads(json.dumps(take(network, target))), seen + 1
        if arguments.verb == "record":
            known[name] = found
            if not is_hashed:
                with path.open("a") as file:
                    file.write(json.dumps([name, found]) + "\n")
        elif differences := list_differences(known[name], found):
            differing += 1
            print("\n  ".join([name, *differences]), flush=True)
        gc.collect()
    if is_hashed and arguments.verb == "record":
        path.write_text("".join(f"{known[name]} {name}\n" for name in sorted(known)))
    compared = f", {differing} differ, {new} without a record" * (arguments.verb == "compare")
    print(f"{seen} networks{compared}")
    sys.exit(bool(differing))


def read_records(path: Path) -> dict[str, Any]:
    """Return the records of a file by the networks' names; the last one of each network counts."""
    lines = path.read_text().splitlines() if path.exists() else []
    if path.suffix == ".txt":
        return {name: record for record, _, name in (line.partition(" ") for line in lines)}
    return dict(json.loads(line) for line in lines)


if __name__ == "__main__":
    main()
