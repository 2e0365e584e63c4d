"""The example project trains, exports and runs its file."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
