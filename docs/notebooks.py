"""Write the notebooks of docs/tutorials from the programs beside them: `make notebooks`.

Edit the programs; the tests run them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import jupytext
from nbclient import NotebookClient

TUTORIALS = Path(__file__).parent / "tutorials"


def write_notebook(program: Path) -> None:
    """Run a program cell by cell in an empty folder, and write its notebook."""
    notebook = jupytext.read(program)
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, resources={"metadata": {"path": folder}}).execute()
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
        if cell.cell_type == "code":
            # Messages of TensorFlow depend on the machine.
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata.pop("language_info", None)
    jupytext.write(notebook, program.with_suffix(".ipynb"))


if __name__ == "__main__":
    names = sys.argv[1:] or [path.stem for path in sorted(TUTORIALS.glob("*.py"))]
    for name in names:
        print(name, flush=True)
        write_notebook(TUTORIALS / f"{name}.py")
