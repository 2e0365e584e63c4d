"""Stable names keep their arguments: docs/promises.md.

`python -m tests.test_api` writes the names and arguments of a release anew.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import keras_qat
from keras_qat.frontend.keras2.backend import keras

RELEASED = Path(__file__).parent / "fixtures" / "api.txt"
PAGE = Path(__file__).parent.parent / "docs" / "promises.md"
MODULES = ("callbacks", "layers", "recipes", "specs", "targets")


def experimental() -> set[str]:
    (names,) = re.findall(r"Experimental.*?: (.*?)\. All", PAGE.read_text(), flags=re.DOTALL)
    return set(re.findall(r"`(\w+)`", names))


def arguments(item: Any) -> list[str]:
    """The arguments of a function or a class: `name` or `name=`, behind `*` by keyword only."""
    try:
        parameters = inspect.signature(item).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = inspect.Parameter
    names, by_keyword = [], False
    for parameter in parameters:
        if parameter.kind is kinds.KEYWORD_ONLY and not by_keyword:
            names.append("*")
            by_keyword = True
        mark = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        names.append(f"{mark}{parameter.name}{'' if parameter.default is kinds.empty else '='}")
    return names


def public(module: ModuleType = keras_qat, prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    for name in sorted(set(module.__all__) - (experimental() if not prefix else set())):
        item = getattr(module, name)
        if not isinstance(item, ModuleType):
            # Keras changes the arguments of a model's class when the first model is made.
            is_model = isinstance(item, type) and issubclass(item, keras.Model)
            yield f"{prefix}{name}", arguments(item) if callable(item) and not is_model else []
        elif name in MODULES:
            yield from public(item, f"{name}.")


def released() -> dict[str, list[str]]:
    entries = re.findall(r"^([\w.]+)\((.*)\)$", RELEASED.read_text(), flags=re.MULTILINE)
    return {name: [each for each in listed.split(", ") if each] for name, listed in entries}


def test_experimental_names_exist():
    assert experimental() <= set(keras_qat.__all__)


@pytest.mark.parametrize("name", released())
def test_stable_names_take_what_they_took(name):
    now, before = dict(public()), released()[name]
    assert name in now, f"{name} is gone"
    if dataclasses.is_dataclass(getattr(keras_qat, name, None)):  # Programs read its fields.
        assert {each.rstrip("=") for each in before} <= {each.rstrip("=") for each in now[name]}
        return
    positional = before[: before.index("*")] if "*" in before else before
    assert now[name][: len(positional)] == positional
    assert set(before) <= set(now[name])
    new = [each for each in now[name] if each not in before]
    assert all(each.endswith("=") or each.startswith("*") for each in new), new


if __name__ == "__main__":
    RELEASED.write_text("".join(f"{name}({', '.join(took)})\n" for name, took in public()))
