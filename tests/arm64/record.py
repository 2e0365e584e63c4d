"""Records LiteRT's results for `cases` on an emulated Cortex-A76, in `recorded.npz`.

python -m tests.arm64.record
"""

import tempfile
from pathlib import Path

import numpy as np

from tests.arm64 import emulator
from tests.arm64.cases import cases
from tests.ops.harness import file_of

RECORDED = Path(__file__).parent / "recorded.npz"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case, (node, inputs) in cases():
            contents = file_of(node, len(inputs["input_0"]))
            (folder / f"{case}.tflite").write_bytes(contents)
            np.savez(folder / f"{case}.npz", **inputs)  # type: ignore[arg-type]
        outputs = folder / "outputs"
        outputs.mkdir()
        emulator.run(folder, "cortex-a76", outputs)
        recorded = {path.stem: np.load(path)["arr_0"] for path in sorted(outputs.glob("*.npz"))}
    np.savez_compressed(RECORDED, **recorded)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
