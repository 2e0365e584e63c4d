"""Runs TFLite files in LiteRT for 64-bit ARM, in qemu-user, which `make test-arm64` installs.

    python -m tests.arm64.emulator FOLDER cortex-a76 > a76.json

`benchmarks.runtimes` writes `FOLDER`.
"""

import fcntl
import json
import sys
from pathlib import Path
from typing import Any

from tests.emulation import ROOT, run_worker

ENVIRONMENT = ROOT / "build" / "arm64"

BASIC = "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"
CPUS = {
    "cortex-a53": ("0xd03", BASIC),
    "cortex-a72": ("0xd08", BASIC),
    "cortex-a76": ("0xd0b", f"{BASIC} atomics fphp asimdhp asimdrdm lrcpc dcpop asimddp ssbs"),
}
"""Emulated processor -> its part number and features. Only the last has dot products of int8."""

PROCESSOR = """processor\t: {core}
BogoMIPS\t: 48.00
Features\t: {features}
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x4
CPU part\t: {part}
CPU revision\t: 0

"""


def is_set_up() -> bool:
    return (ENVIRONMENT / ".complete").exists()


def run(folder: Path, cpu: str, *arguments: Any) -> dict[str, Any]:
    """Returns what the runtime worker reports about the files in a folder."""
    part, features = CPUS[cpu]
    # LiteRT chooses its kernels by this file. It crashes on the host's file.
    processors = [PROCESSOR.format(core=core, features=features, part=part) for core in (0, 1)]
    root, site = ENVIRONMENT / "root", ENVIRONMENT / "site"
    command = ["qemu-aarch64", "-cpu", cpu, "-L", root, "-E", f"PYTHONPATH={site}"]
    command += ["-E", f"PYTHONHOME={root / 'usr'}", root / "usr/bin/python3.11"]
    with (ENVIRONMENT / ".lock").open("w") as lock:  # All processes share one file of processors.
        fcntl.flock(lock, fcntl.LOCK_EX)
        (root / "proc/cpuinfo").write_text("".join(processors))
        result = run_worker(command, folder, *arguments)
    return dict(result, runtime=f"LiteRT, {cpu}")


if __name__ == "__main__":
    json.dump(run(Path(sys.argv[1]).resolve(), sys.argv[2]), sys.stdout)
