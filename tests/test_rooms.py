"""Tests the layout of the package: imports between rooms, and facts that belong to one room."""

import ast
import functools
import gc
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from keras_qat.arithmetic.kernel_families import FAMILIES
from keras_qat.ops.all_ops import ROWS
from keras_qat.ops.op import Op

PACKAGE = Path(__file__).parent.parent / "keras_qat"
ORDER = (
    *("version", "messages", "arithmetic", "keras2", "helper_layers", "graph"),
    *("tracing", "imports", "io", "tflite", "ops", "config"),
    *("lowering", "placement", "training", "integer_graph", "export", "rewriting", "analysis"),
)
"""The rooms. A module imports from its own room and from rooms before it."""

INDEPENDENT = [
    ("rewriting", "export"),
    *((room, "arithmetic") for room in ("keras2", "helper_layers", "graph", "tracing", "imports")),
]
"""Pairs of rooms that do not import from each other at all."""

OTHERS_PRIVATE = re.compile(
    r"\b(?!self\b|cls\b)(\w+)\._(?!_|replace\b)(flatten|keras|trainable|non_trainable|call_spec|"
    r"nested|inbound|conform|is_graph|nodes|dtype|tracking|steps_per|attention|could_use)\w*"
)
"""A private attribute of Keras, read from another object than `self` and `cls`."""

MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.fixture(scope="module", autouse=True)
def collect_garbage():
    gc.collect()  # If large garbage is collected while Python 3.11 parses, `ast` fails.


@functools.cache
def parse(module: Path) -> ast.Module:
    return ast.parse(module.read_text("utf-8"))


def room(module: Path) -> str:
    """Returns the folder of a module; "" for the root, which no room imports."""
    parts = module.relative_to(PACKAGE).with_suffix("").parts
    return parts[0] if len(parts) > 1 or parts[0] in ORDER else ""


def imported_rooms(module: Path) -> Iterator[str]:
    """Yields the rooms that a module imports from, including imports in functions and for types."""
    for node in ast.walk(parse(module)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            path = [node.module or ""]
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            paths = names if node.module == "keras_qat" else path
        elif isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        else:
            continue
        for name in paths:
            package, *inside = name.split(".")
            if package == "keras_qat":
                yield inside[0] if inside and inside[0] in ORDER else ""


def test_imports_go_one_way():
    for module in filter(room, MODULES):
        own = room(module)
        for other in imported_rooms(module):
            assert other, f"{module} imports from the package itself"
            assert ORDER.index(other) <= ORDER.index(own), f"{module}: {own} is below {other}"
            assert (own, other) not in INDEPENDENT, module


def test_every_room_has_its_place():
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders == set(ORDER) - {"version", "messages"}


KNOW_KERAS = ("keras2", "graph", "tracing", "imports", "training/steps")
"""Rooms that read private attributes of Keras to adapt its layers, models and training."""


def list_modules(*known: str) -> list[Path]:
    """Returns the modules, except those whose paths begin with some names."""
    return [path for path in MODULES if not str(path.relative_to(PACKAGE)).startswith(known)]


def test_private_attributes_of_keras_are_read_in_few_rooms():
    for module in list_modules(*KNOW_KERAS):
        assert not OTHERS_PRIVATE.search(module.read_text("utf-8")), module


def test_warnings_name_the_line_of_the_user():
    """`warn_caller` finds it. A fixed number of frames breaks if a function calls another."""
    warning = [path.name for path in MODULES if "warnings.warn(" in path.read_text("utf-8")]
    assert warning == ["messages.py"]


def test_contrib_is_known_by_its_name_in_the_recipes_only():
    for module in MODULES:
        if not module.name.startswith("contrib_") and module.name != "recipes.py":
            assert not re.findall(r"[!=]= \"contrib\"", module.read_text("utf-8")), module


def displayed(node: ast.expr) -> list[ast.expr]:
    """Returns the entries of a tuple, list or set; for others the expression itself."""
    return node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else [node]


def called(node: ast.expr) -> str:
    """Returns the last component of a name, "" for other expressions."""
    return getattr(node, "id", getattr(node, "attr", ""))


def text_of(node: ast.expr) -> str:
    """Returns a string constant, "" for other expressions."""
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value if is_text else ""


def compared(tree: ast.AST) -> Iterator[ast.expr]:
    """Yields the expressions that a module compares with, in `==`, `is`, `in` or `case`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for operand in (node.left, *node.comparators):
                yield from displayed(operand)
        elif isinstance(node, ast.MatchValue):
            yield node.value


def test_families_are_asked_for_their_fields():
    """Every comparison with a family's name would need a change for a new family."""
    constants = {name.upper() for name in FAMILIES}
    for module in list_modules("arithmetic/kernel_families.py"):
        operands = list(compared(parse(module)))
        assert not {*FAMILIES}.intersection(map(text_of, operands)), module
        assert not constants.intersection(map(called, operands)), module


KNOW_OPERATORS = (
    *("ops", "lowering", "keras2", "helper_layers", "graph", "tracing", "imports"),
    *("training/steps", "rewriting/saving", "rewriting/saved_config"),
    *("integer_graph/passes", "integer_graph/pixel_inputs"),
)
"""Rooms that distinguish operators and layer classes.

They hold operators, convert calls of Keras, or replace patterns of operators.
"""

READ_AS_KERAS = {"BatchNormalization", "Rescaling", "Normalization"}
"""Layers with statistics and options that training and passes read by Keras' names."""


ROW_MODULES = [
    ".".join(("keras_qat", *path.relative_to(PACKAGE).with_suffix("").parts))
    for path in MODULES
    if room(path) == "ops" and path.name != "__init__.py"
]


@functools.cache
def row_constants() -> frozenset[str]:
    """Returns the names that modules give to operators."""
    modules = [vars(importlib.import_module(name)) for name in ROW_MODULES]
    return frozenset(
        name for module in modules for name, value in module.items() if isinstance(value, Op)
    )


def asked_by_name(tree: ast.AST) -> Iterator[str]:
    """Yields expressions of a module that ask which operator or layer it is."""
    constants = row_constants()
    names, classes = (
        {op.name for op in ROWS},
        {layer.__name__ for op in ROWS for layer in op.layers},
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            operands = [leaf for part in (node.left, *node.comparators) for leaf in displayed(part)]
            yield from constants.intersection(getattr(leaf, "id", "") for leaf in operands)
            if called(node.left) == "name":
                yield from names.intersection(map(text_of, operands))
        elif isinstance(node, ast.Call) and called(node.func) == "isinstance":
            yield from classes.intersection(map(called, displayed(node.args[1]))) - READ_AS_KERAS


def test_operators_are_asked_for_the_fields_of_their_rows():
    """Code that asks which operator it is knows something that the operator does not state."""
    for module in list_modules(*KNOW_OPERATORS):
        assert not {*asked_by_name(parse(module))}, module
