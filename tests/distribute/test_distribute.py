"""Tests training on several replicas: `tf.distribute` with two devices, and with two workers."""

import contextlib
import multiprocessing
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.distribute import programs
from tests.processes import FORKS, fork, run_all


@pytest.mark.parametrize("recipe", ["int8", pytest.param("contrib", marks=pytest.mark.slow)])
def test_replicas_agree_with_each_other_and_with_the_file(recipe, fresh_process):
    program = "from tests.distribute.programs import mirrored"
    assert fresh_process(f"{program}\nresult = mirrored({recipe!r}) is None")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["int8", "contrib"])
def test_a_model_that_replicas_trained_is_saved(recipe, tmp_path):
    assert run_all(fork(programs.saved, recipe, tmp_path)) == [0]


@pytest.mark.slow
def test_verbs_under_a_strategy(tmp_path):
    assert run_all(fork(programs.verbs, tmp_path)) == [0]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["int8", "contrib"])
def test_where_branches_decide(recipe):
    """Replicas cannot wait for each other within a branch."""
    assert run_all(fork(programs.loops, recipe)) == [0]


ROUNDING = 1e-4
"""Allowed difference because of sums in another order, over 12 steps."""
BOUNDS = {
    True: {"weights": ROUNDING, "ranges": ROUNDING, "statistics": ROUNDING, "counters": 0},
    False: {"weights": 0.01, "ranges": 0.2, "statistics": 0.01, "counters": 0},
}


@pytest.mark.slow
@pytest.mark.parametrize("alike", [True, False], ids=["alike", "split"])
@pytest.mark.parametrize("recipe", ["int8", "contrib"])
def test_two_replicas_against_one_device(recipe, alike, record_property):
    """Replicas observe half of a batch each: the mean range is narrower than the batch's."""
    ours, theirs = FORKS.Pipe()
    process = fork(programs.against_one_device, recipe, alike, theirs)
    assert run_all(process) == [0]
    received = ours.recv()
    record_property("differences", received)
    assert all(received[kind] <= bound for kind, bound in BOUNDS[alike].items()), received


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for item in sockets:
            item.bind(("localhost", 0))
        return [item.getsockname()[1] for item in sockets]


def cluster(recipe, folder, dies=False, count=2, devices=1):
    """Returns the exit codes of the workers."""
    ports = free_ports(count)
    how = recipe, folder, dies, devices
    return run_all(*(fork(programs.worker, index, ports, *how) for index in range(count)))


def ends(folder):
    return [list(np.load(folder / f"{index}.npz").values()) for index in (0, 1)]


def alone_and_shared(program, folder):
    """Returns the results of one process and of each of two workers."""
    for count in (1, 2):
        ports = free_ports(count)
        assert run_all(*(fork(program, i, ports, folder) for i in range(count))) == [0] * count
    return [np.load(folder / f"{name}.npz") for name in ("1_0", "2_0", "2_1")]


@pytest.mark.slow
def test_workers_share_calibration(tmp_path):
    """Each worker has half of the data, and gets the numbers of one process."""
    alone, *workers = alone_and_shared(programs.shares_the_work, tmp_path)
    for name, expected in alone.items():
        for result in workers:
            np.testing.assert_array_equal(result[name], expected)


@pytest.mark.slow
def test_workers_share_learned_rounding(tmp_path):
    """Each of four replicas computes a quarter of the examples of a step.

    Gradients are summed in another order, which changes no level of these weights. Three levels
    would change if each replica counted its share as all examples, and one if all had the same
    share.
    """
    alone, *workers = alone_and_shared(programs.shares_the_rounding, tmp_path)
    learned, nearest = list(alone.values())[::2], list(alone.values())[1::2]
    assert sum(np.sum(one != other) for one, other in zip(learned, nearest, strict=True)) >= 5
    for worker in workers:
        for name, expected in alone.items():
            np.testing.assert_array_equal(worker[name], expected)


@pytest.mark.slow
def test_a_worker_exports_by_itself(tmp_path):
    assert cluster("int8", tmp_path) == [0, 0]
    for one, other in zip(*ends(tmp_path), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["int8", "contrib"])
def test_a_killed_worker_comes_back(recipe, tmp_path):
    """The other worker ends, too. Both continue from the backup, with the same final result."""
    left_alone, killed = tmp_path / "left alone", tmp_path / "killed"
    for item in (left_alone, killed):
        item.mkdir()
    assert cluster(recipe, left_alone) == [0, 0]
    assert cluster(recipe, killed, dies=True) == [programs.UNAVAILABLE, -9]
    assert cluster(recipe, killed) == [0, 0]
    for one, other in zip(ends(left_alone), ends(killed), strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["int8", "contrib"])
def test_parameter_servers(recipe):
    first, second, third = (f"localhost:{port}" for port in free_ports(3))
    jobs = {"worker": [first, second], "ps": [third]}
    tasks = [(kind, index) for kind, job in jobs.items() for index in range(len(job))]
    # In forks, TensorFlow would draw equal random names of functions, and refuse the second one.
    spawn = multiprocessing.get_context("spawn").Process
    servers = [spawn(target=programs.server, args=(jobs, *task)) for task in tasks]
    for server in servers:
        server.start()
    try:
        assert run_all(fork(programs.coordinator, jobs, recipe)) == [0]
    finally:
        for server in servers:
            server.kill()


@pytest.mark.slow
def test_the_program_for_clusters(tmp_path):
    """Runs the program twice in two processes. The second run does not train models again."""
    program = Path(__file__).parents[2] / "tutorials/cluster.py"
    command = [sys.executable, program, "--folder", tmp_path, "--workers", "2"]
    for trains in (True, False):
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        assert ("Epoch 5/5" in run.stdout) is trains
        assert "Same and good" in run.stdout
