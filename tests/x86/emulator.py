"""Runs TFLite files in LiteRT on x86 processors with other instructions, in qemu-user.

    python -m tests.x86.emulator FOLDER Haswell > haswell.json

`benchmarks.runtimes` writes `FOLDER`. XNNPACK chooses its kernels by the processor's instructions.
QEMU does not emulate AVX-512.
"""

import json
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.emulation import run_worker

QEMU = "qemu-x86_64"

CPUS = {
    "native": "the processor of this machine",
    "Nehalem": "SSE4.2",
    "SandyBridge": "AVX",
    "Haswell": "AVX2 and FMA",
}
"""Processor -> its instructions."""


def is_set_up() -> bool:
    return platform.machine() == "x86_64" and shutil.which(QEMU) is not None


def run(folder: Path, cpu: str, *arguments: Any) -> dict[str, Any]:
    """Returns what the runtime worker reports about the files in a folder."""
    emulated = () if cpu == "native" else (QEMU, "-cpu", cpu)
    result = run_worker([*emulated, sys.executable], folder, *arguments)
    return dict(result, runtime=f"LiteRT, {cpu}")


if __name__ == "__main__":
    json.dump(run(Path(sys.argv[1]).resolve(), sys.argv[2]), sys.stdout)
