"""The layout of the house: what may know what."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "keras_qat"
OTHERS_PRIVATE = re.compile(
    r"\b(?!self\b|cls\b)(\w+)\._(?!_|replace\b)(flatten|keras|trainable|non_trainable|call_spec|"
    r"nested|inbound|conform|is_graph|nodes|dtype|tracking|steps_per|attention|could_use)\w*"
)
"""A private attribute of Keras' on something else than the class itself."""


def modules(*folders: str) -> list[Path]:
    roots = [PACKAGE / folder for folder in folders] if folders else [PACKAGE]
    return sorted(path for root in roots for path in root.rglob("*.py"))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_is_private_to_keras_is_known_in_one_room(path):
    if path.parent.name in ("keras2", "keras3"):
        return
    found = [match.group(0) for match in OTHERS_PRIVATE.finditer(path.read_text())]
    assert not found


@pytest.mark.parametrize("path", modules("arithmetic", "ops"), ids=lambda path: path.name)
def test_operators_know_nothing_of_models(path):
    """Rows and arithmetic stand below placement, layers and verbs."""
    above = ("layers", "placement", "lower", "quantize", "rewrite", "contrib", "verify", "export")
    for name in re.findall(r"^\s*from keras_qat\.(\w+)", path.read_text(), flags=re.M):
        assert name not in above, f"{path.name} imports keras_qat.{name}"


def test_contrib_is_known_by_its_name_in_the_recipes_only():
    for path in modules():
        if path.parent.name != "contrib" and path.name != "recipes.py":
            compared = re.findall(r"[!=]= \"contrib\"", path.read_text())
            assert not compared, path
