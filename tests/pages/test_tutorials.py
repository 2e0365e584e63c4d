"""Tests that tutorials run, and that their notebooks (`make notebooks`) are up to date."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from keras_qat.keras2.backend import keras

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))
TUTORIALS = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)


def cells(program: Path) -> list[tuple[str, str]]:
    """Returns kind and text of each cell of a program, as jupytext reads its percent format."""
    result = []
    for part in re.split(r"^# %%", program.read_text(), flags=re.M)[1:]:
        head, text = part.split("\n", 1)
        kind = "markdown" if "[markdown]" in head else "code"
        if kind == "markdown":
            text = re.sub(r"^# ?", "", text, flags=re.M)
        result.append((kind, text.strip()))
    return result


@TUTORIALS
def test_notebook_is_of_its_program(program):
    notebook = json.loads(program.with_suffix(".ipynb").read_text())
    result = [(cell["cell_type"], "".join(cell["source"]).strip()) for cell in notebook["cells"]]
    assert result == cells(program)
    outputs = [item for cell in notebook["cells"] for item in cell.get("outputs", ())]
    assert outputs
    assert all(output["output_type"] != "error" for output in outputs)


@pytest.mark.slow
@pytest.mark.skipif(keras.__name__ != "tf_keras", reason="tutorials import tf_keras")
@TUTORIALS
def test_tutorial(program, tmp_path):
    """Tutorials assert their statements. Each runs in a new process: one configures devices."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "error::UserWarning:__main__",
    }
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
