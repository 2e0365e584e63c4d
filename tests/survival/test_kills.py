"""Tests that training which is killed at random times and restarted has the same result."""

import functools
import math
import signal
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keras_qat
from tests.helpers import rng
from tests.networks.small import tiny_net
from tests.processes import FORKS, fork
from tests.survival import training


def run(folder: Path, way: str, recipe: str, kill_at: float | None = None) -> bool:
    """Trains, and returns whether it was killed at `kill_at`: a step and a fraction of its time."""
    ours, theirs = FORKS.Pipe()
    process = fork(training.run, folder, way, recipe, kill_at is not None, theirs)
    theirs.close()
    try:
        while True:
            if ours.recv() >= (kill_at or math.inf):
                time.sleep(kill_at % 1 / 4)  # Longer than a step and a save take.
                process.kill()
    except EOFError:
        process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Returns the final state of an uninterrupted run."""

    @functools.cache
    def of(recipe: str) -> dict[str, np.ndarray]:
        folder = tmp_path_factory.mktemp(recipe)
        assert not run(folder, "none", recipe)
        return dict(np.load(folder / training.END))

    return of


def survives(folder: Path, way: str, recipe: str, kills: int, expected: dict) -> None:
    """Kills a run several times, and compares its final state."""
    moments = sorted(rng(hash_of(way, recipe)).uniform(1, training.TOTAL - 1, kills))
    assert [run(folder, way, recipe, moment) for moment in moments] == [True] * kills
    assert not run(folder, way, recipe)
    result = dict(np.load(folder / training.END))
    assert result.keys() == expected.keys()
    for name, value in result.items():
        np.testing.assert_array_equal(value, expected[name], name)


def hash_of(*names: str) -> int:
    return zlib.crc32("/".join(names).encode())


@pytest.mark.slow
def test_a_killed_run_goes_on(uninterrupted, tmp_path):
    survives(tmp_path, "backup", "int8", 1, uninterrupted("int8"))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["int8", "contrib"])
@pytest.mark.parametrize("way", list(training.WAYS)[1:])
def test_every_way_to_go_on(way, recipe, uninterrupted, tmp_path):
    survives(tmp_path, way, recipe, 2, uninterrupted(recipe))


@pytest.mark.parametrize("name", ["qat.keras", "qat.h5", "qat.weights.h5"])
def test_a_save_that_fails_leaves_the_file_as_it_was(name, tmp_path, monkeypatch):
    import h5py

    qat, path = keras_qat.quantize_model(tiny_net()), tmp_path / name
    save = qat.save_weights if "weights" in name else qat.save
    save(path)
    before = path.read_bytes()

    def fails(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(h5py.Group, "create_dataset", fails)
    monkeypatch.setattr(h5py.Group, "__setitem__", fails)
    with pytest.raises(KeyboardInterrupt):
        save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
