"""The job on the README's first page does what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from keras_qat.keras2.backend import keras

README = Path(__file__).parent.parent.parent / "README.md"


@pytest.mark.slow
@pytest.mark.skipif(keras.__name__ != "tf_keras", reason="the page imports tf_keras")
def test_the_job(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    job, *_ = re.findall(r"^```python\n(.*?)^```$", README.read_text(), flags=re.M | re.S)
    keras.utils.set_random_seed(1)
    exec(compile(job, str(README), "exec"), {})
    shown = capsys.readouterr().out
    assert re.search(r"dense\w* +100\.000% +0 LSB +0 LSB +100\.00%", shown)
    assert (tmp_path / "model.tflite").exists()
