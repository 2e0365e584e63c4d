"""Files for commands: models, and the same data in many formats."""

import numpy as np
import pytest

from tests.cli.running import X, run
from tests.helpers import scramble
from tests.networks.small import tiny_net

MODULE = """
import numpy as np
x = np.load({path!r})
def representative():
    for row in x:
        yield [row[np.newaxis]]
"""


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Creates a float model, data, the calibrated model, and its file."""
    folder = tmp_path_factory.mktemp("files")
    scramble(tiny_net()).save(folder / "float.keras")
    np.save(folder / "x.npy", X)
    told = run("calibrate", folder / "float.keras", folder / "x.npy", "-o", folder / "qat.keras")
    assert "from 40 examples" in told
    told = run("export", folder / "qat.keras", folder / "model.tflite")
    assert f"model.tflite: {(folder / 'model.tflite').stat().st_size} bytes" in told
    return folder


@pytest.fixture(scope="session")
def sources(files):
    """Writes the same data in every format."""
    np.savez(files / "one.npz", anything=X)
    np.savez(files / "x.npz", x=X, y=np.arange(40))
    np.savez(files / "named.npz", image=X, y=np.arange(40))
    rows = X.reshape(40, -1)
    np.savetxt(files / "x.csv", rows, delimiter=",")
    names = ",".join([*(f"p{place}" for place in range(72)), "label"])
    table = np.c_[rows, np.arange(40)]
    np.savetxt(files / "labels.csv", table, delimiter=",", header=names, comments="")
    (files / "prepare.py").write_text(MODULE.format(path=str(files / "x.npy")))
    return files
