"""Runs TFLite files in TFLite Micro with CMSIS-NN's kernels, on an emulated Cortex-M.

    make -f tests/cortex_m/Makefile SOURCES=... CORE=m4
    python -m benchmarks.structures FOLDER int8 --target cmsis_nn
    python -m tests.cortex_m.emulator FOLDER m4

Prints the files with values that differ from the simulation, and how many files ran.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from keras_qat.tflite.reader import FileGraph

ROOT = Path(__file__).parents[2]
FIRMWARE = ROOT / "build" / "cortex_m"
BOARDS = {"m4": "mps2-an386", "m55": "mps3-an547"}
"""Processor -> QEMU's board: a Cortex-M4 with DSP, a Cortex-M55 with Helium."""

LONGEST = 600
"""Maximum seconds for all examples of a file."""


def run(contents: bytes, inputs: list[np.ndarray], core: str) -> list[np.ndarray]:
    """Returns the outputs of a file of one example, for all examples.

    Raises:
        RuntimeError: with the firmware's message, if it does not run the file.
    """
    graph = FileGraph(contents)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "file.tflite").write_bytes(contents)
        examples = zip(*inputs, strict=True)
        rows = [row.tobytes() for example in examples for row in example]
        (Path(folder) / "inputs.bin").write_bytes(b"".join(rows))
        command = ["qemu-system-arm", "-M", BOARDS[core], "-kernel"]
        command += [str(FIRMWARE / core / "firmware.elf"), "-display", "none", "-monitor", "none"]
        command += ["-serial", "none", "-semihosting-config", "enable=on,target=native"]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=LONGEST
        )
        if done.returncode:
            raise RuntimeError((done.stdout + done.stderr)[-500:].strip())
        bytes_ = (Path(folder) / "outputs.bin").read_bytes()
    tensors = [graph.tensors[index] for index in graph.ends("outputs")]
    layout = np.dtype([(str(i), item.dtype, item.shape) for i, item in enumerate(tensors)])
    values = np.frombuffer(bytes_, layout)
    return [values[name] for name in layout.names or ()]


def differing(folder: Path, core: str) -> dict[str, str]:
    """Returns file -> how many values differ from the recorded values, or the error message."""
    result = {}
    for path in sorted(folder.glob("*.tflite")):
        with np.load(path.with_suffix(".npz")) as arrays:
            known = dict(arrays)
        inputs = [known[name] for name in sorted(known) if name.startswith("input_")]
        try:
            outputs = run(path.read_bytes(), inputs, core)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            result[path.stem] = str(error)
            continue
        for place, output in enumerate(outputs):
            expected = known.get(f"tflm_{place}")
            if expected is not None and np.any(output.ravel() != expected.ravel()):
                count = np.count_nonzero(output.ravel() != expected.ravel())
                result[path.stem] = f"output {place}: {count} of {output.size} values differ"
    return result


def main() -> None:
    folder, core = Path(sys.argv[1]), sys.argv[2]
    for name, what in differing(folder, core).items():
        print(f"{name}: {what}")
    print(len(list(folder.glob("*.tflite"))), "files ran")


if __name__ == "__main__":
    main()
