"""Tests that stable names keep their arguments: docs/promises.md.

`python -m tests.test_api` writes the names and arguments of a release again.
"""

import dataclasses
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import keras_qat
from keras_qat.keras2.backend import keras

RELEASED = Path(__file__).parent / "fixtures" / "api.txt"
PAGE = Path(__file__).parent.parent / "docs" / "promises.md"
MODULES = ("callbacks", "layers", "recipes", "specs", "targets")


def experimental() -> set[str]:
    (names,) = re.findall(r"Experimental.*?: (.*?)\. All", PAGE.read_text(), flags=re.DOTALL)
    return set(re.findall(r"`(\w+)`", names))


def arguments(item: Any) -> list[str]:
    """Returns the arguments of a function or class: `name` or `name=`, keyword-only after `*`."""
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
            # Keras changes the arguments of a model's class when the first model is created.
            is_model = isinstance(item, type) and issubclass(item, keras.Model)
            yield f"{prefix}{name}", arguments(item) if callable(item) and not is_model else []
        elif name in MODULES:
            yield from public(item, f"{name}.")


def released() -> dict[str, list[str]]:
    entries = re.findall(r"^([\w.]+)\((.*)\)$", RELEASED.read_text(), flags=re.MULTILINE)
    return {name: [item for item in listed.split(", ") if item] for name, listed in entries}


def test_experimental_names_exist():
    assert experimental() <= set(keras_qat.__all__)


def test_stable_names_take_what_they_took():
    now = dict(public())
    for name, before in released().items():
        taken = now[name]
        if dataclasses.is_dataclass(getattr(keras_qat, name, None)):  # Programs read its fields.
            assert {item.rstrip("=") for item in before} <= {item.rstrip("=") for item in taken}
            continue
        positional = list(itertools.takewhile(lambda item: not item.startswith("*"), before))
        renamed = zip(taken, positional, strict=False)  # The old name is still a keyword.
        assert all(new == old or new not in before for new, old in renamed), name
        assert set(before) <= set(taken), name
        new = [item for item in taken if item not in before]
        assert all(item.endswith("=") or item.startswith("*") for item in new), (name, new)


def documented(item: Any, name: str) -> bool:
    """Returns whether an argument has an entry under `Args:` with more than a reference."""
    entry = re.search(rf"^    +(?:\w+, )*{name}(?:, \w+)*: (.*)$", inspect.getdoc(item) or "", re.M)
    return bool(entry) and not re.match(r"as (in|of|for) ", entry[1])


def test_arguments_are_described_where_they_are_taken():
    """IDEs show no other docstring. Layers are excluded, because users do not create them."""
    modules = (getattr(keras_qat, name) for name in MODULES if name != "layers")
    items = {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in (keras_qat, *modules)
        for name in module.__all__
        if name != "QuantizedModel"
    }
    items["Recipe.override"] = keras_qat.Recipe.override
    bare = [
        f"{name}: {argument}"
        for name, item in items.items()
        if inspect.isroutine(item) or inspect.isclass(item)
        for argument in (listed.rstrip("=") for listed in arguments(item))
        if argument.isidentifier() and argument != "self" and not documented(item, argument)
    ]
    assert not bare


def test_returns_are_sentences():
    """In the API reference, text before a colon would be shown as a type."""
    firsts = {
        name: re.findall(
            r"^Returns:\n    (.*)$", inspect.getdoc(getattr(keras_qat, name)) or "", re.M
        )
        for name in keras_qat.__all__
    }
    assert not {name: first for name, first in firsts.items() if ": " in "".join(first)}


def test_reference_groups_names_by_what_is_promised():
    page = PAGE.with_name("reference") / "index.md"
    groups = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page.read_text(), re.M | re.S))
    names = {group: re.findall(r"^\| .*?\[`(\w+)", text, re.M) for group, text in groups.items()}
    assert list(names) == ["Everyday", "Advanced", "Experimental"]
    assert set(names["Experimental"]) == experimental()
    listed = [name for group in names.values() for name in group]
    assert sorted(listed) == sorted(set(keras_qat.__all__) - {"__version__"})


if __name__ == "__main__":
    RELEASED.write_text("".join(f"{name}({', '.join(took)})\n" for name, took in public()))
