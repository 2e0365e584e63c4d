"""Write docs/operators.md from the operators: `python docs/operators.py`."""

from __future__ import annotations

from keras_qat.graph.operations import NAMES
from keras_qat.ops.all_ops import ROWS
from keras_qat.ops.op import FixedRange, Op, SharedRange

HEAD = """# Operators

Look up the names of the operators that are computed in integers, and the attributes to pass to
`register_op`. Attributes in brackets are optional. `python docs/operators.py > docs/operators.md`
writes this page from the operators in `keras_qat/ops`.

Each operator is compared with TFLite's interpreter in tests, with random options, shapes, ranges
and weights, for all kernels and for the bits listed here. If a number of bits has kernels in
brackets, only these kernels support it.

| operator | layers, functions and operations | bits | output range | attributes |
| --- | --- | --- | --- | --- |
"""


def page() -> str:
    """The page as Markdown."""
    return HEAD + "".join(f"{_row(op)}\n" for op in ROWS)


def _row(op: Op) -> str:
    named = [f"`{layer.__name__}`" for layer in op.layers]
    named += [f"`{path.split('.')[-1]}`" for path in op.paths]
    functions = [f"{getattr(function, '__name__', function)}" for function in op.functions]
    named += [f"`{name}`" for name in dict.fromkeys(functions)]
    names = [name for kind in op.kinds for name in NAMES[kind] if not name.startswith("__")]
    named += [f"`tf.{name}`" for name in names]
    bits = ", ".join(_bits(op, count) for count in op.bits)
    attributes = [f"`{name}`" for name in op.needs]
    attributes += [f"[`{name}`]" for name in op.defaults]
    what = ": ".join(text for text in (op.doc, ", ".join(named)) if text)
    cells = (f"`{op.name}`", what, bits, _range(op), ", ".join(attributes))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _bits(op: Op, bits: int) -> str:
    label = "2 to 8" if bits == 8 else str(bits)
    only = " or ".join(f"`{name}`" for name in op.only_families(bits))
    return f"{label} ({only})" if only else label


def _range(op: Op) -> str:
    if op.alias:
        return "not computed"
    if isinstance(op.output, SharedRange):
        return "same as the input" + (", rounded" if op.output.rounds else "")
    if isinstance(op.output, FixedRange):
        return f"{op.output.minimum:g} to {op.output.maximum:g}"
    return "observed"


if __name__ == "__main__":
    print(page(), end="")
