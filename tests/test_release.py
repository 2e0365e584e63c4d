"""Tests that several files state the same about a release."""

import re
from pathlib import Path

import pytest

import keras_qat

ROOT = Path(__file__).parent.parent
ADDRESS = "keras-qat.example"

pytestmark = pytest.mark.skipif(
    not (ROOT / "conda").is_dir(), reason="the repository is not there, only the package"
)


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_all_files_have_the_version():
    (cited,) = re.findall(r"^version: (.*)$", text("CITATION.cff"), re.M)
    (packaged,) = re.findall(r'^  version: "(.*)"$', text("conda/recipe.yaml"), re.M)
    latest = re.findall(r"^## \[(\d.*?)\]", text("CHANGELOG.md"), re.M)[0]
    assert {cited, packaged, latest} == {keras_qat.__version__}


def test_the_recipe_of_conda_has_the_same_requirements():
    (block,) = re.findall(r"^dependencies = \[(.*?)^\]", text("pyproject.toml"), re.M | re.S)
    wanted = dict(re.findall(r'^    "([\w-]+)(.*?)"', block, re.M))
    (listed,) = re.findall(r"^  run:\n((?:    - .*\n)+)", text("conda/recipe.yaml"), re.M)
    required = dict(re.findall(r"- ([\w-]+) (.*)", listed))
    assert wanted.items() <= required.items()


def test_the_address_stands_in_one_line():
    names = ["pyproject.toml", "README.md", "CITATION.cff", "mkdocs.yml", "conda/recipe.yaml"]
    names += [str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")]
    lines = [line for name in names for line in text(name).splitlines() if ADDRESS in line]
    assert lines == [f'address = "https://{ADDRESS}/keras-qat"']


def test_actions_are_pinned_by_hash():
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    used = [line for path in workflows for line in re.findall(r"uses: (.*)", path.read_text())]
    assert used
    assert not [line for line in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v[\d.]+", line)]
