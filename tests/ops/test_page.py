"""docs/operators.md is what the rows say."""

from __future__ import annotations

from pathlib import Path

from keras_qat.ops.docs_page import page

PAGE = Path(__file__).parents[2] / "docs" / "operators.md"


def test_the_page_is_made_of_the_rows():
    assert PAGE.read_text() == page()
