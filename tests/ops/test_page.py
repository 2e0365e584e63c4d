"""docs/operators.md is what the rows say."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_made_of_the_rows():
    assert (DOCS / "operators.md").read_text() == runpy.run_path(DOCS / "operators.py")["page"]()
