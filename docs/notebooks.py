"""Makes the notebooks of docs/tutorials from the programs beside them, with their outputs.

`make notebooks`. The programs are what is edited, and what the tests run.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import jupytext
from nbclient import NotebookClient

TUTORIALS = Path(__file__).parent / "tutorials"


def make(program: Path) -> None:
    """Executes a program cell by cell in an empty folder, and writes its notebook."""
    notebook = jupytext.read(program)
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, resources={"metadata": {"path": folder}}).execute()
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
        if cell.cell_type == "code":
            # What TensorFlow tells of the machine is no part of the tutorial.
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata.pop("language_info", None)
    jupytext.write(notebook, program.with_suffix(".ipynb"))


if __name__ == "__main__":
    names = sys.argv[1:] or [path.stem for path in sorted(TUTORIALS.glob("*.py"))]
    for name in names:
        print(name, flush=True)
        make(TUTORIALS / f"{name}.py")
