"""Fixtures that several test modules share, and the conformance figures printed at the end."""

import collections
import dataclasses
import gc
import os
import time
from typing import Any

import numpy as np
import pytest

from benchmarks.bars import format_figure, measure_slowest
from benchmarks.rotation import NO_TIME
from tests.processes import run_program
from tests.sampling import keep_part, leave_the_rest_to_slow

START = time.monotonic()

os.environ["KERAS_QAT_VERIFY_PASSES"] = "1"  # Checks the graph after each pass of lowering.


@dataclasses.dataclass
class Trained:
    """A trained model, its TFLite file and inputs."""

    float_model: Any
    model: Any
    tflite: bytes
    x: np.ndarray


def pytest_addoption(parser):
    parser.addoption(
        "--seeds",
        type=int,
        default=200,
        help="random examples of each operator that slow tests go up to (default: 200)",
    )
    parser.addoption(
        "--part",
        type=int,
        help="run only the slow tests of this part of the rotation (benchmarks/rotation.py)",
    )
    parser.addoption(
        "--minutes",
        type=float,
        default=float("inf"),
        help="skip what has not begun after so many minutes (default: no limit)",
    )


def pytest_configure(config):
    """Makes garbage collection rare, and turns off features of TensorFlow for long programs.

    Seeds keep TensorFlow's kernels, which saves 10 to 20 % of the time. Weights and data use random
    numbers that do not depend on kernels. Data iterators do not tune themselves, because the tuning
    thread sometimes misses the signal to stop, and sleeps for up to a minute.
    """
    if config.getoption("numprocesses", None):
        return  # This process only distributes tests. It need not import TensorFlow.
    import tensorflow as tf
    from tensorflow.python.eager.context import Context

    def set_seed_and_keep_kernels(self, seed, set_seed=Context._set_global_seed):
        handle, self._context_handle = self._context_handle, None
        try:
            set_seed(self, seed)
        finally:
            self._context_handle = handle

    options = tf.data.Options()
    options.autotune.enabled = False
    gc.set_threshold(100_000, 10, 10)
    Context._set_global_seed = set_seed_and_keep_kernels
    tf.data.Dataset._apply_debug_options = lambda self: self.with_options(options)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Refuses modules that compute when imported, because TensorFlow then hangs in forks."""
    from tensorflow.python.eager import context

    computed_before = context.context()._initialized
    report = yield
    if context.context()._initialized and not computed_before:
        raise pytest.UsageError(f"{collector.nodeid} computes with TensorFlow on import.")
    return report


def pytest_collection_finish():
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # Before pytest selects slow tests.
def pytest_collection_modifyitems(config, items):
    leave_the_rest_to_slow(items)
    if config.getoption("part") is not None:
        config.hook.pytest_deselected(items=keep_part(items, config.getoption("part")))
    _put_together(items)


def pytest_runtest_setup(item):
    if time.monotonic() - START > 60 * item.config.getoption("minutes"):
        pytest.skip(NO_TIME)


def _put_together(items):
    """Sorts tests that share a resource next to each other, so that one worker creates it once.

    Resources are the exports of a family of layers, and the servers from which processes are
    forked.
    """
    places: dict[Any, int] = {}

    def place(item: pytest.Function) -> tuple[bool, int]:
        family = getattr(item, "callspec", None) and item.callspec.params.get("family")
        together = family is not None and item.path.parent.name == "end_to_end"
        key = (item.path, family) if together else item.nodeid
        forks = hasattr(item.module, "fork") or "fresh_process" in item.fixturenames
        return not forks, places.setdefault(key, len(places))

    items.sort(key=place)


@pytest.fixture(scope="session")
def seeds(request) -> int:
    """Returns how many random examples of an operator slow tests run."""
    return request.config.getoption("seeds")


@pytest.fixture(scope="session")
def exported() -> Trained:
    """Returns the residual network after a few training steps. Tests must not change it."""
    import keras_qat
    from tests.helpers import images, train
    from tests.networks.small import residual_net

    float_model = residual_net()
    x = images(96, (8, 8, 1))
    model = train(keras_qat.quantize_model(float_model), x, steps=24)
    # Tests compare quantized values, so there should be many different ones.
    assert len(np.unique(model.predict(x, verbose=0))) > 100
    return Trained(float_model, model, keras_qat.export_tflite(model), x)


@pytest.fixture
def fresh_process(tmp_path):
    """Returns a function that runs Python code in a new process, and returns its `result`.

    The process has only imported TensorFlow.
    """

    def run(code: str, **arrays: np.ndarray) -> np.ndarray:
        np.savez(tmp_path / "arrays.npz", **arrays)
        program = tmp_path / "program.py"
        program.write_text(
            f"import numpy as np\narrays = np.load({str(tmp_path / 'arrays.npz')!r})\n"
            f"{code}\nnp.save({str(tmp_path / 'result.npy')!r}, result)\n"
        )
        assert not run_program(program)
        return np.load(tmp_path / "result.npy")

    return run


FLIPS = "rounding flips"
"""How often a fake quantizer rounded differently from the recorded run of the original."""


@pytest.fixture
def count_flips(record_property):
    """Returns a function that records the number of rounding flips in a comparison."""

    def count(number: int) -> None:
        if number:
            record_property(FLIPS, number)

    return count


def pytest_terminal_summary(terminalreporter):
    seconds: collections.Counter[str] = collections.Counter()
    for outcome in ("passed", "failed", ""):  # The last test: ends the fixtures.
        for item in terminalreporter.stats.get(outcome, []):
            seconds[item.nodeid] += item.duration
    if len(seconds) > 1000:
        share = measure_slowest(list(seconds.values()))
        terminalreporter.write_line(format_figure("time in the slowest tenth of tests, %", share))
    reports = [
        item
        for outcome in ("passed", "failed")
        for item in terminalreporter.stats.get(outcome, [])
        if "conformance" in item.nodeid
    ]
    flips = [
        (report.nodeid, count)
        for report in reports
        for name, count in report.user_properties
        if name == FLIPS
    ]
    if reports:
        terminalreporter.write_sep("-", "conformance with tf.contrib.quantize")
        terminalreporter.write_line(f"{FLIPS}: {sum(n for _, n in flips)} {flips or ''}")
