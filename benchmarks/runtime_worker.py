"""Runs files in the TFLite runtime of the Python that this is started with.

Needs numpy and that runtime alone: `python runtime_worker.py FOLDER MODULE [OUTPUTS]`. The folder
is one that `benchmarks.runtimes` has written. How many quantized values differ from the expected
ones goes to standard output, as JSON; what the default kernels give, to the folder OUTPUTS.
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

KERNELS = {"xnnpack": "AUTO", "xnnpack_arm64": "AUTO", "reference": "BUILTIN_REF"}


def runtime(name: str) -> tuple[Any, Any]:
    """The interpreter's class, and its names of the kernels."""
    if name == "tensorflow":
        import tensorflow

        return tensorflow.lite.Interpreter, tensorflow.lite.experimental.OpResolverType
    module = importlib.import_module(MODULES[name])
    return module.Interpreter, module.OpResolverType


def run(
    interpreter: Any, resolver: Any, path: Path, kernels: str, outputs: str | None
) -> list[int]:
    """How many codes of a file differ from those that are expected, and of how many."""
    results = []
    with np.load(path.with_suffix(".npz")) as arrays:
        made = interpreter(
            model_path=str(path), num_threads=1, experimental_op_resolver_type=resolver
        )
        for place, tensor in enumerate(made.get_input_details()):
            if tuple(tensor["shape"]) != arrays[f"input_{place}"].shape:  # Of open sizes.
                made.resize_tensor_input(tensor["index"], arrays[f"input_{place}"].shape)
        made.allocate_tensors()
        for place, tensor in enumerate(made.get_input_details()):
            made.set_tensor(tensor["index"], arrays[f"input_{place}"])
        made.invoke()
        differing = size = 0
        for place, tensor in enumerate(made.get_output_details()):
            result = made.get_tensor(tensor["index"])
            results.append(result)
            expected = arrays.get(f"{kernels}_{place}")
            if expected is not None:
                differing += int(np.count_nonzero(result != expected.reshape(result.shape)))
                size += result.size
    if outputs and kernels == "xnnpack":
        np.savez(Path(outputs) / path.stem, *results)
    return [differing, size]


def expected_kernels(path: Path) -> list[str]:
    """Families of kernels whose results are known of a file; without any the default ones."""
    with np.load(path.with_suffix(".npz")) as arrays:
        known = {name.rpartition("_")[0] for name in arrays}
        return [name for name in KERNELS if name in known] or ["xnnpack"]


def apart(function: Callable[..., Any], *given: Any) -> Any:
    """What a function gives, in a process of its own: kernels end it where a check fails."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            result = function(*given)
        except (ValueError, RuntimeError) as error:
            result = str(error).strip().splitlines()[-1]
        os.write(writes, json.dumps(result).encode()[:60_000])
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else "ends the process"


def main(folder: str, name: str, outputs: str | None = None) -> None:
    """Prints what each file gives with each family of kernels."""
    interpreter, resolvers = runtime(name)
    result = {
        path.stem: {
            kernels: apart(
                run, interpreter, getattr(resolvers, KERNELS[kernels]), path, kernels, outputs
            )
            for kernels in expected_kernels(path)
        }
        for path in sorted(Path(folder).glob("*.tflite"))
    }
    version = importlib.metadata.version(name.replace("_", "-"))
    json.dump({"runtime": f"{name.replace('_', '-')} {version}", "files": result}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
