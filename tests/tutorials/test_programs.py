"""Tests short runs of the demo, the tutorials' programs and the example project."""

import dataclasses
import gzip
import os
import shutil
import subprocess
import sys
from pathlib import Path

import demo
import demo_data
import lenet_4bit
import numpy as np
import pytest
import tune_digits
from demo_results import Results

GOOD = Results(
    float_accuracy=0.97,
    qat_accuracy=0.97,
    tflite_accuracy=0.968,
    agreement=0.998,
    identical=0.99,
    max_difference=1.0,
    float_size=4_000_000,
    int8_size=1_000_000,
    float_latency=0.2,
    int8_latency=0.1,
    float_operations=0,
    reloaded_identical=True,
)


@pytest.mark.slow
@pytest.mark.legacy
def test_the_whole_job_in_short(tmp_path: Path) -> None:
    data = demo_data.digits().subset(train=512, test=200)
    results = demo.run(data, epochs=3, qat_epochs=2, directory=tmp_path)
    assert results.float_accuracy > 0.7
    assert results.tflite_accuracy > 0.7
    assert results.agreement >= 0.98
    assert results.identical >= 0.95
    assert results.float_operations == 0
    assert results.reloaded_identical
    assert 3.5 * results.int8_size <= results.float_size
    assert results.float_latency > 0
    assert results.int8_latency > 0
    assert (tmp_path / "int8.tflite").stat().st_size == results.int8_size
    assert (tmp_path / "saved_model" / "saved_model.pb").exists()


def test_results_that_reach_everything() -> None:
    assert all(GOOD.checks().values())
    assert "4.00x smaller" in str(GOOD)
    assert "2.00x faster" in str(GOOD)


@pytest.mark.parametrize(
    "worse",
    [
        *({"tflite_accuracy": 0.96}, {"agreement": 0.99}, {"identical": 0.97}),
        *({"max_difference": 2.0}, {"int8_size": 2_000_000}, {"float_operations": 1}),
        {"reloaded_identical": False},
    ],
    ids=lambda worse: next(iter(worse)),
)
def test_each_check_can_fail(worse: dict[str, float]) -> None:
    checks = dataclasses.replace(GOOD, **worse).checks()
    assert list(checks.values()).count(False) == 1


@pytest.mark.parametrize("reached", [True, False])
def test_exit_status_says_whether_all_was_reached(
    reached: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = GOOD if reached else dataclasses.replace(GOOD, agreement=0.5)
    monkeypatch.setattr(demo, "run", lambda *arguments: results)
    assert demo.main([]) == (0 if reached else 1)
    assert ("MISSED" in capsys.readouterr().out) is not reached


def test_digits_are_split_without_overlap() -> None:
    data = demo_data.digits()
    assert data.x_train.shape == (1200, 8, 8, 1)
    assert data.x_test.shape == (597, 8, 8, 1)
    assert data.x_train.min() == 0
    assert data.x_train.max() == 1
    assert set(data.y_train) == set(data.y_test) == set(range(10))
    together = np.concatenate([data.x_train, data.x_test]).reshape(1797, -1)
    assert len(np.unique(together, axis=0)) == 1797


@pytest.mark.parametrize("packed", [True, False])
def test_fashion_mnist_reads_the_files_of_the_package(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(name: str, array: np.ndarray) -> None:
        header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
        contents = header + array.astype(np.uint8).tobytes()
        name, contents = (f"{name}.gz", gzip.compress(contents)) if packed else (name, contents)
        (tmp_path / name).write_bytes(contents)

    images = np.arange(2 * 28 * 28).reshape(2, 28, 28) % 256
    for part in ("train", "t10k"):
        write(f"{part}-images-idx3-ubyte", images)
        write(f"{part}-labels-idx1-ubyte", np.array([3, 7]))
    monkeypatch.setattr(demo_data, "DEBIAN", tmp_path)
    data = demo_data.fashion_mnist()
    np.testing.assert_allclose(data.x_test[..., 0] * 255, images, rtol=1e-6)
    assert data.y_train.tolist() == [3, 7]


def test_fashion_mnist_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline() -> None:
        raise OSError("no network")

    monkeypatch.setattr(demo_data, "DEBIAN", tmp_path / "missing")
    monkeypatch.setattr(demo_data.keras.datasets.fashion_mnist, "load_data", offline)
    with pytest.raises(SystemExit, match="apt-get install dataset-fashion-mnist"):
        demo_data.fashion_mnist()


@pytest.mark.slow
def test_the_lenet_tutorial_in_short() -> None:
    rows = lenet_4bit.run(lenet_4bit.load(quick=True), epochs=3, fine_tuning=1)
    assert [row.name for row in rows] == ["float", "8 bits", "4 bits"]
    assert all(row.accuracy > 0.6 for row in rows)
    for row in rows[1:]:
        assert row.tflite_accuracy == pytest.approx(row.accuracy, abs=0.02)
        assert row.agreement >= 0.98
    # Four bits fit TFLite's values exactly. Contrib's eight bits are rounded again.
    assert rows[2].identical >= 0.99
    assert len(lenet_4bit.table(rows).splitlines()) == 4


def test_pixels_are_codes() -> None:
    data = lenet_4bit.load(quick=True)
    for x in (data.x_train, data.x_test):
        np.testing.assert_allclose(x * 255, np.round(x * 255), atol=1e-4)
    assert data.x_test.max() == 1.0


def test_without_fashion_mnist_lenet_takes_the_digits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> demo_data.Data:
        raise SystemExit("apt-get install dataset-fashion-mnist")

    monkeypatch.setattr(lenet_4bit, "fashion_mnist", missing)
    assert lenet_4bit.load(quick=False).x_train.shape == (1200, 8, 8, 1)
    printed = capsys.readouterr().out
    assert "apt-get install" in printed
    assert "digits" in printed


ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_example_project(tmp_path: Path) -> None:
    project = shutil.copytree(ROOT / "examples/digits", tmp_path / "digits")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for program in ("train.py", "export.py", "run.py"):
        command = [sys.executable, program]
        output = subprocess.check_output(command, cwd=project, env=environment, text=True)
    right, count = (int(word) for word in output.split() if word.isdigit())
    assert right > 0.9 * count


@pytest.mark.slow
def test_separate_outputs_are_needed(tmp_path: Path) -> None:
    result, report = tune_digits.run(tmp_path)
    assert result.is_met
    assert "outputs=['light', 'scores'], calibrate" in result.best.settings
    assert report.identical == 1
    assert (tmp_path / "digits.tflite").exists()
