"""Draws docstrings and messages of keras_qat, Keras and tfmot for a reader who knows none of them.

    python -m benchmarks.reading draw --seed 1 > build/reading.md
    python -m benchmarks.reading score build/marks.json --seed 1

The reader gets the items without their origin, in random order, and marks each sentence that had to
be read twice. `marks.json` is a list with one object per item, such as {"item": 1, "sentences": 3,
"marked": ["the marked sentence"]}. `score` prints the share of marked sentences for each library.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

LIBRARIES = ("keras_qat", "tf_keras", "tensorflow_model_optimization")
NAMES = re.compile(r"keras_qat|tf_keras|tf\.keras|tfmot|tensorflow_model_optimization")
DOCSTRINGS, MESSAGES = 45, 15
"""Number of items from each library."""
SHORTEST, LONGEST = 40, 25
"""Minimum characters of a message, and maximum lines of a docstring."""


class Item(NamedTuple):
    """A docstring or a message."""

    library: str
    kind: str
    text: str


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("verb", choices=("draw", "score"))
    parser.add_argument("marks", nargs="?", type=Path, help="what the reader has marked")
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    items = draw_items(options.seed)
    if options.verb == "draw":
        for number, item in enumerate(items, 1):
            print(f"### {number} ({item.kind}) {NAMES.sub('lib', item.text)}\n")
    else:
        print_shares(items, json.loads(options.marks.read_text("utf-8")))


def draw_items(seed: int) -> list[Item]:
    """Return random docstrings and messages of all libraries in random order."""
    rng, items = random.Random(seed), list[Item]()
    for library in LIBRARIES:
        found = list(find_items(library))
        for kind, count in (("docstring", DOCSTRINGS), ("message", MESSAGES)):
            items += rng.sample([item for item in found if item.kind == kind], count)
    rng.shuffle(items)
    return items


def find_items(library: str) -> list[Item]:
    """Return all docstrings and messages of a library, without its tests."""
    spec = find_spec(library)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{library} is not installed.")
    root, items = Path(spec.submodule_search_locations[0]), list[Item]()
    for path in sorted(root.rglob("*.py")):
        if "test" in path.relative_to(root).as_posix():
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (
                text := ast.get_docstring(node)
            ):
                lines = "\n".join(text.splitlines()[:LONGEST])
                items.append(Item(library, "docstring", f"{get_signature(node)}\n{lines}"))
            elif text := get_message(node):
                items.append(Item(library, "message", text))
    return items


def get_signature(node: ast.FunctionDef | ast.ClassDef) -> str:
    """Return the first line of a function or a class, without types."""
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    return f"def {node.name}({', '.join(argument.arg for argument in node.args.args)})"


def get_message(node: ast.AST) -> str:
    """Return the code of a message that `raise` or `warn` prints. Return "" for other code."""
    call = node.exc if isinstance(node, ast.Raise) else node
    if not isinstance(call, ast.Call) or not call.args:
        return ""
    is_warning = ast.unparse(call.func).endswith("warn")
    text = ast.unparse(call.args[0]) if isinstance(node, ast.Raise) or is_warning else ""
    return text if len(text) > SHORTEST else ""


def print_shares(items: list[Item], marks: list[dict[str, object]]) -> None:
    """Print the share of marked sentences and items for each library and kind."""
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for mark in marks:
        item, marked = items[int(str(mark["item"])) - 1], mark["marked"]
        assert isinstance(marked, list)
        added = (int(str(mark["sentences"])), len(marked), 1, bool(marked))
        sums[item.library, item.kind] = [
            a + b for a, b in zip(sums[item.library, item.kind], added, strict=True)
        ]
    print("| library | kind | sentences | marked, % | items marked, % |")
    print("| --- | --- | --- | --- | --- |")
    for (library, kind), (sentences, marked, count, hit) in sorted(sums.items()):
        shares = f"{100 * marked / sentences:.0f} | {100 * hit / count:.0f}"
        print(f"| {library} | {kind} | {sentences} | {shares} |")


if __name__ == "__main__":
    main()
