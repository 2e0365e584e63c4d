"""Runs files in the TFLite runtime of the Python that this is started with.

Needs numpy and that runtime alone: `python runtime_worker.py FOLDER MODULE`. The folder is one that
`benchmarks.runtimes` has written; what the files give goes to standard output, as JSON.
"""

import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

MODULES = {
    "ai_edge_litert": "ai_edge_litert.interpreter",
    "tflite_runtime": "tflite_runtime.interpreter",
    "tensorflow": "tensorflow.lite",
}

KERNELS = {"xnnpack": "AUTO", "reference": "BUILTIN_REF"}


def runtime(name: str) -> tuple[Any, Any]:
    """The interpreter's class, and its names of the kernels."""
    if name == "tensorflow":
        import tensorflow

        return tensorflow.lite.Interpreter, tensorflow.lite.experimental.OpResolverType
    module = importlib.import_module(MODULES[name])
    return module.Interpreter, module.OpResolverType


def run(interpreter: Any, resolver: Any, path: Path) -> list[int]:
    """How many codes of a file differ from those that are expected, and of how many."""
    with np.load(path.with_suffix(".npz")) as arrays:
        made = interpreter(
            model_path=str(path), num_threads=1, experimental_op_resolver_type=resolver
        )
        made.allocate_tensors()
        for place, each in enumerate(made.get_input_details()):
            made.set_tensor(each["index"], arrays[f"input_{place}"])
        made.invoke()
        differing = size = 0
        for place, each in enumerate(made.get_output_details()):
            found = made.get_tensor(each["index"])
            expected = arrays[f"{kernels_of(resolver)}_{place}"].reshape(found.shape)
            differing += int(np.count_nonzero(found != expected))
            size += found.size
    return [differing, size]


def kernels_of(resolver: Any) -> str:
    """The family that a resolver's kernels are."""
    return next(name for name, each in KERNELS.items() if resolver.name == each)


def apart(function: Callable[..., Any], *given: Any) -> Any:
    """What a function gives, in a process of its own: kernels end it where a check fails."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            found = function(*given)
        except (ValueError, RuntimeError) as error:
            found = str(error).strip().splitlines()[-1]
        os.write(writes, json.dumps(found).encode()[:60_000])
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else "ends the process"


def main(folder: str, name: str) -> None:
    """Prints what each file gives with each family of kernels."""
    interpreter, resolvers = runtime(name)
    found = {
        path.stem: {
            kernels: apart(run, interpreter, getattr(resolvers, resolver), path)
            for kernels, resolver in KERNELS.items()
        }
        for path in sorted(Path(folder).glob("*.tflite"))
    }
    version = importlib.metadata.version(name.replace("_", "-"))
    json.dump({"runtime": f"{name.replace('_', '-')} {version}", "files": found}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
