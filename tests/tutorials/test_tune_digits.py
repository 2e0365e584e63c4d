"""The tutorial on `tune`: a network that needs several steps."""

from pathlib import Path

import pytest
import tune_digits


@pytest.mark.slow
def test_equalization_and_separate_outputs_are_both_needed(tmp_path: Path) -> None:
    result, report = tune_digits.run(tmp_path)
    assert result.is_met
    assert "outputs=['light', 'scores'], equalize, calibrate" in result.best.settings
    assert report.identical == 1
    assert (tmp_path / "digits.tflite").exists()
