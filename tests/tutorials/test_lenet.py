"""The LeNet tutorial, in its short form: it trains, exports and compares in 8 and in 4 bits."""

import demo_data
import lenet_4bit
import numpy as np
import pytest


@pytest.mark.slow
def test_the_tutorial_in_short() -> None:
    rows = lenet_4bit.run(lenet_4bit.load(quick=True), epochs=3, fine_tuning=1)
    assert [row.name for row in rows] == ["float", "8 bits", "4 bits"]
    assert all(row.accuracy > 0.6 for row in rows)
    for row in rows[1:]:
        assert row.tflite_accuracy == pytest.approx(row.accuracy, abs=0.02)
        assert row.agreement >= 0.98
    # Four bits fit TFLite's codes as they are; contrib's eight bits are rounded again.
    assert rows[2].identical >= 0.99
    assert len(lenet_4bit.table(rows).splitlines()) == 4


def test_pixels_are_codes() -> None:
    data = lenet_4bit.load(quick=True)
    for x in (data.x_train, data.x_test):
        np.testing.assert_allclose(x * 255, np.round(x * 255), atol=1e-4)
    assert data.x_test.max() == 1.0


def test_without_fashion_mnist_it_takes_the_digits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> demo_data.Data:
        raise SystemExit("apt-get install dataset-fashion-mnist")

    monkeypatch.setattr(lenet_4bit, "fashion_mnist", missing)
    assert lenet_4bit.load(quick=False).x_train.shape == (1200, 8, 8, 1)
    printed = capsys.readouterr().out
    assert "apt-get install" in printed
    assert "digits" in printed
